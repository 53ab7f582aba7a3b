"""Orders of computation, one function per schedule, each with its picture.

A generator returns one list per stage: the forwards and backwards of that stage in the order in
which it runs them, and nothing else. `lightning_hetpipe.schedule.lower` adds the reader and the transfers.
The pictures show three stages and four micro-batches, unit times and free links. `interleaved`, whose ranks
hold several stages, returns one list per rank.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm

from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.schedule.action import Action, Kind

Orders = list[list[Action]]


def gpipe(n_stages: int, n_micro_batches: int) -> Orders:
    """All forwards, then all backwards; every stage holds all micro-batches.

    stage 0  F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
    stage 1   . F0 F1 F2 F3  .  . B0 B1 B2 B3  .
    stage 2   .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .
    """
    return one_f_one_b(n_stages, n_micro_batches, (n_micro_batches,) * n_stages)


def one_f_one_b(n_stages: int, n_micro_batches: int, in_flight: Sequence[int]) -> Orders:
    """Stage ``s`` runs ``in_flight[s]`` forwards ahead, then one backward per forward.

        stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3      in_flight 3
        stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .                2
        stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .                1

    Slow links ask for more in flight (`lightning_hetpipe.planner.cost.safe_k`). With fewer
    micro-batches than ``in_flight`` a stage runs them all ahead.

    Raises:
        ScheduleError: ``in_flight`` grows along the stages: a stage would wait for a backward
            that the next one gives only after more forwards.
    """
    if len(in_flight) != n_stages or any(k < 1 for k in in_flight):
        raise ScheduleError(
            f"in_flight {tuple(in_flight)} must give at least 1 for each of {n_stages} stages"
        )
    if list(in_flight) != sorted(in_flight, reverse=True):
        raise ScheduleError(
            f"in_flight {tuple(in_flight)} grows along the stages, so that a stage would wait for ever "
            "for its successor's first backward: let it fall or stay"
        )
    orders = []
    for stage, k in enumerate(in_flight):
        ahead = min(k, n_micro_batches)
        order = [Action(stage, Kind.F, m) for m in range(ahead)]
        for m in range(n_micro_batches):
            order.append(Action(stage, Kind.B, m))
            if m + ahead < n_micro_batches:
                order.append(Action(stage, Kind.F, m + ahead))
        orders.append(order)
    return orders


def forward_only(n_stages: int, n_micro_batches: int) -> Orders:
    """Forwards in order, for evaluation.

    stage 0  F0 F1 F2 F3  .  .
    stage 1   . F0 F1 F2 F3  .
    stage 2   .  . F0 F1 F2 F3
    """
    return [[Action(stage, Kind.F, m) for m in range(n_micro_batches)] for stage in range(n_stages)]


def interleaved(
    ranks_of_stage: Sequence[Sequence[int]],
    n_ranks: int,
    n_micro_batches: int,
    in_flight: Sequence[int],
    *,
    training: bool = True,
) -> Orders:
    """1F1B where ranks hold several stages: per rank, whatever can run, on paper.

        rank 0  .  .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
        rank 1 0F0 0F1 .   .  2F0 2F1 0F2 0F3 2B0 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3

    Time runs on paper: the stages of a rank take one unit together, each the same part of it, and twice
    that for the backward; transfers are free. A rank that is idle takes, of what could start now, a backward
    before a forward, unless it has just done a backward. Backwards come from the latest stage; forwards from
    the earliest stage for as many micro-batches as there are ranks, then those from the next one, as in
    Narayanan et al. 2021, where formulas fix the order for equal numbers of stages. A stage waits with a
    forward while it holds ``in_flight`` micro-batches. The oldest micro-batch can always go on, because no
    stage ahead of it holds another, so any ``in_flight`` of at least 1 runs to its end, and the lists follow
    from the plan alone. Ranks may hold different numbers of stages.

    Args:
        ranks_of_stage: One rank for each stage.
        n_ranks: Ranks without a stage have an empty list.
        n_micro_batches: At least 1; may be fewer than there are stages.
        in_flight: Per stage; forward-only, the micro-batches between the stage and the last stage.
        training: False for forwards only.

    Raises:
        ScheduleError: A group holds a stage, or ``in_flight`` is below 1.
    """
    if any(len(ranks) != 1 for ranks in ranks_of_stage):
        raise ScheduleError(
            f"stages are on ranks {tuple(map(tuple, ranks_of_stage))}: interleaved stages cannot be shared; "
            "take 1f1b"
        )
    if len(in_flight) != len(ranks_of_stage) or any(k < 1 for k in in_flight):
        raise ScheduleError(
            f"in_flight {tuple(in_flight)} must give at least 1 for each of {len(ranks_of_stage)} stages"
        )
    paper = _Paper([ranks[0] for ranks in ranks_of_stage], n_ranks, n_micro_batches, in_flight, training)
    return paper.run()


@dataclass
class _Paper:
    """Which actions have started, and which are over."""

    rank_of_stage: list[int]
    n_ranks: int
    n_micro_batches: int
    in_flight: Sequence[int]
    training: bool
    orders: Orders = field(default_factory=list)

    def __post_init__(self) -> None:
        n_stages = len(self.rank_of_stage)
        self.orders = [[] for _ in range(self.n_ranks)]
        self.held = [
            [s for s, r in enumerate(self.rank_of_stage) if r == rank] for rank in range(self.n_ranks)
        ]
        self.width = len(set(self.rank_of_stage))
        unit = lcm(*(len(stages) for stages in self.held if stages))
        self.duration = [unit // len(self.held[rank]) for rank in self.rank_of_stage]
        self.started = {kind: [0] * n_stages for kind in (Kind.F, Kind.B)}
        self.over = {kind: [0] * n_stages for kind in (Kind.F, Kind.B)}

    def run(self) -> Orders:
        running: list[tuple[int, int]] = []  # end, rank
        now, idle = 0, set(range(self.n_ranks))
        while True:
            for rank in sorted(idle):
                action = self._next(rank)
                if action is not None:
                    self.started[action.kind][action.stage] += 1
                    self.orders[rank].append(action)
                    cost = self.duration[action.stage] * (1 if action.kind is Kind.F else 2)
                    heapq.heappush(running, (now + cost, rank))
                    idle.discard(rank)
            if not running:
                return self.orders
            now = running[0][0]
            while running and running[0][0] == now:
                rank = heapq.heappop(running)[1]
                last = self.orders[rank][-1]
                self.over[last.kind][last.stage] += 1
                idle.add(rank)

    def _next(self, rank: int) -> Action | None:
        order = self.orders[rank]
        if order and order[-1].kind is Kind.B:
            return self._forward(rank) or self._backward(rank)
        return self._backward(rank) or self._forward(rank)

    def _backward(self, rank: int) -> Action | None:
        ready = self._ready(rank, Kind.B) if self.training else []
        return max(ready, key=lambda action: action.stage, default=None)

    def _forward(self, rank: int) -> Action | None:
        def turn(action: Action) -> tuple[int, int]:
            assert action.micro_batch is not None
            return action.micro_batch // self.width, action.stage

        return min(self._ready(rank, Kind.F), key=turn, default=None)

    def _ready(self, rank: int, kind: Kind) -> list[Action]:
        """The next action of each stage of a rank that could start now."""
        nexts = [(stage, self.started[kind][stage]) for stage in self.held[rank]]
        return [
            Action(stage, kind, m)
            for stage, m in nexts
            if m < self.n_micro_batches and self._may_start(stage, kind, m)
        ]

    def _may_start(self, stage: int, kind: Kind, m: int) -> bool:
        last = len(self.rank_of_stage) - 1
        if kind is Kind.B:
            return m < self.over[Kind.F if stage == last else Kind.B][min(stage + 1, last)]
        released = self.over[Kind.B][stage] if self.training else self.over[Kind.F][last]
        return m - released < self.in_flight[stage] and (stage == 0 or m < self.over[Kind.F][stage - 1])
