"""Measures what shares of a model take: each layer's seconds at some fractions of its channels.

    one device    |   A   |   B   |   C   |      runs of layers, as in `profiling.measure`
    its half      | A/2 | B/2 | C/2 |            the same runs as the first of two members executes them

The member is this process alone: what the other would send counts as zeros that came at once, so that
what is measured is the member's own work, and a collective's cost is left to the links. The factor of a
run is that of all its layers which can be shared.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.profiles import DeviceProfile
from lightning_hetpipe.profiling.measure import (
    Times,
    medians,
    resized_rows,
    run_starts,
    scaled,
    sweep,
    total_seconds,
    unchanged,
)
from lightning_hetpipe.sharing import SharedOperation, SharedWay, Sharing
from lightning_hetpipe.stage.analyse import StageLayout, analyse, operations_of
from lightning_hetpipe.stage.batchnorm import FrozenBatchNorm, SharedBatchNorm
from lightning_hetpipe.stage.channel import ChannelStage
from lightning_hetpipe.stage.consolidate import shard_, unshard_
from lightning_hetpipe.stage.layout import GroupCost, Operation
from lightning_hetpipe.stage.shapes import samples_axis
from lightning_hetpipe.tracing import StageModule, TensorSpec, Traced
from lightning_hetpipe.tracing.traced import batch_size, resized

FRACTIONS = (0.5, 0.25, 0.125)
MOST = 8  # members of the largest group that is asked about
_PART = 0.5  # of the seconds that measuring the layers took, at most
_REPEATS = 2
_LEAST = 2  # fractions: a line through one would have to pass through a half and the whole

Array = npt.NDArray[np.float64]
Context = Callable[[], AbstractContextManager[Any]]


def sharing_of(traced: Traced, inputs: Mapping[str, Tensor], n_devices: int) -> Sharing | None:
    """What groups among so many devices can share of a model; None where there can be no group.

    Args:
        traced: The whole module.
        inputs: Of any batch; only shapes, dtypes and ``requires_grad`` are used.
    """
    if n_devices < 2:
        return None
    specs = {name: TensorSpec.of(tensor) for name, tensor in inputs.items()}
    n = batch_size(specs)
    small, large = traced.shapes(specs), traced.shapes(resized(specs, 2 * n))
    rowless = tuple(name for name in small if samples_axis(small[name].shape, large[name].shape, n) is None)
    stage = traced.stage(0, len(traced.graph), returns=False)
    most = min(n_devices, MOST)
    try:
        layers, found = operations_of(stage, inputs, range(2, most + 1))
    except PlanError:  # switches gradients off and on: by samples only
        return Sharing((), most, rowless, _coupled(traced))
    operations = tuple(
        _per_sample(operation, layers[name], [each[name] for each in found], n)
        for name, operation in found[0].items()
    )
    return Sharing(operations, most, rowless, _coupled(traced))


def _per_sample(
    operation: Operation, layer: int | None, by_size: Sequence[Operation], n: int
) -> SharedOperation:
    def per_sample(collectives: Any) -> tuple[tuple[str, float], ...]:
        return tuple((kind, size_bytes / n) for kind, size_bytes in collectives)

    ways = tuple(
        SharedWay(
            way.name,
            tuple(map(str, way.inputs)),
            str(way.output),
            way.shared,
            per_sample(way.forward),
            per_sample(way.backward),
            most=1 + sum(any(_same(way, other) for other in each.ways) for each in by_size),
        )
        for way in operation.ways
    )
    return SharedOperation(
        name=operation.name,
        layer=-1 if layer is None else layer,
        inputs=operation.inputs,
        ways=ways,
        work=operation.work / n,
        size_bytes=operation.size_bytes / n,
        gradient=operation.gradient,
        cut=operation.sharding is not None,
        tensor=operation.tensor,
    )


def _same(way: Any, other: Any) -> bool:
    return bool((way.name, way.inputs, way.output) == (other.name, other.inputs, other.output))


def _coupled(traced: Traced) -> tuple[int, ...]:
    """Layers that normalise by the samples they see."""
    found = []
    for layer in range(len(traced.graph)):
        names = traced.parameters_of(layer, layer + 1) | traced.buffers_of(layer, layer + 1)
        modules = {traced.module.get_submodule(name.rpartition(".")[0]) for name in names}
        if any(
            isinstance(each, _BatchNorm)
            and each.training
            and not isinstance(each, (SharedBatchNorm, FrozenBatchNorm))
            for each in modules
        ):
            found.append(layer)
    return tuple(found)


def measuring_shares(
    traced: Traced, inputs: Mapping[str, Tensor], context: Context = nullcontext
) -> Callable[[DeviceProfile, float], DeviceProfile]:
    """`with_shares` as `profile_device` takes it."""
    return lambda profile, spent_s: with_shares(profile, traced, inputs, context=context, spent_s=spent_s)


def with_shares(
    profile: DeviceProfile,
    traced: Traced,
    inputs: Mapping[str, Tensor],
    *,
    context: Context,
    spent_s: float,
) -> DeviceProfile:
    """The profile with the factors of `FRACTIONS`, or of two and those that half of ``spent_s`` has time for.

    Args:
        profile: The layers' seconds on all channels.
        traced, inputs, context: As for `measure_device`.
        spent_s: Seconds that the profile took.
    """
    size = profile.micro_batches[len(profile.micro_batches) // 2]
    batch = resized_rows(inputs, size)
    whole = profile.layer_seconds(size)
    starts = run_starts((whole[0].tolist(), whole[1].tolist()))
    edges = [*starts, len(traced.graph)]
    place = next(iter(batch.values())).device
    deadline_s = time.perf_counter() + _PART * spent_s
    columns: list[tuple[list[float], list[float]]] = []
    done: list[float] = []
    with unchanged(traced.module, batch):
        stages = [traced.stage(*edge, place, returns=False) for edge in pairwise(edges)]
        for fraction in FRACTIONS:
            began_s = time.perf_counter()
            runs = [_Run(*edge, _layout(traced, *edge, batch, fraction)) for edge in pairwise(edges)]
            before, after = _in_turn(traced.module, stages, runs, batch, context)
            parts = [part for run, stage in zip(runs, stages) for part in run.shared_parts(stage)]
            columns.append(_factors(whole, np.array(parts), runs, fraction, before, after))
            done.append(fraction)
            now_s = time.perf_counter()
            if len(done) >= _LEAST and now_s + (now_s - began_s) > deadline_s:
                break
    forward, backward = (tuple(zip(*(column[kind] for column in columns))) for kind in (0, 1))
    return replace(
        profile, fractions=tuple(done), forward_factors=tuple(forward), backward_factors=tuple(backward)
    )


@dataclass(frozen=True)
class _Run:
    """Layers ``start`` to ``stop - 1``, and how two members share them; None where they cannot."""

    start: int
    stop: int
    layout: StageLayout | None

    def shared_parts(self, stage: StageModule) -> list[float]:
        """The fraction of each layer's arithmetic that is shared."""
        n_layers = self.stop - self.start
        if self.layout is None:
            return [0.0] * n_layers
        work, shared = np.zeros(n_layers), np.zeros(n_layers)
        for node in stage.graph.nodes:
            if "layer" in node.meta:
                done = self.layout.operations[node.name].work
                work[node.meta["layer"] - self.start] += done
                shared[node.meta["layer"] - self.start] += done * self.layout.choice.ways[node.name].shared
        parts: list[float] = (shared / np.maximum(work, 1e-300)).tolist()
        return parts


def _in_turn(
    module: nn.Module,
    stages: Sequence[StageModule],
    runs: Sequence[_Run],
    batch: Mapping[str, Tensor],
    context: Context,
) -> tuple[Times, Times]:
    """Seconds of each run on all channels, and of the first member's part of it.

    They take turns, and each turn counts in proportion to its run on all channels: so a machine whose speed
    drifts meanwhile changes both alike.
    """
    members: list[Any] = [
        stage if run.layout is None else ChannelStage(stage, run.layout, _Alone())
        for stage, run in zip(stages, runs)
    ]
    before: list[Times] = []
    after: list[Times] = []
    for _ in range(_REPEATS):
        sweep(stages, batch, context)  # warms up
        before.append(sweep(stages, batch, context)[0])
        with _cut(module, [run.layout for run in runs if run.layout is not None]):
            sweep(members, batch, context)  # warms up
            after.append(sweep(members, batch, context)[0])
    usual_s = statistics.median(map(total_seconds, before))
    paces = [usual_s / total_seconds(times) for times in before]
    return (
        medians([scaled(times, pace) for times, pace in zip(before, paces)]),
        medians([scaled(times, pace) for times, pace in zip(after, paces)]),
    )


def _factors(
    whole: tuple[Array, Array],
    parts: Array,
    runs: Sequence[_Run],
    fraction: float,
    before: Times,
    after: Times,
) -> Times:
    """Per layer: (seconds of the run with its share - seconds of what is not shared) / seconds of what is."""
    found: Times = ([], [])
    for kind, table in enumerate(whole):
        for index, run in enumerate(runs):
            seconds = table[run.start : run.stop]
            total, shared = float(seconds.sum()), float(seconds @ parts[run.start : run.stop])
            factor = 1.0
            if shared > 0 and before[kind][index] > 0:
                ratio = after[kind][index] / before[kind][index]
                factor = max(fraction / 4, (ratio * total - (total - shared)) / shared)
            found[kind].extend([factor] * (run.stop - run.start))
    return found


def _layout(
    traced: Traced, start: int, stop: int, batch: Mapping[str, Tensor], fraction: float
) -> StageLayout | None:
    """How two members of these shares divide a run when links are free; None where they cannot."""
    specs = traced.shapes({name: TensorSpec.of(tensor) for name, tensor in batch.items()})
    stage = traced.stage(start, stop, returns=False)
    inputs = {
        name: torch.empty(
            specs[name].shape, dtype=specs[name].dtype, device="meta", requires_grad=specs[name].requires_grad
        )
        for name in stage.input_names
    }
    shares = (fraction, 1 - fraction)
    tied = {
        name
        for name in traced.parameters_of(start, stop)
        if name in traced.parameters_of(0, start) | traced.parameters_of(stop, len(traced.graph))
    }
    free = GroupCost(shares, latency_s=1e-7, bandwidth_bytes_per_s=1e14)
    try:
        return analyse(stage, inputs, shares, free, keep_whole=tied)
    except PlanError:
        return None


@contextmanager
def _cut(module: nn.Module, layouts: Sequence[StageLayout]) -> Iterator[None]:
    """Leaves the first member's part of every parameter and buffer meanwhile."""
    placements = {name: each for layout in layouts for name, each in layout.placements.items()}
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    full = {name: tensors[name].data for name in placements}
    _forget_gradients(module)
    shard_(module, placements, 0)
    try:
        yield
    finally:
        _forget_gradients(module)
        unshard_(module, full, placements)


def _forget_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


class _Done:
    def wait(self) -> bool:
        return True


class _Alone:
    """The first of two members; the other sends zeros, at once."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[Tensor]) -> _Done:
        return _Done()

    def broadcast(self, tensor: Tensor, root: int) -> _Done:
        if root:
            tensor.zero_()
        return _Done()

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> _Done:
        output.zero_()
        return _Done()
