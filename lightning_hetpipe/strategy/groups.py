"""The groups of a plan: whether they can share their stages, and what each member runs.

plan ── check ──► layouts of the channel groups ──► who holds which shard     before the model is cut
Sharing ──► ChannelStage or BatchStage, reductions, BatchNorm over the members    after it
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetpipe.engine.membership import Membership
from lightning_hetpipe.engine.pieces import Holding
from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.graph import Route
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.stage.analyse import StageLayout, analyse
from lightning_hetpipe.stage.batch import BatchStage, reduce_gradients, share_buffers
from lightning_hetpipe.stage.batchnorm import SharedBatchNorm, commit_all
from lightning_hetpipe.stage.channel import ChannelStage
from lightning_hetpipe.stage.consolidate import Placement
from lightning_hetpipe.stage.layout import GroupCost
from lightning_hetpipe.stage.mixing import mixing_layer
from lightning_hetpipe.stage.norm import set_process_group
from lightning_hetpipe.stage.shapes import samples_axis
from lightning_hetpipe.strategy.partition import OwnerMap
from lightning_hetpipe.tracing import TensorSpec, Traced
from lightning_hetpipe.tracing.traced import batch_size, resized

Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Groups:
    """How the groups of a plan share their stages; equal on every rank.

    Attributes:
        axes: The dimension of each value that counts the samples.
        layouts: Of the stages that are shared by channels.
    """

    plan: Plan
    axes: Mapping[str, int] = field(default_factory=dict)
    layouts: Mapping[int, StageLayout] = field(default_factory=dict)

    @property
    def holdings(self) -> list[Holding]:
        """Who holds which rows of each stage, the loss stage included."""
        found = [
            Holding(ranks, stage.shares, stage.split)
            for stage, ranks in zip(self.plan.stages, self.plan.ranks_of_stage)
        ]
        return [*found, Holding((0,))] if self.plan.loss_apart else found

    def indices(self, split: str) -> list[int]:
        """The stages that are shared so."""
        return [index for index, stage in enumerate(self.plan.stages) if stage.split == split]


def make_groups(plan: Plan, traced: Traced, example: Specs, keep_whole: set[str]) -> Groups:
    """Checks the groups of a plan and lays out their stages; before the model is cut, on every rank alike.

    Args:
        example: Specs of the inputs of any batch.
        keep_whole: Names of parameters, relative to the pipelined module, that are also used elsewhere.

    Raises:
        PlanError: A group cannot share its stage.
    """
    if all(stage.split == "none" for stage in plan.stages):
        return Groups(plan)
    n = batch_size(example)
    small, large = traced.shapes(example), traced.shapes(resized(example, 2 * n))
    axes = {
        name: axis
        for name, spec in small.items()
        if (axis := samples_axis(spec.shape, large[name].shape, n)) is not None
    }
    fixed = {name for name, spec in small.items() if spec.shape == large[name].shape}
    groups = Groups(plan, axes)
    for route in plan.routes(traced.graph):
        for name in route.values:
            if name not in axes:
                _check_value(plan, route, name, fixed=name in fixed, empty=not prod(small[name].shape))
    for index in groups.indices("batch"):
        entering = traced.stage(plan.stages[index].start, plan.stages[index].stop, returns=False).input_names
        if not any(name in axes for name in entering):
            raise PlanError(f"{_label(plan, index)}: no value with samples enters it. Give it one device.")
    slices = traced.shapes(resized(example, plan.micro_batch))
    layouts = {index: _layout(plan, index, traced, slices, keep_whole) for index in groups.indices("channel")}
    return Groups(plan, axes, layouts)


def check_samples(groups: Groups, traced: Traced, inputs: Mapping[str, Tensor]) -> None:
    """Refuses stages shared by samples whose layers mix samples; before the model is cut, on rank 0.

    Args:
        inputs: A call of the pipelined module.

    Raises:
        PlanError: There is one.
    """
    for index in groups.indices("batch"):
        stage, where = groups.plan.stages[index], _label(groups.plan, index)
        try:
            layer = mixing_layer(traced, stage.start, stage.stop, inputs, groups.axes)
        except RuntimeError as error:
            raise PlanError(
                f"{where}: its layers do not run on a part of the samples ({str(error).splitlines()[0]}): "
                "share the stage by channels, or give it one device"
            ) from error
        if layer is not None:
            raise PlanError(
                f"{where}: what its layer {layer!r} makes of a sample depends on the other samples, of which "
                "each device has its own: cut there so that one device holds that layer, or share the stage "
                "by channels"
            )


def _check_value(plan: Plan, route: Route, name: str, *, fixed: bool, empty: bool) -> None:
    """Refuses a value without rows that enters or leaves a stage which is shared by samples."""
    ends = [end for end in (route.source, route.target) if end in range(len(plan.stages))]
    by_samples = [end for end in ends if plan.stages[end].split == "batch"]
    if not by_samples:
        return
    where = _label(plan, by_samples[0])
    instead = "cut at another layer, or share the stage by channels"
    if not fixed:
        raise PlanError(
            f"{where}: {name!r} crosses its boundary, and no dimension of it counts the samples: {instead}"
        )
    if name in route.gradients:
        raise PlanError(
            f"{where}: {name!r} crosses its boundary and is the same for all samples, so that its gradient "
            f"would have to be summed over the devices: {instead}"
        )
    if route.source in by_samples and not empty:
        raise PlanError(
            f"{where}: {name!r} leaves it and is made of all samples, of which each device has its own: "
            f"{instead}"
        )


def _layout(plan: Plan, index: int, traced: Traced, specs: Specs, keep_whole: set[str]) -> StageLayout:
    stage = plan.stages[index]
    kinds = {plan.cluster.device(name).kind for name in stage.devices}
    if len(kinds) > 1:
        raise PlanError(
            f"{_label(plan, index)}: devices of kinds {', '.join(sorted(kinds))} draw different random "
            "numbers, so that they cannot share channels: share the stage by samples"
        )
    module = traced.stage(stage.start, stage.stop, returns=False)
    inputs = {
        name: torch.empty(
            specs[name].shape, dtype=specs[name].dtype, device="meta", requires_grad=specs[name].requires_grad
        )
        for name in module.input_names
    }
    try:
        layout = analyse(module, inputs, stage.shares, _cost(plan, index), keep_whole=keep_whole)
        if not _fits(plan, index, traced, layout):  # what is quickest whole may have to be cut all the same
            layout = analyse(module, inputs, stage.shares, _FREE(stage.shares), keep_whole=keep_whole)
    except PlanError as error:
        raise PlanError(f"{_label(plan, index)}: {error}") from error
    _check_shares(plan, index, layout)
    return layout


def _check_shares(plan: Plan, index: int, layout: StageLayout) -> None:
    """Refuses a share that means no channel anywhere: one would be given, which is more than was asked."""
    stage = plan.stages[index]
    widest = max((each.sharding.bounds[-1] for each in layout.placements.values()), default=0)
    for name, share in zip(stage.devices, stage.shares):
        if share * widest < 0.5 and widest:
            raise PlanError(
                f"{_label(plan, index)}: the share {share:g} of {name} is less than half a channel of the "
                f"{widest} that the widest of its layers has: leave {name} out of the group, or give it more"
            )


_FREE = partial(GroupCost, latency_s=0.0, bandwidth_bytes_per_s=inf)
_STATES = 4  # a weight, its gradient and the two moments of Adam


def _fits(plan: Plan, index: int, traced: Traced, layout: StageLayout) -> bool:
    """Whether every member has memory for what it holds of the stage's weights, trained by Adam."""
    stage = plan.stages[index]
    tensors = {
        name: traced.module.get_parameter(name) for name in traced.parameters_of(stage.start, stage.stop)
    }
    for member, device in enumerate(stage.devices):
        held = sum(
            tensor.nbytes * (_part(layout.placements[name], member) if name in layout.placements else 1.0)
            for name, tensor in tensors.items()
        )
        limit = plan.cluster.device(device).memory_bytes
        if limit is not None and held * _STATES > limit:
            return False
    return True


def _part(placement: Placement, member: int) -> float:
    return placement.sharding.counts[member] / placement.sharding.bounds[-1]


def _cost(plan: Plan, index: int) -> GroupCost:
    stage = plan.stages[index]
    return GroupCost(stage.shares, **asdict(plan.pace(stage)))


def _label(plan: Plan, index: int) -> str:
    stage = plan.stages[index]
    return f"stage {index}, which {', '.join(stage.devices)} share by {_OF[stage.split]}"


_OF = {"channel": "channels", "batch": "samples", "none": "nothing"}


@dataclass(frozen=True)
class OwnPart:
    """What this rank runs of the plan.

    Attributes:
        stages: By index, the loss stage included.
        reductions: What a group does after its last backward.
        commit: Ends a batch for the deferred BatchNorm layers.
        leave: Undoes what was done to the modules.
    """

    stages: Mapping[int, Any]
    reductions: Mapping[int, Callable[[], None]]
    commit: Callable[[], None]
    leave: Callable[[], None]


def build(
    groups: Groups,
    traced: Traced,
    module: nn.Module,
    owners: OwnerMap,
    rank: int,
    device: torch.device,
    memberships: Mapping[int, Membership],
    seed: int,
) -> OwnPart:
    """Builds this rank's stages; after the model was cut.

    Args:
        module: The LightningModule.
        owners: Which rank holds what of it.
        memberships: Of this rank, by stage.
        seed: Of what channel groups run whole, equal on every rank.
    """
    plan = groups.plan
    stages: dict[int, Any] = {}
    reductions: dict[int, Callable[[], None]] = {}
    shared = nn.ModuleList()  # BatchNorm layers of which other members see other samples
    for index, (stage, ranks) in enumerate(zip(plan.stages, plan.ranks_of_stage)):
        if rank not in ranks:
            continue
        stages[index] = traced.stage(stage.start, stage.stop, device, returns=not plan.loss_apart)
        if stage.split == "channel":
            stages[index] = ChannelStage(stages[index], groups.layouts[index], memberships[index], seed)
        elif stage.split == "batch":
            shared.extend(_norms(traced, stage.start, stage.stop))
            together = any(isinstance(each, SharedBatchNorm) for each in shared)
            stages[index] = BatchStage(stages[index], groups.axes, together=together)
            reductions[index] = _reduction(module, owners, ranks, memberships[index])
    if plan.loss_apart and rank == 0:
        n_layers = len(traced.graph)
        stages[len(plan.stages)] = traced.stage(n_layers, n_layers, device)
    group = next((memberships[index] for index in reductions), None)
    set_process_group(shared, group)

    def commit() -> None:
        if group is not None:
            commit_all(shared, group)
        commit_all(module)

    return OwnPart(stages, reductions, commit, lambda: set_process_group(shared, None))


def _norms(traced: Traced, start: int, stop: int) -> list[nn.Module]:
    """The BatchNorm layers of a stage, in one order on all ranks."""
    names = traced.parameters_of(start, stop) | traced.buffers_of(start, stop)
    found = [traced.module.get_submodule(name) for name in sorted({n.rpartition(".")[0] for n in names})]
    return [each for each in found if isinstance(each, _BatchNorm)]


def _reduction(
    module: nn.Module, owners: OwnerMap, ranks: tuple[int, ...], group: Membership
) -> Callable[[], None]:
    """Sums the gradients that only this group makes, and gives all members the first one's buffers."""
    parameters = [each for name, each in module.named_parameters() if owners.of(name) == ranks]
    buffers = [each for name, each in module.named_buffers() if owners.of(name) == ranks]

    def reduce() -> None:
        reduce_gradients(parameters, group)
        share_buffers(buffers, group)

    return reduce
