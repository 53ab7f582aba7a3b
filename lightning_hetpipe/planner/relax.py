"""A lower bound on ``Σt + Σhop`` under a cap on stage times: devices are priced instead of counted.

    bound(T, price) = min over chains with stages <= T of  Σ t + Σ hop + Σ price(choice)  -  price . available

For any non-negative prices no placement within the devices at hand is cheaper (Lagrange). Without counts
the state is only (layers done, choice), so many caps ``T`` are solved at once.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hetpipe.planner.chain import Array, Chain, Ints


@dataclass(frozen=True)
class Relaxed:
    """The bound for several caps at once.

    Attributes:
        before_s: ``[caps, choices, layers + 1]``: the least priced cost of all layers before a stage that
            starts there on that choice, hop included.
        bound_s: ``[caps]``.
        used: ``[caps, pools]``: devices that the relaxed optimum takes.
    """

    before_s: Array
    bound_s: Array
    used: Array


def relax(chain: Chain, caps: Array, prices: Array) -> Relaxed:
    """Solves the priced problem.

    Args:
        chain: The placement problem.
        caps: ``[caps]`` seconds.
        prices: ``[caps, pools]`` seconds per device taken.
    """
    n, c, n_layers = len(caps), chain.n_choices, chain.n_layers
    fee = prices @ chain.uses.T.astype(float)  # [caps, choices]
    before = np.full((n, c, n_layers + 1), np.inf)
    before[:, :, 0] = 0.0
    began = np.zeros((n, c, n_layers + 1), dtype=np.int64)  # where the best run that stops here begins
    holder = np.zeros((n, c, n_layers + 1), dtype=np.int64)  # who holds the run before one that starts here
    cap = caps[:, None, None]
    reach = float(caps.max())
    row, column = np.arange(n)[:, None], np.arange(c)[None, :]
    done = np.zeros((n, c))
    for stop in range(1, n_layers + 1):
        seconds = chain.seconds[:, stop, None] - chain.seconds[:, :stop]
        low = int(np.argmax((seconds <= reach).any(axis=0)))
        seconds = seconds[:, low:]
        if stop == n_layers:
            seconds = seconds + chain.last_s[:, None]
        if chain.allowed is not None:
            seconds = np.where(chain.allowed[:, low:stop, stop], seconds, np.inf)
        total = np.where(seconds <= cap, before[:, :, low:stop] + seconds, np.inf)
        start = total.argmin(axis=2)
        done = total[row, column, start] + fee
        began[:, :, stop] = low + start
        if stop < n_layers:
            hop = np.where(chain.occupied_s[None, :, :, stop] <= cap, chain.hop_s[:, :, stop], np.inf)
            through = np.where(chain.inner[None, :], done, np.inf)[:, :, None] + hop
            source = through.argmin(axis=1)
            before[:, :, stop] = through[row, source, column]
            holder[:, :, stop] = source
    best = done.argmin(axis=1)
    bound = done[np.arange(n), best] - prices @ chain.available.astype(float)
    return Relaxed(before, bound, _used(chain, began, holder, best))


def _used(chain: Chain, began: Ints, holder: Ints, choice: Ints) -> Array:
    """Devices of each relaxed optimum, from its last stage to its first."""
    rows = np.arange(len(choice))
    stop = np.full(len(choice), chain.n_layers)
    used = np.zeros((len(choice), len(chain.available)))
    while stop.any():
        used += np.where((stop > 0)[:, None], chain.uses[choice], 0)
        stop = began[rows, choice, stop]
        choice = holder[rows, choice, stop]
    return used


def price(chain: Chain, caps: Array, prices: Array, targets: Array, rounds: int) -> tuple[Array, Relaxed]:
    """Raises the bound by subgradient steps: dearer where too many devices are taken.

    Args:
        chain: The placement problem.
        caps: ``[caps]`` seconds.
        prices: Where to start, ``[caps, pools]``.
        targets: ``[caps]``: what the bound should reach to be of use.
        rounds: Steps at most; fewer once every relaxed optimum is a placement.

    Returns:
        The best prices found and their solution.
    """
    best_prices, best = prices, relax(chain, caps, prices)
    found, stretch, direction = best, np.full(len(caps), 1.0), np.zeros_like(prices)
    for _ in range(rounds):
        reachable = np.isfinite(found.bound_s)
        excess = np.where(reachable[:, None], found.used - chain.available, 0.0)
        slope = np.where((prices <= 0) & (excess < 0), 0.0, excess)
        if not slope.any():
            break
        # A step that turns back on the last one is bent away from it (Camerini, Fratta, Maffioli 1975).
        turn = -1.5 * (slope * direction).sum(axis=1) / np.maximum((direction**2).sum(axis=1), 1e-300)
        direction = (
            np.where((slope != 0).any(axis=1)[:, None], slope, 0.0)
            + np.maximum(turn, 0.0)[:, None] * direction
        )
        norm = (direction**2).sum(axis=1)
        bound = np.where(reachable, found.bound_s, 0.0)
        gap = np.maximum(np.where(np.isfinite(targets), targets, bound * 1.1) - bound, 0.0)
        step = np.divide(stretch * gap, norm, out=np.zeros_like(norm), where=norm > 0)
        if not step.any():
            break
        prices = np.maximum(prices + step[:, None] * direction, 0.0)
        found = relax(chain, caps, prices)
        better = found.bound_s > best.bound_s
        stretch = np.where(better, stretch, stretch * 0.85)
        best_prices = np.where(better[:, None], prices, best_prices)
        best = Relaxed(
            np.where(better[:, None, None], found.before_s, best.before_s),
            np.where(better, found.bound_s, best.bound_s),
            np.where(better[:, None], found.used, best.used),
        )
    return best_prices, best
