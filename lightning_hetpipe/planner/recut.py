"""Moves the cuts of a placement, its devices fixed: from a thin chain to the full one.

Every cut may go anywhere between its two neighbours of before. Under one cap on stage and link times the
cheapest cuts follow from a table, stage after stage; a few caps below the period of before are tried.
"""

from collections.abc import Callable, Sequence

import numpy as np

from lightning_hetpipe.planner.chain import Bools, Chain, Ints, Placement

_CAPS = np.geomspace(0.75, 1.0, 16)  # of the period of before


def recut(chain: Chain, placement: Placement, price: Callable[[tuple[int, ...]], Placement]) -> Placement:
    """The best of a placement and its variants with moved cuts.

    Args:
        chain: With all cuts.
        placement: In terms of that chain.
        price: Makes a placement of first layers, the devices being those of ``placement``.
    """
    best = placement
    for cap in placement.period_s * _CAPS:
        starts = _cheapest(chain, placement, float(cap))
        if starts is not None:
            best = min(best, price(starts), key=lambda found: found.objective_s)
    return best


def _cheapest(chain: Chain, placement: Placement, cap_s: float) -> tuple[int, ...] | None:
    """First layers of least fill under the cap, or None."""
    choices, edges = placement.choices, (*placement.starts, chain.n_layers)
    windows = [np.arange(low + 1, high) for low, high in zip(edges, edges[2:])]
    windows = [np.zeros(1, dtype=np.int64), *windows, np.array([chain.n_layers])]
    cost, origins = np.zeros(1), []
    for stage, (choice, starts, stops) in enumerate(zip(choices, windows, windows[1:])):
        seconds = chain.seconds[choice, stops][None] - chain.seconds[choice, starts][:, None]
        if stage == len(choices) - 1:
            seconds = seconds + chain.last_s[choice]
        open_ = (starts[:, None] < stops[None]) & (seconds <= cap_s) & _fits(chain, choice, starts, stops)
        total = np.where(open_, cost[:, None] + seconds, np.inf)
        origin = total.argmin(axis=0)
        cost = total[origin, np.arange(len(stops))]
        if stage < len(choices) - 1:
            after = choices[stage + 1]
            crossed = chain.occupied_s[choice, after, stops] <= cap_s
            cost = np.where(crossed, cost + chain.hop_s[choice, after, stops], np.inf)
        origins.append(origin)
    return _trace(windows, origins) if np.isfinite(cost[0]) else None


def _fits(chain: Chain, choice: int, starts: Ints, stops: Ints) -> Bools | bool:
    """Whether runs fit with the fewest micro-batches in flight."""
    if chain.memory is None:
        return True
    return chain.memory.fits(np.asarray(choice), starts[:, None], stops[None], chain.first_k)


def _trace(windows: Sequence[Ints], origins: Sequence[Ints]) -> tuple[int, ...]:
    starts, index = [], 0
    for window, origin in zip(reversed(windows[:-1]), reversed(origins)):
        index = int(origin[index])
        starts.append(int(window[index]))
    return tuple(reversed(starts))
