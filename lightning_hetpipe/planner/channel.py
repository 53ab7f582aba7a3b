"""What a run of layers costs a group that shares it by channels.

    seconds of a layer = max over members of ( whole part + shared part x factor(share) ) + its collectives
    a collective       = on its link (`GroupCost.collective_s`) + software: operations x fixed + bytes x rate

The layout, and with it the collectives, is the one that the group will choose when it runs; the factors
are measured (`DeviceProfile.share_factors`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations

import numpy as np
import numpy.typing as npt

from lightning_hetpipe.cluster import Cluster, Link, slowest_link
from lightning_hetpipe.plans import Pace, Stage
from lightning_hetpipe.profiles import Profile, Software
from lightning_hetpipe.sharing import SharedOperation, Sharing
from lightning_hetpipe.stage.layout import (
    Form,
    GroupCost,
    Operation,
    Sharding,
    Way,
    choose,
    collectives_of,
    n_operations,
)

Array = npt.NDArray[np.float64]
_SOMEHOW = Sharding(1, (0, 1))  # where the planner need not know which channels
_LAYOUTS_KEPT = 4096
_BEAM = 64  # as exact as the group's own choice but for dense blocks, whose layouts are many and slow


@dataclass(frozen=True)
class Layout:
    """How a group runs layers ``start`` to ``stop - 1``.

    Attributes:
        parts: ``[layers]``: the fraction of each layer's arithmetic that is shared.
        forward, backward: Collectives: layer, counted from ``start``; kind; bytes per sample.
    """

    parts: Array
    forward: tuple[tuple[int, str, float], ...]
    backward: tuple[tuple[int, str, float], ...]


@dataclass(frozen=True)
class ChannelRun:
    """Seconds of one micro-batch, ``[layers]`` each, and the part of them that is spent on collectives."""

    forward_s: Array
    backward_s: Array
    exchange_s: float


@dataclass(frozen=True)
class Exchange:
    """What the collectives of a group take.

    Attributes:
        shares: Of its members.
        link: Between the two members that all wait for.
        software: What comes on top; zero where it was measured with the link.
    """

    shares: tuple[float, ...]
    link: Link
    software: Software

    @classmethod
    def between(
        cls,
        profile: Profile,
        cluster: Cluster,
        devices: Sequence[str],
        shares: tuple[float, ...],
    ) -> "Exchange":
        """Of these devices."""
        found = [profile.collective_link(cluster, a, b) for a, b in permutations(devices, 2)]
        software = max((each for _, each in found), key=lambda each: each.collective_s)
        return cls(shares, slowest_link(link for link, _ in found), software)

    def seconds(self, kind: str, size_bytes: float) -> float:
        """Of one ``all_gather``, ``reduce_scatter`` or ``all_reduce`` of a whole tensor of that size."""
        link, software = self.link, self.software
        cost = GroupCost(
            self.shares, latency_s=link.latency_s, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s
        )
        fixed_s = n_operations(kind, size_bytes, len(self.shares)) * software.collective_s
        return cost.collective_s(kind, size_bytes) + fixed_s + size_bytes * software.collective_s_per_byte


def pace_of(profile: Profile, cluster: Cluster, devices: Sequence[str], micro_batch: int) -> Pace:
    """What a group of these devices weighs, as measured; a round takes as long as a message does."""
    assert profile.sharing is not None
    work = micro_batch * sum(operation.work for operation in profile.sharing.operations)
    seconds = (sum(map(np.sum, profile.device(name).layer_seconds(micro_batch))) for name in devices)
    link = slowest_link(profile.link(cluster, a, b) for a, b in permutations(devices, 2))
    return Pace(float(sum(work / max(s, 1e-12) for s in seconds)), link.latency_s, link.bandwidth_bytes_per_s)


def can_share(sharing: Sharing, start: int, stop: int, n_members: int) -> bool:
    """Whether any operation of a run has a way for so many members."""
    return any(
        way.shared and way.most >= n_members
        for operation in sharing.operations
        if start <= operation.layer < stop
        for way in operation.ways
    )


def layout_of(profile: Profile, stage: Stage, pace: Pace, micro_batch: int) -> Layout:
    """The layout that a channel group chooses for its stage, for micro-batches of that size."""
    key = ("layout", stage.start, stage.stop, stage.shares, pace, micro_batch)
    found = profile.derived.get(key)
    if found is None:
        if len(profile.derived) > _LAYOUTS_KEPT:
            profile.derived.clear()
        assert profile.sharing is not None
        found = profile.derived[key] = _lay_out(profile.sharing, stage, pace, micro_batch)
    assert isinstance(found, Layout)
    return found


def channel_run(
    profile: Profile, cluster: Cluster, stage: Stage, pace: Pace, micro_batch: int, size: int
) -> ChannelRun:
    """Seconds of a stage that was laid out for ``micro_batch``, for a micro-batch of ``size`` samples."""
    layout = layout_of(profile, stage, pace, micro_batch)
    exchange = Exchange.between(profile, cluster, stage.devices, stage.shares)
    devices, run = [profile.device(name) for name in stage.devices], slice(stage.start, stage.stop)
    seconds: list[Array] = []
    exchange_s = 0.0
    for direction, spoken in enumerate((layout.forward, layout.backward)):
        members = [
            device.layer_seconds(size)[direction][run]
            * (1 - layout.parts * (1 - device.share_factors(share)[direction][run]))
            for device, share in zip(devices, stage.shares)
        ]
        total = np.max(members, axis=0)
        for layer, kind, per_sample in spoken:
            taken = exchange.seconds(kind, per_sample * size)
            total[layer] += taken
            exchange_s += taken
        seconds.append(total)
    return ChannelRun(seconds[0], seconds[1], exchange_s)


def channel_parts(
    profile: Profile, stage: Stage, pace: Pace, micro_batch: int, share: float
) -> tuple[float, float]:
    """What a member holds of its stage's saved activations and of its weights, as fractions."""
    parts = layout_of(profile, stage, pace, micro_batch).parts
    layers = profile.graph.layers[stage.start : stage.stop]
    held = []
    for sizes in (
        np.array([layer.saved_bytes_per_sample for layer in layers]),
        np.array([float(layer.parameter_bytes) for layer in layers]),
    ):
        total = float(sizes.sum())
        held.append(1 - (1 - share) * float(sizes @ parts) / total if total else 1.0)
    return held[0], held[1]


def _lay_out(sharing: Sharing, stage: Stage, pace: Pace, micro_batch: int) -> Layout:
    operations = _operations(sharing, stage, micro_batch)
    choice = choose(operations, GroupCost(stage.shares, **asdict(pace)), _BEAM)
    layer_of = {each.name: each.layer for each in sharing.operations}
    n_layers = stage.stop - stage.start
    work, shared = np.zeros(n_layers), np.zeros(n_layers)
    spoken: tuple[list[tuple[int, str, float]], list[tuple[int, str, float]]] = ([], [])
    table = {operation.name: operation for operation in operations}
    for operation in operations:
        layer = min(max(layer_of.get(operation.name, stage.stop) - stage.start, 0), n_layers - 1)
        if stage.start <= layer_of.get(operation.name, -1) < stage.stop:
            weight = max(operation.work, 1.0)
            work[layer] += weight
            shared[layer] += weight * choice.ways[operation.name].shared
        for direction, found in enumerate(collectives_of(operation, choice, table)):
            spoken[direction].extend((layer, kind, size_bytes / micro_batch) for kind, size_bytes in found)
    return Layout(shared / np.maximum(work, 1e-300), tuple(spoken[0]), tuple(spoken[1]))


def _operations(sharing: Sharing, stage: Stage, micro_batch: int) -> list[Operation]:
    """The operations of a run between what enters, which is whole, and what leaves, which must be."""
    known = {each.name: each for each in sharing.operations}
    inside = {each.name for each in sharing.operations if stage.start <= each.layer < stage.stop}
    entering = dict.fromkeys(
        name
        for each in sharing.operations
        if each.name in inside
        for name in each.inputs
        if name not in inside
    )
    leaving = dict.fromkeys(
        name
        for each in sharing.operations
        if each.name not in inside
        for name in each.inputs
        if name in inside
    )
    n = len(stage.devices)
    operations = [_operation(known[name], micro_batch, n, enters=True) for name in entering]
    operations += [
        _operation(each, micro_batch, n, enters=False) for each in sharing.operations if each.name in inside
    ]
    forms = (Form.REPLICATED,) * len(leaving)
    operations.append(Operation("leaving", tuple(leaving), (Way("whole", forms, Form.REPLICATED),)))
    return operations


def _operation(each: SharedOperation, micro_batch: int, n: int, *, enters: bool) -> Operation:
    def scaled(collectives: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
        return tuple((kind, per_sample * micro_batch) for kind, per_sample in collectives)

    def ways() -> Iterator[Way]:
        for way in each.ways:
            if not way.shared or way.most >= n:
                forms = tuple(map(Form, way.inputs))
                yield Way(
                    way.name, forms, Form(way.output), way.shared, scaled(way.forward), scaled(way.backward)
                )

    return Operation(
        name=each.name,
        inputs=() if enters else each.inputs,
        ways=(Way("whole", (), Form.REPLICATED),) if enters else tuple(ways()),
        work=0.0 if enters else each.work * micro_batch,
        size_bytes=each.size_bytes * micro_batch,
        gradient=each.gradient,
        sharding=_SOMEHOW if each.cut else None,
        tensor=each.tensor,
    )
