"""From orders of computation to what every rank does: the reader, the transfers, the reductions.

    order of stage 1      F0            B0
    lowered               1RECV_F0 1F0 1SEND_F0 ... 1RECV_B0 1B0 1SEND_B0 ... 1REDUCE_GRAD

A transfer follows a route, so a skip goes straight from its producer to its consumer. Where source
and target are the same rank there is nothing to send. A receive stands just before its use; the
transport posts it long ahead.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.graph import READER, Route
from lightning_hetpipe.schedule.action import Action, Kind, Schedule
from lightning_hetpipe.schedule.generate import Orders

RanksOfStage = Sequence[Sequence[int]]
_End = tuple[int, Kind, int | None]  # an action without its micro-batch: stage, kind, peer


def lower(
    name: str,
    orders: Orders,
    *,
    ranks_of_stage: RanksOfStage,
    n_ranks: int,
    n_micro_batches: int,
    ahead: int,
    routes: Iterable[Route],
    reduce: Iterable[int] = (),
    training: bool = True,
) -> Schedule:
    """The action list of every rank.

    Args:
        orders: Per rank, its computations in order.
        ahead: How many micro-batches the reader is ahead of the last stage (``in_flight`` of stage 0).
        reduce: Stages that share gradients with other ranks; they reduce once, at the end.
    """
    wiring = Wiring(routes, ranks_of_stage)
    reduce = set(reduce) if training else set()
    n_stages = len(ranks_of_stage)
    actions: list[tuple[Action, ...]] = []
    for rank, (order, held) in enumerate(zip(orders, stages_of_rank(ranks_of_stage, n_ranks))):
        if rank == 0:
            # A loss stage goes in step with the one before it; other stages of the rank do not.
            first = n_stages - 2 if n_stages - 2 in held and name != "interleaved" else n_stages - 1
            order = _with_reader(order, first, n_stages, n_micro_batches, ahead, wiring)
        tail = [Action(stage, Kind.REDUCE_GRAD) for stage in held if stage in reduce]
        actions.append((*wiring.with_transfers(order), *tail))
    return Schedule(name, tuple(actions), tuple(map(tuple, ranks_of_stage)), n_micro_batches, training)


def stages_of_rank(ranks_of_stage: RanksOfStage, n_ranks: int) -> list[list[int]]:
    """The stages that each rank holds, in order."""
    held: list[list[int]] = [[] for _ in range(n_ranks)]
    for stage, ranks in enumerate(ranks_of_stage):
        for rank in ranks:
            held[rank].append(stage)
    return held


class Wiring:
    """Who sends to whom: the routes of a plan seen from each stage."""

    def __init__(self, routes: Iterable[Route], ranks_of_stage: RanksOfStage) -> None:
        self.local: set[tuple[int, int]] = set()
        self.sources: dict[int, list[int]] = defaultdict(list)
        self.targets: dict[int, list[int]] = defaultdict(list)
        self.returning: set[tuple[int, int]] = set()
        self._found: dict[tuple[int, Kind], tuple[list[_End], list[_End]]] = {}
        ranks = {READER: (0,)} | {stage: tuple(held) for stage, held in enumerate(ranks_of_stage)}
        for route in sorted(routes, key=lambda route: (route.source, route.target)):
            edge = (route.source, route.target)
            self.sources[route.target].append(route.source)
            self.targets[route.source].append(route.target)
            if route.gradients:
                self.returning.add(edge)
            if ranks[route.source] == ranks[route.target]:
                self.local.add(edge)

    @property
    def reader_has_backward(self) -> bool:
        return any((READER, target) in self.returning for target in self.targets[READER])

    def inputs(self, action: Action) -> list[Action]:
        """What a computation consumes: receives, or the neighbour's computation on the same rank."""
        m = action.micro_batch
        return [Action(stage, kind, m, peer) for stage, kind, peer in self._ends(action)[0]]

    def outputs(self, action: Action) -> list[Action]:
        """The sends that follow a computation."""
        m = action.micro_batch
        return [Action(stage, kind, m, peer) for stage, kind, peer in self._ends(action)[1]]

    def with_transfers(self, order: Iterable[Action]) -> Iterator[Action]:
        for action in order:
            m = action.micro_batch
            inputs, outputs = self._ends(action)
            for stage, kind, peer in inputs:
                if peer is not None:
                    yield Action(stage, kind, m, peer)
            yield action
            for stage, kind, peer in outputs:
                yield Action(stage, kind, m, peer)

    def _ends(self, action: Action) -> tuple[list[_End], list[_End]]:
        """Inputs and outputs of every computation of this stage and kind."""
        found = self._found.get((action.stage, action.kind))
        if found is None:
            forward, backward = self._forward(action.stage), self._backward(action.stage)
            self._found[action.stage, Kind.F], self._found[action.stage, Kind.B] = forward, backward
            found = forward if action.kind is Kind.F else backward
        return found

    def _forward(self, stage: int) -> tuple[list[_End], list[_End]]:
        inputs: list[_End] = [
            (source, Kind.F, None) if (source, stage) in self.local else (stage, Kind.RECV_F, source)
            for source in self.sources[stage]
        ]
        targets = [target for target in self.targets[stage] if (stage, target) not in self.local]
        return inputs, [(stage, Kind.SEND_F, target) for target in targets]

    def _backward(self, stage: int) -> tuple[list[_End], list[_End]]:
        inputs: list[_End] = [
            (target, Kind.B, None) if (stage, target) in self.local else (stage, Kind.RECV_B, target)
            for target in self.targets[stage]
            if (stage, target) in self.returning
        ]
        edges = [(source, stage) for source in self.sources[stage]]
        sent = [source for source, _ in edges if (source, stage) in self.returning - self.local]
        return inputs, [(stage, Kind.SEND_B, source) for source in sent]


def in_step(orders: Orders, ranks_of_stage: RanksOfStage, n_ranks: int) -> Orders:
    """Orders of ranks from orders of stages.

    A rank holds two stages where a loss stage follows the last one: they go in step, forward then backward.

        2F0 2F1 2B0 2B1  and  3F0 3F1 3B0 3B1    2F0 3F0 2F1 3F1 3B0 2B0 3B1 2B1

    Raises:
        ScheduleError: A rank holds two stages with different orders.
    """
    held = stages_of_rank(ranks_of_stage, n_ranks)
    return [_woven([orders[stage] for stage in stages]) for stages in held]


def _woven(orders: Sequence[list[Action]]) -> list[Action]:
    woven: list[Action] = []
    for together in zip(*orders):
        if len({(action.kind, action.micro_batch) for action in together}) > 1:
            raise ScheduleError(
                f"{' and '.join(map(str, together))} are on one rank: give these stages equal in_flight"
            )
        woven += together if together[0].kind is Kind.F else together[::-1]
    return woven


def _with_reader(
    order: Sequence[Action], stage: int, n_stages: int, n_micro_batches: int, ahead: int, wiring: Wiring
) -> list[Action]:
    """Weaves the reader into the order of rank 0, around its (first) stage.

    ``rF m`` comes before the last stage's forward of ``m - ahead``: stage 0 cannot want it earlier,
    because it first needs the backward of that micro-batch. ``rB m`` comes after the last stage's
    backward of ``m + ahead``, which cannot have started before stage 0 finished the backward of ``m``;
    the last ones come at the end. So the reader never holds up the last stage. With a single
    stage it runs just before and just after.

        ahead 2, 4 micro-batches    rF0 rF1 rF2 F0 B0 rF3 F1 B1 F2 B2 rB0 F3 B3 rB1 rB2 rB3
    """
    if n_stages == 1:
        ahead = 0
    ahead = min(ahead, n_micro_batches)
    woven = [Action(READER, Kind.F, m) for m in range(ahead)]
    backward = wiring.reader_has_backward
    for action in order:
        m = action.micro_batch
        assert m is not None
        mine = action.stage == stage
        if mine and action.kind is Kind.F and m + ahead < n_micro_batches:
            woven.append(Action(READER, Kind.F, m + ahead))
        woven.append(action)
        if mine and action.kind is Kind.B and backward and m >= ahead:
            woven.append(Action(READER, Kind.B, m - ahead))
    if backward and any(action.kind is Kind.B for action in order):
        woven += [Action(READER, Kind.B, m) for m in range(n_micro_batches - ahead, n_micro_batches)]
    return woven
