"""The best placement of a chain: which layers, on whom, in which order.

    minimise   Σ t_s + Σ hop_s + (M-1) T        T >= every stage and link time, memory, devices at hand

Caps ``T`` are tried in intervals. A relaxation (`relax`) bounds what any placement under a cap can
reach, and discards most intervals at once. In the others, labels (first layer, holder, devices used, in
flight) grow from the last stage to the first, so that in-flight counts are known when memory is checked;
a label dies as soon as its cost plus the relaxation's bound of what is before it cannot win. With
``tolerance`` 0 and labels within budget the result is exact; otherwise `Placements.gap` says how far
from it at most.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from lightning_hetpipe.planner.chain import Array, Chain, Placement, fill_s, longest
from lightning_hetpipe.planner.coarsen import thin
from lightning_hetpipe.planner.cost import steps_ahead
from lightning_hetpipe.planner.labels import Task, grow
from lightning_hetpipe.planner.recut import recut
from lightning_hetpipe.planner.relax import price

_BATCH = 32  # caps that are relaxed together
_PIECES = 6  # children of an interval
_SEEDS = 8  # caps of the hasty searches
_NARROWED = 4  # times that the range of caps is narrowed by hasty searches, while they improve
_RECUT = 6  # placements of a thin chain that are cut again
_HASTY = 64  # labels per layer of a hasty search
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Budget:
    """How hard to look.

    Attributes:
        labels: Labels kept per layer; more are cut off, and the bound notes it.
        searches: Caps for which labels are grown.
        rounds: Steps of the relaxation's prices.
        slack: How much worse than the best a placement may be and still be collected.
    """

    labels: int = 20_000
    searches: int = 400
    rounds: int = 16
    slack: float = 0.03


@dataclass(frozen=True)
class Placements:
    """The best placements, best first, and a bound on what any could reach."""

    found: tuple[Placement, ...]
    bound_s: float

    @property
    def gap(self) -> float:
        """How much faster than the first one a placement could be at most, as a fraction."""
        if not self.found:
            return 0.0
        return max(0.0, 1 - self.bound_s / self.found[0].objective_s)


@dataclass
class _Search:
    """The placements found so far, and the cost to beat."""

    chain: Chain
    keep: int
    budget: Budget
    upper_s: float
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Placement] = field(default_factory=dict)
    searches: int = 0

    def add(self, starts: tuple[int, ...], choices: tuple[int, ...], cap: float) -> None:
        placement = priced(self.chain, starts, choices, cap)
        known = self.found.get((starts, choices))
        if known is None or placement.objective_s < known.objective_s:
            self.found[starts, choices] = placement
            self.upper_s = min(self.upper_s, placement.objective_s)

    @property
    def threshold_s(self) -> float:
        """What a label may promise and still be worth following."""
        if len(self.found) < self.keep:
            return self.upper_s * (1 + self.budget.slack)
        ranked = sorted(placement.objective_s for placement in self.found.values())
        return min(ranked[self.keep - 1], self.upper_s * (1 + self.budget.slack))


def place(
    chain: Chain,
    *,
    keep: int = 20,
    tolerance: float = 0.0,
    upper_s: float = np.inf,
    budget: Budget | None = None,
) -> Placements:
    """Searches all orders, cuts and subsets of devices.

    Args:
        chain: The problem.
        keep: Placements to return at most.
        tolerance: Relative loss that is accepted for speed.
        upper_s: Cost that a placement must beat to be of interest.
        budget: Limits; none that matter for small problems by default.

    Returns:
        No placements where nothing fits (or beats ``upper_s``).
    """
    search = _Search(chain, keep, budget or Budget(), upper_s)
    caps = _caps(chain)
    if not len(caps) or not _seed(search, caps):
        return Placements((), np.inf)
    bound = np.inf
    if chain.n_micro_batches > 1:
        for _ in range(_NARROWED):
            before_s, caps = search.upper_s, _useful(search, caps)
            _seed_between(search, caps)
            if search.upper_s > 0.98 * before_s:
                break
        caps = _useful(search, caps)
    no_prices = np.zeros(len(chain.available))
    level = [(low, high, no_prices) for low, high in _split(caps, 0, len(caps) - 1, _BATCH)]
    while level:
        survivors: list[tuple[float, int, int, Array, Array]] = []
        for batch in (level[i : i + _BATCH] for i in range(0, len(level), _BATCH)):
            for entry, lower, prices, before in _bounds(search, caps, batch):
                survivors.append((lower, entry[0], entry[1], prices, before))
        survivors.sort(key=lambda entry: entry[0])
        level = []
        for rank, (lower, low, high, prices, before) in enumerate(survivors):
            if lower >= search.upper_s * (1 - tolerance) - _ROUNDING * search.upper_s:
                bound = min(bound, max(lower, 0.0))
                continue
            whole = low == high or caps[high] <= caps[low] * (1 + tolerance)
            allowed = search.searches < search.budget.searches
            labels = search.budget.labels
            if (whole or rank < 2) and allowed:
                search.searches += 1
                lower = max(lower, _grow(search, caps[high], caps[low], before, prices, labels))
            if whole or lower >= search.upper_s * (1 - tolerance):
                bound = min(bound, lower)
            else:
                level += [(a, b, prices) for a, b in _split(caps, low, high, _PIECES)]
    ranked = sorted(search.found.values(), key=lambda p: (p.objective_s, len(p.starts), p.starts, p.choices))
    best = ranked[0].objective_s if ranked else np.inf
    return Placements(tuple(ranked[:keep]), float(min(bound, best)))


def place_thinly(
    chain: Chain, most: int, *, tolerance: float, upper_s: float, budget: Budget
) -> tuple[Placements, bool]:
    """`place` on at most so many cuts of the chain, then cut again on all of them.

    Returns:
        Placements in terms of the chain; and whether their bound holds: not where cuts were left out, then
        ask `lower_bound_s`.
    """
    coarse, cuts = thin(chain, most)
    found = place(coarse, tolerance=tolerance, upper_s=upper_s, budget=budget)
    if coarse is chain:
        return found, True
    moved = []
    for rough in found.found[:_RECUT]:
        starts = tuple(int(cuts[start]) for start in rough.starts)
        placement = replace(rough, starts=starts)

        def again(starts: tuple[int, ...], choices: tuple[int, ...] = rough.choices) -> Placement:
            return priced(chain, starts, choices, np.inf)

        moved.append(recut(chain, placement, again))
    moved.sort(key=lambda placement: placement.objective_s)
    return Placements(tuple(moved), found.bound_s), False


def lower_bound_s(chain: Chain, upper_s: float) -> float:
    """No placement has a smaller objective, nor is the answer above ``upper_s``, that of a known one."""
    search = _Search(chain, 1, Budget(rounds=6), upper_s)
    caps = _caps(chain)
    if chain.n_micro_batches > 1:
        caps = _useful(search, caps)
    no_prices = np.zeros(len(chain.available))
    level = [(low, high, no_prices) for low, high in _split(caps, 0, len(caps) - 1, _BATCH)]
    ranked = sorted(_bounds(search, caps, level), key=lambda entry: entry[1])
    # The least bounds are raised by cutting their intervals finer; the others stand.
    least, others = ranked[: _BATCH // _PIECES], ranked[_BATCH // _PIECES :]
    level = [
        (a, b, prices) for (low, high), _, prices, _ in least for a, b in _split(caps, low, high, _PIECES)
    ]
    return min([lower for _, lower, _, _ in (*others, *_bounds(search, caps, level))], default=upper_s)


def priced(chain: Chain, starts: tuple[int, ...], choices: tuple[int, ...], cap: float) -> Placement:
    """A placement with its period and objective; the period is ``cap`` where less does not fit."""
    period = longest(chain, starts, choices)
    if not _fits(chain, starts, choices, period):
        period = cap
    objective = fill_s(chain, starts, choices) + (chain.n_micro_batches - 1) * period
    return Placement(starts, choices, objective, period)


def _seed(search: _Search, caps: Array) -> bool:
    """Costs to beat: one device alone, or the cheapest placement under no cap.

    False where nothing fits: what fits under a cap fits under a longer one.
    """
    chain = search.chain
    for choice in np.flatnonzero(np.isfinite(chain.last_s)):
        possible = chain.n_stages in (None, 1) and (chain.uses[choice] <= chain.available).all()
        if possible and _fits(chain, (0,), (int(choice),), np.inf):
            search.add((0,), (int(choice),), np.inf)
    if np.isfinite(search.upper_s):
        return True
    no_prices = np.zeros((1, len(chain.available)))
    prices, relaxed = price(chain, caps[-1:], no_prices, np.array([np.inf]), search.budget.rounds // 2)
    cheapest = _grow(search, caps[-1], caps[0], relaxed.before_s[0], prices[0], search.budget.labels)
    return bool(np.isfinite(cheapest))


def _seed_between(search: _Search, caps: Array) -> None:
    """Hasty searches under a few of the caps, evenly apart in their logarithm, the least one left out."""
    chain = search.chain
    marks = np.geomspace(max(caps[0], 1e-12), caps[-1], _SEEDS)[1:]
    chosen = caps[np.unique(np.searchsorted(caps, marks).clip(0, len(caps) - 1))]
    no_prices = np.zeros((len(chosen), len(chain.available)))
    targets = search.upper_s - (chain.n_micro_batches - 1) * chosen
    prices, relaxed = price(chain, chosen, no_prices, targets, search.budget.rounds // 2)
    for row, cap in enumerate(chosen):
        lower = relaxed.bound_s[row] + (chain.n_micro_batches - 1) * cap
        if lower < search.upper_s:
            _grow(search, cap, cap, relaxed.before_s[row], prices[row], _HASTY)


def _useful(search: _Search, caps: Array) -> Array:
    """The caps that alone do not cost more than the best placement yet."""
    longest_s = search.upper_s / (search.chain.n_micro_batches - 1)
    return caps[: max(1, np.searchsorted(caps, longest_s, "right"))]


def _caps(chain: Chain) -> Array:
    """Every value that ``T`` can take: stage and link times, ascending."""
    starts, stops = np.triu_indices(chain.n_layers + 1, k=1)
    values = []
    for choice in range(chain.n_choices):
        seconds = chain.seconds[choice, stops] - chain.seconds[choice, starts]
        whole = stops == chain.n_layers
        seconds = np.where(whole, seconds + chain.last_s[choice], seconds)
        if chain.allowed is not None:
            seconds = seconds[chain.allowed[choice, starts, stops]]
        values.append(seconds)
    values.append(chain.occupied_s[:, :, 1:-1].ravel())
    flat = np.concatenate(values)
    flat = np.unique(flat[np.isfinite(flat)])
    # No cap below the slowest layer's fastest time can hold the model.
    least = np.diff(chain.seconds, axis=1).min(axis=0).max()
    useful = np.asarray(flat[flat >= least * (1 - _ROUNDING)], dtype=float)
    return useful[-1:] if chain.n_micro_batches == 1 else useful


def _split(caps: Array, low: int, high: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Index intervals that cover ``low..high``, equally wide in the logarithm of the cap."""
    if high < low:
        return
    if caps[low] > 0:
        marks = np.geomspace(caps[low], caps[high], pieces + 1)[1:]
    else:
        marks = np.linspace(caps[low], caps[high], pieces + 1)[1:]
    marks[-1] = caps[high]
    ends = np.searchsorted(caps[low : high + 1], marks, side="right") - 1 + low
    if high - low < pieces:
        ends = np.arange(low, high + 1)
    start = low
    for end in np.unique(np.append(ends, high)):
        if end >= start:
            yield start, int(end)
            start = int(end) + 1


def _bounds(
    search: _Search, caps: Array, batch: list[tuple[int, int, Array]]
) -> Iterator[tuple[tuple[int, int], float, Array, Array]]:
    """A lower bound for every interval that is still open."""
    chain = search.chain
    extra = (chain.n_micro_batches - 1) * caps[[low for low, _, _ in batch]]
    keep = [i for i in range(len(batch)) if extra[i] < search.upper_s]
    if not keep:
        return
    ends = caps[[batch[i][1] for i in keep]]
    prices = np.stack([batch[i][2] for i in keep])
    targets = search.upper_s - extra[keep]
    prices, relaxed = price(chain, ends, prices, targets, search.budget.rounds)
    for row, i in enumerate(keep):
        lower = float(relaxed.bound_s[row] + extra[i])
        if lower < search.upper_s:
            yield (batch[i][0], batch[i][1]), lower, prices[row], relaxed.before_s[row]


def _grow(search: _Search, cap: float, low_cap: float, before: Array, prices: Array, most: int) -> float:
    """Collects placements under a cap, and returns a bound on what caps in ``[low_cap, cap]`` can give."""
    rest_s = (search.chain.n_micro_batches - 1) * low_cap
    task = Task(cap, rest_s, before, prices, search.threshold_s, most, search.keep)
    routes, bound = grow(search.chain, task)
    for starts, choices in routes:
        search.add(starts, choices, cap)
    return bound


def _fits(chain: Chain, starts: tuple[int, ...], choices: tuple[int, ...], period: float) -> bool:
    """Whether every stage has memory for the in-flight counts of this period."""
    if chain.memory is None:
        return True
    counts = in_flight(chain, starts, choices, period)
    stops = (*starts[1:], chain.n_layers)
    return all(
        bool(chain.memory.fits(np.asarray(choice), np.asarray(start), np.asarray(stop), k))
        for choice, start, stop, k in zip(choices, starts, stops, counts)
    )


def in_flight(
    chain: Chain, starts: tuple[int, ...], choices: tuple[int, ...], period: float
) -> tuple[int, ...]:
    """In-flight counts of a placement under the chain's depth, for a period of ``period`` seconds."""
    m, stops = chain.n_micro_batches, (*starts[1:], chain.n_layers)
    counts = [chain.first_k]
    for stage in range(len(starts) - 2, -1, -1):
        u, v, cut = choices[stage], choices[stage + 1], stops[stage]
        ahead = {"all": 0, "serial": 0, "shallow": 1}.get(chain.depth)
        if ahead is None:
            ahead = steps_ahead(chain.run_s(u, starts[stage], cut) + float(chain.hop_s[u, v, cut]), period)
        counts.append(min(m, counts[-1] + ahead))
    return tuple(reversed(counts))
