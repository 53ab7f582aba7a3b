"""One member's part of a stage that a group shares by channels, exactly.

    values ──► whole ──► [conv, norm, relu: my channels] ──gather──► [conv] ... [conv] ──sum──► whole
               same on all     column                            column     row        same on all

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.stage import collective
from lightning_hetpipe.stage.analyse import StageLayout, mutates
from lightning_hetpipe.stage.consolidate import shard_
from lightning_hetpipe.stage.kernels import Kernel, Member, seed_streams, with_own_randomness
from lightning_hetpipe.stage.layout import Conversion, Form
from lightning_hetpipe.stage.members import Members
from lightning_hetpipe.stage.shapes import Code, code_of

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
        stage: A `StageModule`, or a `torch.fx.GraphModule`. Its parameters are, or will be, this
            member's shards (`shard_`).
        layout: As `analyse` chose it, equal on every member.
        group: The members' own process group; the rank in it is the member.
        seed: Of the random operations, equal on every member.

    Attributes:
        forwards: Count of forwards, which moves the random stream; set it to repeat one (recompute).
    """

    def __init__(self, stage: nn.Module, layout: StageLayout, group: Members, seed: int = 0) -> None:
        super().__init__()
        if group.size() != len(layout.shares):
            raise PlanError(f"a layout for {len(layout.shares)} members cannot run on {group.size()}")
        self.__dict__["stage"] = stage  # not a child: this module owns nothing
        self.code = code_of(stage)
        self.layout = layout
        self.member = Member(group.rank(), group)
        self.seed = seed
        self.forwards = 0
        self._steps = _with_drops(_program(self.code, layout, self.member))

    @property
    def input_names(self) -> tuple[str, ...]:
        """Values that enter the stage."""
        return tuple(self.code.entering.values())

    @property
    def output_names(self) -> tuple[str, ...]:
        """Values that leave a `StageModule`."""
        names: tuple[str, ...] = self.__dict__["stage"].output_names
        return names

    def shard_(self) -> "ChannelStage":
        """Cuts the stage's full parameters and buffers in place to this member's."""
        shard_(self.code.module, self.layout.placements, self.member.index)
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
            seed_streams(self.seed * 1_000_003 + self.forwards, devices)
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

    def output(self, values: Mapping[str, Tensor]) -> Any:
        """Makes what the pipelined module returns of what this last stage's forward returned."""
        return self.__dict__["stage"].output(values)


def _program(code: Code, layout: StageLayout, member: Member) -> list[Step]:
    steps: list[Step] = []
    modules = dict(code.root.named_modules(remove_duplicate=False))
    consumers = Counter(value for operands in layout.operands.values() for value in operands.values())
    for node in code.graph.nodes:
        name, realisation = node.name, layout.realisations[node.name]
        steps += [_conversion(c, layout, member) for c in layout.choice.conversions[name]]
        forms = dict(zip(layout.operations[name].inputs, realisation.way.inputs))
        operands = layout.operands[name]
        result: Key = (name, None if name in layout.plain else realisation.way.output)
        if name in code.entering:
            steps.append(Step(name, operator.itemgetter(code.entering[name]), (VALUES,), {}, result))
            continue
        if node.op == "placeholder":
            continue  # the mapping from which the inputs are popped
        args, kwargs = (_slots(argument, operands, forms) for argument in (node.args, node.kwargs))
        module = modules[str(node.target)] if node.op == "call_module" else None
        run = realisation.kernel(member) if realisation.kernel else _target(code.root, node, module)
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
    def slot(node: fx.Node) -> Any:
        return Slot((operands[node.name], forms.get(operands[node.name])))

    return fx.node.map_arg(argument, slot)


def _target(root: nn.Module, node: fx.Node, module: nn.Module | None) -> Kernel:
    """What the node itself calls."""
    if module is not None:
        return module
    if node.op == "output":
        return lambda result: result
    if not isinstance(node.target, str):
        return node.target
    name = node.target
    if node.op == "get_attr":
        return lambda: operator.attrgetter(name)(root)
    return lambda target, *args, **kwargs: getattr(target, name)(*args, **kwargs)


def _on_a_copy(run: Kernel) -> Kernel:
    """Spares a tensor that others still need from an operation in place."""
    return lambda first, *args, **kwargs: run(first.clone(), *args, **kwargs)


def _conversion(conversion: Conversion, layout: StageLayout, member: Member) -> Step:
    sharding = layout.operations[conversion.value].sharding
    where = (sharding.bounds, sharding.dim, member.group) if sharding else ()
    run: Any
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
        used = {step.result, *_keys(step.args), *_keys(step.kwargs)}
        dropping.append(replace(step, drop=tuple(used - needed)))
        needed |= used
    return dropping[::-1]


def _keys(argument: Any) -> Iterator[Key]:
    """The values in an argument."""
    if isinstance(argument, Slot):
        yield argument.key
    elif isinstance(argument, slice):
        yield from _keys((argument.start, argument.stop, argument.step))
    elif isinstance(argument, Mapping):
        yield from _keys(tuple(argument.values()))
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from _keys(item)
