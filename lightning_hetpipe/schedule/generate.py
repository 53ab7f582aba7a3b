"""Orders of computation, one function per schedule, each with its picture.

A generator returns one list per stage: the forwards and backwards of that stage in the order in
which it runs them, and nothing else. `lightning_hetpipe.schedule.lower` adds the reader and the transfers.
The pictures show three stages and four micro-batches, unit times and free links.
"""

from collections.abc import Sequence

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
