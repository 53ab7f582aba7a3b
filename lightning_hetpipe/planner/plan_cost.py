"""What the actions of one plan cost: seconds, link time and memory, from a profile."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from lightning_hetpipe.cluster import Link
from lightning_hetpipe.graph import READER, LayerGraph
from lightning_hetpipe.planner.channel import ChannelRun, Exchange, channel_parts, channel_run
from lightning_hetpipe.planner.cost import ADAM, batch_bytes, is_copied, layer_costs, lower_bound_s
from lightning_hetpipe.planner.memory import Share
from lightning_hetpipe.plans import Plan, Stage
from lightning_hetpipe.profiles import Profile
from lightning_hetpipe.schedule import Action, Kind, Schedule
from lightning_hetpipe.shares import largest_remainder


def schedule_of(
    plan: Plan, graph: LayerGraph, *, n_samples: int | None = None, training: bool = True, check: bool = True
) -> Schedule:
    """The action lists of a plan: what is simulated is what runs.

    Args:
        plan: Whose stages, schedule and in-flight counts.
        graph: The model; its routes become transfers.
        n_samples: Size of the batch; the plan's own by default.
        training: False for a forward-only schedule.
        check: False skips the proof, for lists that are simulated and thrown away.

    Raises:
        ScheduleError: The plan's in-flight counts cannot work.
    """
    return plan.action_lists(
        plan.routes(graph),
        len(plan.slices(n_samples or plan.batch_size)),
        reduce=reducing_stages(plan, graph),
        training=training,
        check=check,
    )


def reducing_stages(plan: Plan, graph: LayerGraph) -> tuple[int, ...]:
    """Stages whose gradients have other owners: groups split by samples, and tied weights across ranks.

    Of a rank that uses a tied weight in several stages, the last one reduces.
    """
    found = {index for index, stage in enumerate(plan.stages) if stage.split == "batch"}
    for layers in graph.tied:
        owners = {
            plan.ranks_of_stage[index]: index
            for index, stage in enumerate(plan.stages)
            if any(stage.start <= layer < stage.stop for layer in layers)
        }
        if len(owners) > 1:
            found |= set(owners.values())
    return tuple(sorted(found))


class PlanCost:
    """Seconds and bytes of a plan's actions.

    A group split by samples takes as long as its slowest share; a group split by channels as long as its
    members' measured shares and the collectives of its layout (`channel`). Where the profile has no shares,
    the latter is taken as proportional, without collectives.
    """

    def __init__(self, plan: Plan, profile: Profile, *, optimizer_copies: float = ADAM) -> None:
        self.plan, self.profile = plan, profile
        self.graph = profile.graph
        self.slices = plan.slices(plan.batch_size)
        sizes = {plan.micro_batch, *self.slices}  # no slice need have the size that was asked for
        self._layers = {size: layer_costs(profile, size, optimizer_copies) for size in sizes}
        self._routes = {(route.source, route.target): route for route in plan.routes(self.graph)}
        self._names = [device.name for device in plan.cluster.devices]
        self._links: dict[tuple[int, int], Link] = {}
        self._transfers: dict[tuple[int, int, int, int, Kind, int], tuple[float, float, float]] = {}

    def seconds(self, action: Action) -> float:
        """Duration of a computation or reduction; the reader's counts in the stage with the loss."""
        if action.kind is Kind.REDUCE_GRAD:
            return self._reduce_s[action.stage]
        if action.stage == READER:
            return 0.0
        if action.stage == len(self.plan.stages):
            return self.profile.step_forward_s if action.kind is Kind.F else self.profile.step_backward_s
        assert action.micro_batch is not None
        forward, backward = self.stage_seconds(action.stage, self.slices[action.micro_batch])
        return forward if action.kind is Kind.F else backward

    def stage_seconds(self, stage: int, size: int) -> tuple[float, float]:
        """Forward and backward of one micro-batch of ``size`` samples."""
        found = self._stage_seconds.get((stage, size))
        if found is None:
            found = self._stage_seconds[stage, size] = self._measure(stage, size)
        return found

    @cached_property
    def _stage_seconds(self) -> dict[tuple[int, int], tuple[float, float]]:
        return {}

    def _measure(self, index: int, size: int) -> tuple[float, float]:
        stage = self.plan.stages[index]
        if stage.split == "channel" and self.profile.sharing is not None:
            run = self._channel_run(stage, size)
            forward, backward = float(run.forward_s.sum()), float(run.backward_s.sum())
        else:
            rows = largest_remainder(size, stage.shares) if stage.split == "batch" else None
            forward = backward = 0.0
            for member, (name, share) in enumerate(zip(stage.devices, stage.shares)):
                if rows is not None:
                    tables = self.profile.device(name).layer_seconds(rows[member]) if rows[member] else ()
                    mine = [float(table[stage.start : stage.stop].sum()) for table in tables] or [0.0, 0.0]
                else:
                    sums = self._layers[size].seconds(name)
                    mine = [float(table[stage.stop] - table[stage.start]) * share for table in sums]
                forward, backward = max(forward, mine[0]), max(backward, mine[1])
        if index == len(self.plan.stages) - 1 and not self.plan.loss_apart:
            forward += self.profile.step_forward_s
            backward += self.profile.step_backward_s
        return forward, backward

    def _channel_run(self, stage: Stage, size: int) -> ChannelRun:
        pace = self.plan.pace(stage)
        return channel_run(self.profile, self.plan.cluster, stage, pace, self.plan.micro_batch, size)

    def exchange_s(self, stage: int) -> float:
        """Seconds of a channel group's collectives in one micro-batch."""
        return self._channel_run(self.plan.stages[stage], self.plan.micro_batch).exchange_s

    def reduction_s(self, stage: int) -> float:
        """Seconds of a batch group's sum of gradients, once per step."""
        return self._reduce_s[stage]

    @cached_property
    def _reduce_s(self) -> dict[int, float]:
        """Seconds of each stage's reduction: a batch group's collective, or a ring over a weight's owners."""
        seconds = {}
        for index in reducing_stages(self.plan, self.graph):
            stage = self.plan.stages[index]
            if stage.split == "batch":
                size = sum(layer.parameter_bytes for layer in self.graph.layers[stage.start : stage.stop])
                even = (1 / len(stage.devices),) * len(stage.devices)
                exchange = Exchange.between(self.profile, self.plan.cluster, stage.devices, even)
                seconds[index] = exchange.seconds("all_reduce", size)
            else:
                layers, ranks = self._tied_with(stage)
                size = sum(self.graph.layers[layer].parameter_bytes for layer in layers)
                seconds[index] = ring_s([self.link(a, b) for a, b in ring(ranks)], size)
        return seconds

    def _tied_with(self, stage: Stage) -> tuple[list[int], tuple[int, ...]]:
        """A stage's layers with tied weights, and the ranks of all stages that share them."""
        groups = [group for group in self.graph.tied if any(stage.start <= i < stage.stop for i in group)]
        ranks = [
            rank
            for other, held in zip(self.plan.stages, self.plan.ranks_of_stage)
            for rank in held
            if any(other.start <= i < other.stop for group in groups for i in group)
        ]
        mine = [next(i for i in group if stage.start <= i < stage.stop) for group in groups]
        return mine, tuple(dict.fromkeys(ranks))

    def transfer(self, action: Action, source: int, target: int) -> tuple[float, float, float]:
        """Seconds for which a send from one rank to another occupies its sender, then the link; latency."""
        assert action.peer is not None
        assert action.micro_batch is not None
        key = (action.stage, action.peer, source, target, action.kind, self.slices[action.micro_batch])
        found = self._transfers.get(key)
        if found is None:
            link, software = self.profile.software.after(self.link(source, target)), self.profile.software
            overlap = self._overlap(action.stage, source, action.peer, target)
            size = overlap * self.message_bytes(action.stage, action.peer, action.kind, key[-1])
            sent, latency = (software.sending_s(size), link.latency_s) if overlap else (0.0, 0.0)
            found = self._transfers[key] = (sent, size / link.bandwidth_bytes_per_s, latency)
        return found

    def message_bytes(self, source: int, target: int, kind: Kind, size: int) -> float:
        """Bytes of one message of ``size`` samples: forward values, or the gradients that return."""
        if kind is Kind.SEND_F:
            names = self._routes[source, target].values
        else:
            names = self._routes[target, source].gradients
        return sum(self.graph.value(name).size_bytes(size) for name in names)

    def entering_bytes(self, size: int) -> tuple[int, ...]:
        """Forward bytes that each stage receives for one micro-batch, from all its sources."""
        entering = [0.0] * len(self.plan.stages)
        for source, target in self._routes:
            if target < len(entering):
                entering[target] += self.message_bytes(source, target, Kind.SEND_F, size)
        return tuple(round(size_bytes) for size_bytes in entering)

    def link(self, source: int, target: int) -> Link:
        """A message's whole way between two ranks."""
        found = self._links.get((source, target))
        if found is None:
            names = self._names
            found = self.profile.link(self.plan.cluster, names[source], names[target])
            self._links[source, target] = found
        return found

    def _overlap(self, stage: int, rank: int, peer: int, peer_rank: int) -> float:
        """The fraction of a tensor that one rank owes another, as `engine.pieces` has it."""
        (start, stop), (first, last) = self._duty(stage, rank), self._held(peer, peer_rank)
        return max(0.0, min(stop, last) - max(start, first))

    def _held(self, stage: int, rank: int) -> tuple[float, float]:
        """The samples that a rank needs of what enters its stage: all, but for a group that splits them."""
        return self._interval(stage, rank) if self._split(stage) == "batch" else (0.0, 1.0)

    def _duty(self, stage: int, rank: int) -> tuple[float, float]:
        """The samples of which a rank sends what leaves its stage: no other member sends these."""
        return self._interval(stage, rank)

    def _split(self, stage: int) -> str:
        inner = stage != READER and stage < len(self.plan.stages)
        return self.plan.stages[stage].split if inner else "none"

    def _interval(self, stage: int, rank: int) -> tuple[float, float]:
        split = self._split(stage)
        if split == "none":
            return 0.0, 1.0
        ranks = self.plan.ranks_of_stage[stage]
        position = ranks.index(rank)
        shares = self.plan.stages[stage].shares if split == "batch" else (1 / len(ranks),) * len(ranks)
        return sum(shares[:position]), sum(shares[: position + 1])

    def hops(self, size: int) -> Iterator[tuple[float, float]]:
        """Forward and backward transfer across each cut; zero where neighbours exchange nothing."""
        ranks = self.plan.ranks_of_stage
        for stage in range(len(ranks) - 1):
            forward = backward = 0.0
            route = self._routes.get((stage, stage + 1))
            if route is not None:
                sizes = [
                    self.message_bytes(stage, stage + 1, Kind.SEND_F, size),
                    self.message_bytes(stage + 1, stage, Kind.SEND_B, size) if route.gradients else 0.0,
                ]
                forward = self.link(ranks[stage][0], ranks[stage + 1][0]).transfer_s(sizes[0])
                back = self.link(ranks[stage + 1][0], ranks[stage][0])
                backward = back.transfer_s(sizes[1]) if route.gradients else 0.0
            yield forward, backward

    def memory_bytes(self) -> tuple[int, ...]:
        """Predicted peak of every rank, 0 for idle ones; rank 0 also holds the batch."""
        costs = self._layers[max(self._layers)]
        per_rank = [0.0] * len(self._names)
        n_slices = len(self.slices)
        for stage, ranks, k in zip(self.plan.stages, self.plan.ranks_of_stage, self.plan.in_flight):
            held = n_slices if self.plan.schedule == "gpipe" else min(k, n_slices)
            for rank, share in zip(ranks, stage.shares):
                per_rank[rank] += costs.memory_bytes(
                    self._names[rank],
                    stage.start,
                    stage.stop,
                    held,
                    n_micro_batches=n_slices,
                    copied=is_copied(self.plan.cluster),
                    share=Share(*member_parts(self.profile, self.plan, stage, share)),
                )
        per_rank[0] += batch_bytes(costs, self.plan.batch_size)
        return tuple(round(size) for size in per_rank)

    def optimizer_s(self) -> float:
        """The slowest device's optimizer step."""
        costs = self._layers[max(self._layers)]
        seconds: dict[str, float] = {}
        for stage in self.plan.stages:
            for name, share in zip(stage.devices, stage.shares):
                size = float(costs.parameter_bytes[stage.stop] - costs.parameter_bytes[stage.start])
                size *= member_parts(self.profile, self.plan, stage, share)[1]
                step_s = self.profile.device(name).optimizer_s_per_byte * size
                seconds[name] = seconds.get(name, 0.0) + step_s
        return max(seconds.values())

    def lower_bound_s(self) -> float:
        """No order of this plan's actions is faster (`cost.lower_bound_s`, for unequal slices).

        Where neighbours exchange nothing or no gradient returns, only the busiest stage binds.
        """
        busy = [
            sum(sum(self.stage_seconds(stage, size)) for size in self.slices)
            for stage in range(len(self.plan.stages))
        ]
        busiest = max(sum(busy[stage] for stage in held) for held in self.plan.stages_of_rank)
        chained = all(
            (route := self._routes.get((stage, stage + 1))) is not None and route.gradients
            for stage in range(len(busy) - 1)
        )
        if not chained:
            return busiest
        smallest = min(self.slices)
        seconds = [sum(self.stage_seconds(stage, smallest)) for stage in range(len(busy))]
        hops = [forward + backward for forward, backward in self.hops(smallest)]
        bound = max(lower_bound_s(seconds, hops, 1), busiest)
        before = 0.0
        for stage, total in enumerate(busy):
            bound = max(bound, before + total)
            before += seconds[stage] + (hops[stage] if stage < len(hops) else 0.0)
        return bound


def member_parts(profile: Profile, plan: Plan, stage: Stage, share: float) -> tuple[float, float]:
    """What a member holds of its stage's activations, and of its weights, as fractions."""
    if stage.split == "none":
        return 1.0, 1.0
    if stage.split == "batch":
        return share, 1.0
    if profile.sharing is None:
        return share, share
    return channel_parts(profile, stage, plan.pace(stage), plan.micro_batch, share)


def ring(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours of a ring, in one direction."""
    return [(a, b) for a, b in zip(ranks, [*ranks[1:], *ranks[:1]]) if a != b]


def ring_s(links: Sequence[Link], size_bytes: float) -> float:
    """Seconds of a ring all-reduce: ``2(n-1)`` rounds of ``size / n`` over the slowest link."""
    n = len(links)
    return 2 * (n - 1) * max((link.transfer_s(size_bytes / n) for link in links), default=0.0) if n else 0.0
