"""One member's part of a stage that a group shares by channels, exactly.

    values ──► whole ──slice──► [conv | norm | relu of my channels] ──gather──► [conv] ──sum──► whole ──► outputs
               same on all       different on each member              column    row             same on all

Values enter and leave whole (replicated) on every member. A replicated parameter gets the full
gradient on every member, a cut one the gradient of its shard, so that no gradient is reduced after
backward. Every member calls forward and backward in the same order.

Randomness: one stream per forward is seeded alike on every member, from ``seed`` and the count of
forwards, so that what runs whole draws the same mask everywhere; what runs on shards draws from a stream
of its own. The global generators are left as they were. Members whose devices have different
generators (cpu and cuda in one group) must not run random operations whole.
"""

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import ProcessGroup

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.stage import collective
from lightning_hetpipe.stage.analyse import StageLayout, mutates
from lightning_hetpipe.stage.consolidate import shard_
from lightning_hetpipe.stage.kernels import Kernel, Member, with_own_randomness
from lightning_hetpipe.stage.layout import Conversion, Form

Key = tuple[str, Form | None]  # a value in one of its forms; None where it is no tensor


@dataclass(frozen=True)
class Step:
    """One call of the member's program.

    Attributes:
        name: Of the operation, for profiler ranges and errors.
        run: What is called.
        args, kwargs: Arguments with `Slot` in place of values.
        result: Where the result goes.
        drop: Values that nothing needs any more.
    """

    name: str
    run: Kernel
    args: Any
    kwargs: Any
    result: Key
    drop: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Slot:
    """An argument that is a value."""

    key: Key


VALUES = Slot(("", None))  # the mapping that `ChannelStage.forward` is given


class ChannelStage(nn.Module):
    """A stage of which this member computes its channels.

    Args:
        stage: The traced stage. Its parameters are, or will be, this member's shards (`shard_`).
        layout: As `analyse` chose it, equal on every member.
        group: The members' own process group; the rank in it is the member.
        seed: Of the random operations, equal on every member.

    Attributes:
        forwards: Count of forwards, which moves the random stream; set it to repeat one (recompute).
    """

    def __init__(
        self, stage: fx.GraphModule, layout: StageLayout, group: ProcessGroup, seed: int = 0
    ) -> None:
        super().__init__()
        if dist.get_world_size(group) != len(layout.shares):
            raise PlanError(
                f"a layout for {len(layout.shares)} members cannot run on {dist.get_world_size(group)}"
            )
        self.stage = stage
        self.layout = layout
        self.member = Member(dist.get_rank(group), group)
        self.seed = seed
        self.forwards = 0
        self._steps = _with_drops(_program(stage, layout, self.member))

    def shard_(self) -> "ChannelStage":
        """Cuts the stage's full parameters and buffers in place to this member's."""
        shard_(self.stage, self.layout.placements, self.member.index)
        return self

    def forward(self, values: Mapping[str, Tensor]) -> Any:
        """Runs the stage.

        Args:
            values: The stage's inputs by name, whole and equal on every member.

        Returns:
            What the traced stage returns, whole and equal on every member.
        """
        devices = {value.device for value in values.values() if value.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(self.seed * 1_000_003 + self.forwards)
            self.forwards += 1
            return self._run(values)

    def _run(self, values: Mapping[str, Tensor]) -> Any:
        live: dict[Key, Any] = {VALUES.key: values}

        def fill(argument: Any) -> Any:
            return live[argument.key] if isinstance(argument, Slot) else argument

        for step in self._steps:
            args = fx.node.map_aggregate(step.args, fill)
            kwargs = fx.node.map_aggregate(step.kwargs, fill)
            live[step.result] = step.run(*args, **kwargs)
            for key in step.drop:
                del live[key]
        return live[self._steps[-1].result]

    def train(self, mode: bool = True) -> "ChannelStage":
        """Sets this module's flag only: the mode of the stage's modules belongs to the model that owns them."""
        self.training = mode
        return self


def _program(stage: fx.GraphModule, layout: StageLayout, member: Member) -> list[Step]:
    steps: list[Step] = []
    modules = dict(stage.named_modules())
    consumers = Counter(value for operands in layout.operands.values() for value in operands.values())
    for node in stage.graph.nodes:
        name, realisation = node.name, layout.realisations[node.name]
        steps += [_conversion(c, layout, member) for c in layout.choice.conversions[name]]
        forms = dict(zip(layout.operations[name].inputs, realisation.way.inputs))
        operands = layout.operands[name]
        result: Key = (name, None if name in layout.plain else realisation.way.output)
        if node.op == "placeholder":
            steps.append(Step(name, operator.itemgetter(node.target), (VALUES,), {}, result))
            continue
        args, kwargs = (_slots(argument, operands, forms) for argument in (node.args, node.kwargs))
        module = modules[node.target] if node.op == "call_module" else None
        run = realisation.kernel(member) if realisation.kernel else _target(stage, node, module)
        if realisation.own_randomness:
            run = with_own_randomness(run, member)
        if mutates(node, module):
            written = operands[node.args[0].name]
            made_here = layout.choice.ways[written].output == forms[written]
            if consumers[written] > 1 or not made_here or not layout.operations[written].inputs:
                run = _on_a_copy(run)
        steps.append(Step(name, run, args, kwargs, result))
    return steps


def _slots(argument: Any, operands: Mapping[str, str], forms: Mapping[str, Form]) -> Any:
    return fx.node.map_arg(argument, lambda node: Slot((operands[node.name], forms.get(operands[node.name]))))


def _target(stage: fx.GraphModule, node: fx.Node, module: nn.Module | None) -> Kernel:
    """What the node itself calls."""
    if module is not None:
        return module
    if node.op == "get_attr":
        read = operator.attrgetter(node.target)
        return lambda: read(stage)
    if node.op == "call_method":
        return lambda target, *args, **kwargs: getattr(target, node.target)(*args, **kwargs)
    if node.op == "output":
        return lambda result: result
    function: Kernel = node.target
    return function


def _on_a_copy(run: Kernel) -> Kernel:
    """Spares a tensor that others still need from an operation in place."""
    return lambda first, *args, **kwargs: run(first.clone(), *args, **kwargs)


def _conversion(conversion: Conversion, layout: StageLayout, member: Member) -> Step:
    sharding = layout.operations[conversion.value].sharding
    where = (sharding.bounds, sharding.dim, member.group) if sharding else ()
    run, options = {
        (Form.REPLICATED, Form.COPIED): (collective.copy_to_group, (member.group,)),
        (Form.REPLICATED, Form.SHARDED): (collective.slice_replicated, where),
        (Form.COPIED, Form.REPLICATED): (collective.replicate_copied, (member.group,)),
        (Form.COPIED, Form.SHARDED): (collective.slice_copied, where),
        (Form.SHARDED, Form.REPLICATED): (collective.gather_replicated, where),
        (Form.SHARDED, Form.COPIED): (collective.gather_channels, where),
    }[conversion.source, conversion.target]
    return Step(
        f"{conversion.value} to {conversion.target}",
        lambda x: run(x, *options),
        (Slot((conversion.value, conversion.source)),),
        {},
        (conversion.value, conversion.target),
    )


def _with_drops(steps: list[Step]) -> list[Step]:
    """Lets every value go after its last use."""
    needed = {steps[-1].result, VALUES.key}
    dropping = []
    for step in reversed(steps):
        used: set[Key] = {step.result}
        fx.node.map_aggregate(
            (step.args, step.kwargs), lambda a: used.add(a.key) if isinstance(a, Slot) else a
        )
        dropping.append(replace(step, drop=tuple(used - needed)))
        needed |= used
    return dropping[::-1]
