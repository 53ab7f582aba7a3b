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
from dataclasses import dataclass, field

import numpy as np

from lightning_hetpipe.planner.chain import Array, Bools, Chain, Ints, Placement, fill_s, longest
from lightning_hetpipe.planner.cost import steps_ahead
from lightning_hetpipe.planner.relax import price

_BATCH = 48  # caps that are relaxed together
_PIECES = 6  # children of an interval
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
    rounds: int = 8
    slack: float = 0.05


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
        period = longest(self.chain, starts, choices)
        if not _fits(self.chain, starts, choices, period):
            period = cap
        objective = fill_s(self.chain, starts, choices) + (self.chain.n_micro_batches - 1) * period
        known = self.found.get((starts, choices))
        if known is None or objective < known.objective_s:
            self.found[starts, choices] = Placement(starts, choices, objective, period)
            self.upper_s = min(self.upper_s, objective)

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
    _add_singles(search)
    bound = np.inf
    caps = _caps(chain)
    level = [
        (low, high, np.zeros(len(chain.available))) for low, high in _split(caps, 0, len(caps) - 1, _BATCH)
    ]
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
            if (whole or rank < 2) and allowed:
                lower = max(lower, _grow(search, caps[high], caps[low], before, prices))
            if whole or lower >= search.upper_s * (1 - tolerance) or not allowed:
                bound = min(bound, lower)
            else:
                level += [(a, b, prices) for a, b in _split(caps, low, high, _PIECES)]
    ranked = sorted(search.found.values(), key=lambda p: (p.objective_s, len(p.starts), p.starts, p.choices))
    best = ranked[0].objective_s if ranked else np.inf
    return Placements(tuple(ranked[:keep]), float(min(bound, best)))


def _add_singles(search: _Search) -> None:
    """The whole model on one device: the first cost to beat."""
    chain = search.chain
    if chain.n_stages not in (None, 1):
        return
    for choice in np.flatnonzero(np.isfinite(chain.last_s)):
        if (chain.uses[choice] <= chain.available).all() and _fits(chain, (0,), (int(choice),), np.inf):
            search.add((0,), (int(choice),), np.inf)


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


@dataclass(frozen=True)
class _Labels:
    """Partial placements that begin at one layer; ``stop`` and ``parent`` lead to the stage after."""

    choice: Ints
    used: Ints  # [labels, pools]
    k: Ints
    cost_s: Array
    stop: Ints
    parent: Ints

    def at(self, index: Ints) -> "_Labels":
        return _Labels(
            self.choice[index],
            self.used[index],
            self.k[index],
            self.cost_s[index],
            self.stop[index],
            self.parent[index],
        )


def _grow(search: _Search, cap: float, low_cap: float, before: Array, prices: Array) -> float:
    """Grows labels under one cap, collects placements, and returns a bound for caps in ``[low_cap, cap]``."""
    chain, threshold = search.chain, search.threshold_s
    search.searches += 1
    n, pools = chain.n_layers, len(chain.available)
    rest_s = (chain.n_micro_batches - 1) * low_cap
    zero = np.zeros(1, dtype=np.int64)
    end = _Labels(zero, np.zeros((1, pools), dtype=np.int64), zero, np.zeros(1), zero, zero - 1)
    table: list[_Labels | None] = [None] * n + [end]
    bound = threshold
    for start in range(n - 1, -1, -1):
        reach = (chain.seconds[:, start + 1 :] - chain.seconds[:, start, None] <= cap).any(axis=0)
        stops = start + 1 + np.flatnonzero(reach)
        after = [labels for stop in stops if (labels := table[stop]) is not None]
        if not after:
            continue
        follower = _concatenate(after)
        stop = np.repeat([s for s in stops if table[s] is not None], [len(labels.k) for labels in after])
        parent = np.concatenate([np.arange(len(labels.k)) for labels in after])
        grown = [
            _extend(chain, follower, choice, start, stop, parent, cap) for choice in range(chain.n_choices)
        ]
        labels = _concatenate(grown)
        left = chain.available[None, :] - labels.used
        promise = labels.cost_s + before[labels.choice, start] - left @ prices + rest_s
        alive = np.flatnonzero(promise < threshold)
        labels, promise = labels.at(alive), promise[alive]
        order = _undominated(labels, with_k=chain.memory is not None)
        labels, promise = labels.at(order), promise[order]
        if len(promise) > search.budget.labels:
            order = np.argpartition(promise, search.budget.labels)
            bound = min(bound, float(promise[order[search.budget.labels :]].min()))
            labels = labels.at(order[: search.budget.labels])
        table[start] = labels
    whole = table[0]
    if whole is None or not len(whole.cost_s):
        return bound
    if chain.n_stages is not None:
        whole = whole.at(np.flatnonzero(whole.used[:, -1] == chain.n_stages))
    for index in np.argsort(whole.cost_s, kind="stable")[: search.keep]:
        search.add(*_trace(table, whole, int(index)), cap)
    return min(bound, float(whole.cost_s.min(initial=np.inf)) + rest_s)


def _extend(
    chain: Chain, after: _Labels, choice: int, start: int, stop: Ints, parent: Ints, cap: float
) -> _Labels:
    """Puts a stage on ``choice``, from layer ``start``, before every label that it can reach.

    Args:
        chain: The problem.
        after: Labels within reach.
        choice: Who holds the new stage.
        start: Its first layer.
        stop: Where each label begins.
        parent: The index of each label at its layer.
        cap: The longest stage or link time.
    """
    n = chain.n_layers
    seconds = chain.seconds[choice, stop] - chain.seconds[choice, start]
    last = stop == n
    seconds = np.where(last, seconds + chain.last_s[choice], seconds)
    possible = (seconds <= cap) & (last | bool(chain.inner[choice]))
    possible &= (after.used + chain.uses[choice] <= chain.available).all(axis=1)
    possible &= chain.occupied_s[choice, after.choice, stop] <= cap
    index = np.flatnonzero(possible)
    stop, seconds, last = stop[index], seconds[index], last[index]
    hop = chain.hop_s[choice, after.choice[index], stop]
    k = _in_flight(chain, after.k[index], seconds + hop, cap, last)
    if chain.memory is not None:
        fits = np.flatnonzero(chain.memory.fits(np.asarray(choice), np.asarray(start), stop, k))
        index, stop, seconds, hop, k = index[fits], stop[fits], seconds[fits], hop[fits], k[fits]
    used = after.used[index] + chain.uses[choice]
    cost = after.cost_s[index] + hop + seconds
    return _Labels(np.full_like(index, choice), used, k, cost, stop, parent[index])


def _in_flight(chain: Chain, after: Ints, seconds: Array, cap: float, last: Bools) -> Ints:
    """Micro-batches that a stage holds when the stage after it holds ``after``."""
    if chain.memory is None or chain.depth in ("all", "serial"):
        return np.full_like(after, chain.first_k)
    periods: Ints | int = 1
    if chain.depth == "safe":
        periods = np.maximum(np.ceil(seconds / cap - _ROUNDING).astype(np.int64), 1)
    return np.where(last, chain.first_k, np.minimum(chain.n_micro_batches, after + periods))


def _undominated(labels: _Labels, *, with_k: bool) -> Ints:
    """The cheapest label of every state (holder, devices used, in flight)."""
    state = np.column_stack([labels.choice, labels.used, labels.k if with_k else np.zeros_like(labels.k)])
    order = np.lexsort([labels.cost_s, *state.T])
    sorted_state = state[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (sorted_state[1:] != sorted_state[:-1]).any(axis=1)
    return order[first]


def _concatenate(parts: list[_Labels]) -> _Labels:
    if len(parts) == 1:
        return parts[0]
    names = ("choice", "used", "k", "cost_s", "stop", "parent")
    return _Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _trace(
    table: list[_Labels | None], labels: _Labels, index: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    starts, choices, start = [], [], 0
    while True:
        starts.append(start)
        choices.append(int(labels.choice[index]))
        start, index = int(labels.stop[index]), int(labels.parent[index])
        following = table[start]
        assert following is not None
        if start == len(table) - 1:
            return tuple(starts), tuple(choices)
        labels = following


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
