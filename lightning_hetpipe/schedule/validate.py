"""Proves that a schedule is complete, ordered, and runs to its end."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.graph import READER, Route
from lightning_hetpipe.schedule.action import Action, Kind, Schedule
from lightning_hetpipe.schedule.draw import marked
from lightning_hetpipe.schedule.lower import Wiring

Place = tuple[int, int]  # rank, position in its list


def validate(schedule: Schedule, routes: Iterable[Route], *, in_flight: Sequence[int] | None = None) -> None:
    """Checks every property that the runtime relies on.

    Every action that routes and micro-batches call for occurs once on each rank of its stage, and no
    other; the transfers of an edge are sent and received in one order; every action comes
    after what it consumes, and the lists run to their end when sends never block; no
    stage holds more than ``in_flight`` micro-batches.

    Raises:
        ScheduleError: One of them fails; the message shows the lists with the culprit marked.
    """
    wiring = Wiring(routes, schedule.ranks_of_stage)
    _check_complete(schedule, wiring)
    _check_edges(schedule)
    _check_runs(schedule, wiring)
    if in_flight is not None:
        _check_in_flight(schedule, in_flight)


def expected_actions(schedule: Schedule, wiring: Wiring, rank: int) -> Counter[Action]:
    """What a rank must do, in any order; reductions excepted, which are the plan's choice."""
    stages = [stage for stage, ranks in enumerate(schedule.ranks_of_stage) if rank in ranks]
    kinds = dict.fromkeys(stages, (Kind.F, Kind.B) if schedule.training else (Kind.F,))
    if rank == 0:
        with_backward = schedule.training and wiring.reader_has_backward
        kinds[READER] = (Kind.F, Kind.B) if with_backward else (Kind.F,)
    computations = [
        Action(stage, kind, m)
        for stage, wanted in kinds.items()
        for kind in wanted
        for m in range(schedule.n_micro_batches)
    ]
    return Counter(wiring.with_transfers(computations))


def _check_complete(schedule: Schedule, wiring: Wiring) -> None:
    for rank, row in enumerate(schedule.actions):
        expected = expected_actions(schedule, wiring, rank)
        seen: Counter[Action] = Counter()
        for position, action in enumerate(row):
            seen[action] += 1
            if action.kind is Kind.REDUCE_GRAD:
                allowed = rank in schedule.ranks(action.stage) and schedule.training
            else:
                allowed = action in expected
            if not allowed:
                _fail(schedule, [(rank, position)], f"rank {rank} has {action}, which its stages never need")
            if seen[action] > 1:
                _fail(schedule, [(rank, position)], f"rank {rank} has {action} twice")
        missing = [action for action in expected if action not in seen]
        if missing:
            _fail(schedule, [], f"rank {rank} lacks {', '.join(map(str, missing[:4]))}")


def _check_edges(schedule: Schedule) -> None:
    """One channel per edge and direction carries messages in order: both ends must agree on it."""
    orders: dict[tuple[int, Action], list[tuple[int, Place]]] = {}
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if action.peer is not None and action.micro_batch is not None:
                edge = Action(action.stage, action.kind, 0, action.peer)
                orders.setdefault((rank, edge), []).append((action.micro_batch, (rank, position)))
    for (rank, edge), sent in orders.items():
        if not edge.kind.is_send:
            continue
        assert edge.peer is not None
        for peer_rank in schedule.ranks(edge.peer):
            received = orders.get((peer_rank, edge.counterpart), [])
            for (mine, here), (theirs, there) in zip(sent, received, strict=False):
                if mine != theirs:
                    _fail(
                        schedule,
                        [here, there],
                        f"rank {rank} sends micro-batch {mine} where rank {peer_rank} receives {theirs}",
                    )


def _check_runs(schedule: Schedule, wiring: Wiring) -> None:
    done: set[tuple[int, Action]] = set()
    positions = [0] * schedule.n_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while positions[rank] < len(row):
                action = row[positions[rank]]
                if any(need not in done for need in _needs(schedule, wiring, rank, action)):
                    break
                done.add((rank, action))
                positions[rank] += 1
                moved = True
    stuck = [(rank, p) for rank, p in enumerate(positions) if p < len(schedule.actions[rank])]
    if stuck:
        _fail_stuck(schedule, wiring, stuck, done)


def _needs(schedule: Schedule, wiring: Wiring, rank: int, action: Action) -> list[tuple[int, Action]]:
    """What must be done, and on which rank, before an action may start."""
    stage, kind, m = action.stage, action.kind, action.micro_batch
    if kind.is_receive:
        sender = action.counterpart
        return [(peer_rank, sender) for peer_rank in schedule.ranks(sender.stage)]
    if kind.is_send:
        return [(rank, Action(stage, Kind.F if kind is Kind.SEND_F else Kind.B, m))]
    if kind is Kind.REDUCE_GRAD:
        return [(rank, Action(stage, Kind.B, n)) for n in range(schedule.n_micro_batches)]
    needs = [(rank, needed) for needed in wiring.inputs(action)]
    if kind is Kind.B:
        needs.append((rank, Action(stage, Kind.F, m)))
    return needs


def _fail_stuck(
    schedule: Schedule, wiring: Wiring, stuck: list[Place], done: set[tuple[int, Action]]
) -> None:
    waits = []
    for rank, position in stuck:
        action = schedule.actions[rank][position]
        needs = _needs(schedule, wiring, rank, action)
        other, needed = next(need for need in needs if need not in done)
        if other == rank:
            _fail(schedule, [(rank, position)], f"rank {rank} has {action} before {needed}, which it needs")
        waits.append(f"rank {rank} waits in {action} for {needed} of rank {other}")
    _fail(schedule, stuck, f"nothing can move any more: {'; '.join(waits)}")


def _check_in_flight(schedule: Schedule, in_flight: Sequence[int]) -> None:
    for rank, row in enumerate(schedule.actions):
        held: Counter[int] = Counter()
        for position, action in enumerate(row):
            if action.stage != READER and action.kind.is_compute:
                held[action.stage] += 1 if action.kind is Kind.F else -1
                if held[action.stage] > in_flight[action.stage]:
                    _fail(
                        schedule,
                        [(rank, position)],
                        f"stage {action.stage} holds {held[action.stage]} micro-batches at {action}, "
                        f"its limit is {in_flight[action.stage]}",
                    )


def _fail(schedule: Schedule, culprits: Collection[Place], what: str) -> None:
    raise ScheduleError(f"schedule {schedule.name!r}: {what}\n{marked(schedule, culprits)}")
