"""Grows partial placements from the last stage to the first, under one cap on stage and link times.

A label is a partial placement: the layer it begins at, who holds its first stage, how many devices of
each pool it has used, and how many micro-batches its first stage holds. All labels lie in one
table, those of later layers first, so that the labels within reach of a layer are one slice of it.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hetpipe.planner.chain import Array, Bools, Chain, Ints

_START, _CHOICE, _K, _PARENT, _USED = range(5)
_ROUNDING = 1e-9
Route = tuple[tuple[int, ...], tuple[int, ...]]  # first layers, choices


@dataclass(frozen=True)
class Task:
    """What to grow.

    Attributes:
        cap_s: The longest stage or link time.
        rest_s: What every placement costs besides its fill: ``(M-1)`` times the least period in question.
        before_s: ``[choices, layers + 1]`` bound on what comes before a stage (`relax`).
        prices: ``[pools]`` that the bound was computed with.
        threshold_s: Labels that cannot stay below it die.
        most: Labels kept per layer.
        keep: Placements to return at most.
    """

    cap_s: float
    rest_s: float
    before_s: Array
    prices: Array
    threshold_s: float
    most: int
    keep: int


class _Table:
    """State and cost of every label; `first` says where those that begin at or before a layer start."""

    def __init__(self, n_layers: int, n_pools: int) -> None:
        self.state = np.zeros((4096, _USED + n_pools), dtype=np.int64)
        self.cost_s = np.zeros(4096)
        self.priced_s = np.zeros(4096)  # cost, and the price of the devices used
        self.state[0, _START], self.state[0, _PARENT] = n_layers, -1
        self.count = 1
        self.first = np.zeros(n_layers + 1, dtype=np.int64)

    def append(self, start: int, state: Ints, cost_s: Array, priced_s: Array) -> None:
        self.first[start] = self.count
        while self.count + len(cost_s) > len(self.cost_s):
            self.state = np.concatenate([self.state, np.zeros_like(self.state)])
            self.cost_s = np.concatenate([self.cost_s, np.zeros_like(self.cost_s)])
            self.priced_s = np.concatenate([self.priced_s, np.zeros_like(self.priced_s)])
        end = self.count + len(cost_s)
        self.state[self.count : end], self.cost_s[self.count : end] = state, cost_s
        self.priced_s[self.count : end] = priced_s
        self.count = end

    def trace(self, index: int) -> Route:
        starts, choices = [], []
        while index > 0:
            starts.append(int(self.state[index, _START]))
            choices.append(int(self.state[index, _CHOICE]))
            index = int(self.state[index, _PARENT])
        return tuple(starts), tuple(choices)


def grow(chain: Chain, task: Task) -> tuple[list[Route], float]:
    """The cheapest placements under the cap, and a bound on all of them.

    Returns:
        Placements that fit, cheapest first; and the least that a placement can cost with the given
        ``rest_s``: exact unless labels were cut off or had no chance to stay below the threshold.
    """
    n = chain.n_layers
    table = _Table(n, len(chain.available))
    bound = task.threshold_s
    for start in range(n - 1, -1, -1):
        reach = chain.seconds[:, start + 1 :] - chain.seconds[:, start, None] <= task.cap_s
        width = int(reach.sum(axis=1).max())
        if width == 0:
            table.append(start, table.state[:0], table.cost_s[:0], table.cost_s[:0])
            continue
        state, cost, priced, promise = _extend(chain, task, table, start, start + width)
        alive, bound = _best(np.arange(len(cost)), promise, 8 * task.most, bound)
        alive = alive[_undominated(chain, state[alive], cost[alive])]
        alive, bound = _best(alive, promise, task.most, bound)
        table.append(start, state[alive], cost[alive], priced[alive])
    whole = np.arange(table.first[0], table.count)
    if chain.n_stages is not None:
        whole = whole[table.state[whole, -1] == chain.n_stages]
    ranked = whole[np.argsort(table.cost_s[whole], kind="stable")][: task.keep]
    if len(ranked):
        bound = min(bound, float(table.cost_s[ranked[0]]) + task.rest_s)
    return [table.trace(int(index)) for index in ranked], bound


def _extend(
    chain: Chain, task: Task, table: _Table, start: int, reach: int
) -> tuple[Ints, Array, Array, Array]:
    """Puts a stage, on every choice, from layer ``start`` before every label up to ``reach``.

    Returns:
        State, cost and priced cost of the labels that stay below the threshold, and their promise: the
        least that a placement which ends with each can cost.
    """
    low = int(table.first[reach])
    after = table.state[low : table.count]
    stop, follower = after[:, _START], after[:, _CHOICE]
    seconds = chain.seconds[:, stop] - chain.seconds[:, start, None]
    last = stop == chain.n_layers
    if last.any():
        seconds = seconds + np.where(last, chain.last_s[:, None], 0.0)
    step_s = seconds + chain.hop_s[:, follower, stop]
    fee = chain.uses @ task.prices
    rest = fee + task.before_s[:, start] - chain.available @ task.prices + task.rest_s
    promise = table.priced_s[low : table.count] + step_s + rest[:, None]
    alive = (promise < task.threshold_s) & (seconds <= task.cap_s) & (last | chain.inner[:, None])
    choice, index = np.nonzero(alive & (chain.occupied_s[:, follower, stop] <= task.cap_s))
    used = after[index, _USED:] + chain.uses[choice]
    kept = np.flatnonzero((used <= chain.available).all(axis=1))
    choice, index, used = choice[kept], index[kept], used[kept]
    k = np.zeros_like(index)
    if chain.memory is not None:
        stop = stop[index]
        ahead = after[index, _K]
        k = _in_flight(chain, ahead, step_s[choice, index], task.cap_s, stop == chain.n_layers)
        kept = np.flatnonzero(chain.memory.fits(choice, np.asarray(start), stop, k))
        choice, index, used, k = choice[kept], index[kept], used[kept], k[kept]
    state = np.empty((len(index), _USED + used.shape[1]), dtype=np.int64)
    state[:, _START], state[:, _CHOICE], state[:, _K], state[:, _PARENT] = start, choice, k, low + index
    state[:, _USED:] = used
    mine_s = step_s[choice, index]
    priced_s = table.priced_s[low + index] + mine_s + fee[choice]
    return state, table.cost_s[low + index] + mine_s, priced_s, promise[choice, index]


def _best(index: Ints, promise: Array, most: int, bound: float) -> tuple[Ints, float]:
    """The ``most`` labels of least promise, and the bound lowered to the least that is cut off."""
    if len(index) <= most:
        return index, bound
    order = np.argpartition(promise[index], most)
    return index[order[:most]], min(bound, float(promise[index[order[most:]]].min()))


def _in_flight(chain: Chain, after: Ints, seconds: Array, cap: float, last: Bools) -> Ints:
    """Micro-batches that a stage holds when the stage after it holds ``after``."""
    if chain.depth in ("all", "serial"):
        return np.full_like(after, chain.first_k)
    periods: Ints | int = 1
    if chain.depth == "safe":
        periods = np.maximum(np.ceil(seconds / cap - _ROUNDING).astype(np.int64), 1)
    return np.where(last, chain.first_k, np.minimum(chain.n_micro_batches, after + periods))


def _undominated(chain: Chain, state: Ints, cost_s: Array) -> Ints:
    """Labels that no other of the same holder and devices beats in cost and in flight alike."""
    code, size = state[:, _CHOICE], chain.n_choices
    for column, most in zip(state[:, _USED:].T, chain.available):
        if size > 2**62 // (int(most) + 1):  # the code would overflow: number the states seen so far
            code = np.unique(code, return_inverse=True)[1]
            size = len(code)
        code = code * (int(most) + 1) + column
        size *= int(most) + 1
    by_cost = np.argsort(cost_s, kind="stable")
    if chain.memory is None:
        order = by_cost[np.argsort(code[by_cost], kind="stable")]
        return np.asarray(order[np.diff(code[order], prepend=-1) != 0])
    rank = np.empty_like(by_cost)
    rank[by_cost] = np.arange(len(by_cost))
    order = np.lexsort([rank, state[:, _K], code])
    # The least rank so far within a code: later codes lie lower by more than any rank.
    group = np.cumsum(np.diff(code[order], prepend=-1) != 0)
    lowered = rank[order] - group * len(order)
    first = np.ones(len(order), dtype=bool)
    first[1:] = lowered[1:] < np.minimum.accumulate(lowered)[:-1]
    return order[first]
