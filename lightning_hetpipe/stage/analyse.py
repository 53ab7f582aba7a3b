"""From a traced stage to the layout of its group: what is shared, what is whole, where it communicates."""

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.stage.consolidate import Placement
from lightning_hetpipe.stage.layout import (
    Choice,
    Cost,
    Form,
    GroupCost,
    Operation,
    Sharding,
    Way,
    choose,
    collectives,
)
from lightning_hetpipe.stage.rules import IN_PLACE_OPERATORS, answer
from lightning_hetpipe.stage.shapes import Code, code_of, infer_shapes
from lightning_hetpipe.stage.site import Answer, Cutter, Realisation, Site


@dataclass(frozen=True)
class StageLayout:
    """How a group runs a stage; equal on every member that computes it from equal inputs.

    Attributes:
        shares: Of the members.
        operations: By node name, in execution order.
        choice: The way of each, and the conversions between them.
        realisations: By node name: what its way means in torch.
        operands: By node name: the values its arguments stand for (behind operations in place).
        plain: Names of the values that hold no tensor (sizes).
        placements: Fully qualified name of every cut parameter and buffer to where its parts lie.
        whole: Names of the parameters that every member holds entirely.
    """

    shares: tuple[float, ...]
    operations: Mapping[str, Operation]
    choice: Choice
    realisations: Mapping[str, Realisation]
    operands: Mapping[str, Mapping[str, str]]
    plain: frozenset[str]
    placements: Mapping[str, Placement]
    whole: tuple[str, ...]

    def form(self, value: str) -> tuple[Form, Sharding | None]:
        """How a value comes out of its operation, and its cuts when sharded."""
        form = self.choice.ways[value].output
        return form, self.operations[value].sharding if form is Form.SHARDED else None

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """For a table: value, operation, way, channels of each member, communication or a note."""
        rows = []
        for name, operation in self.operations.items():
            if not operation.label:
                continue
            _, sharding = self.form(name)
            cuts = ":".join(map(str, sharding.counts)) if sharding else "all"
            spoken = "; ".join(collectives(operation, self.choice, self.operations))
            way = self.choice.ways[name].name
            note = operation.note if way == "whole" else ""
            rows.append((name, operation.label, way, cuts, spoken or note))
        return rows

    def describe(self) -> str:
        """One line per operation, and a line of totals."""
        rows = [("value", "operation", "way", "channels", "forward/backward communication"), *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[4]]).rstrip() for row in rows]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        """How much of the stage is shared, in one line."""
        shared = sum(self.operations[n].work for n, way in self.choice.ways.items() if way.shared)
        total = sum(operation.work for operation in self.operations.values()) or 1.0
        return (
            f"shared by {len(self.shares)} devices: {shared / total:.0%} of the arithmetic, "
            f"{len(self.placements)} tensors cut, {len(self.whole)} parameters whole"
        )


def analyse(
    stage: nn.Module,
    inputs: Mapping[str, Tensor],
    shares: tuple[float, ...],
    cost: Cost | None = None,
    align: int = 1,
    keep_whole: Collection[str] = (),
) -> StageLayout:
    """Chooses the layout of a stage; must see the full (or meta) tensors, before they are cut.

    Args:
        stage: A `StageModule`, or a `torch.fx.GraphModule`.
        inputs: One tensor per value that enters, of one micro-batch (meta will do).
        shares: Fractions of the members, in order of the group's ranks.
        cost: Seconds of compute and collectives; default: speeds proportional to the shares.
        align: Multiple of channels that the members' kernels prefer; kept where there are enough.
        keep_whole: Names of parameters not to cut: those that other stages hold too.

    Raises:
        PlanError: No operation can be shared: fewer channels than devices, or nothing of a known kind.
    """
    shares = tuple(shares)
    code = code_of(stage)
    values = infer_shapes(code, inputs)
    plain = frozenset(name for name, value in values.items() if not _holds_tensor(value))
    survey = _Survey(code, values, plain, Cutter(shares, align), keep_whole)
    survey.run()
    operations = survey.operations
    if not any(way.shared for operation in operations.values() for way in operation.ways):
        notes = "; ".join(f"{o.name}: {o.note}" for o in operations.values() if o.note)
        raise PlanError(
            f"nothing in this stage can be shared by channels among {len(shares)} devices at {shares}: "
            f"{notes or 'it has no operation with channels'}. Use a smaller group, or split by batch"
        )
    chosen = choose(list(operations.values()), cost or GroupCost(shares))
    realisations = {name: survey.realisations[name][_key(way)] for name, way in chosen.ways.items()}
    placements = _placements(code, realisations)
    named = (code.name(name) for name, _ in code.root.named_parameters() if name in survey.parameters)
    whole = tuple(name for name in named if name not in placements)
    return StageLayout(shares, operations, chosen, realisations, survey.operands, plain, placements, whole)


def operations_of(
    stage: nn.Module, inputs: Mapping[str, Tensor], members: Iterable[int]
) -> tuple[dict[str, int | None], list[dict[str, Operation]]]:
    """What groups of several sizes can do with a stage, for those who choose a layout without torch.

    Args:
        stage, inputs: As for `analyse`.
        members: Sizes of groups.

    Returns:
        The layer of each operation (``meta["layer"]`` of its node; None for what enters or leaves), and for
        each size the operations by name. Which ways there are depends on the number of members only, not
        on their shares.
    """
    code = code_of(stage)
    values = infer_shapes(code, inputs)
    plain = frozenset(name for name, value in values.items() if not _holds_tensor(value))
    found = []
    for n in members:
        survey = _Survey(code, values, plain, Cutter((1 / n,) * n), ())
        survey.run()
        found.append(survey.operations)
    layers: dict[str, int | None] = {}
    for node in code.graph.nodes:
        users = [user.meta["layer"] for user in node.users if "layer" in user.meta]
        used_in = min(users) if node.op == "get_attr" and users else None
        layers[node.name] = node.meta.get("layer", used_in)
    return layers, found


class _Survey:
    """Asks the rules about every node, in order."""

    def __init__(
        self,
        code: Code,
        values: Mapping[str, Any],
        plain: frozenset[str],
        cutter: Cutter,
        keep_whole: Collection[str],
    ) -> None:
        self.code = code
        self.values = values
        self.plain = plain
        self.cutter = cutter
        self.modules = dict(code.root.named_modules(remove_duplicate=False))
        self.nodes = {node.name: node for node in code.graph.nodes}
        self.used, self.parameters = _uses(code, self.modules)
        for name, parameter in code.root.named_parameters(remove_duplicate=False):
            if code.name(name) in keep_whole and id(parameter) in self.used:
                self.used[id(parameter)] += 1  # by another stage
        self.operations: dict[str, Operation] = {}
        self.realisations: dict[str, dict[str, Realisation]] = {}
        self.operands: dict[str, dict[str, str]] = {}
        self.shardings: dict[str, Sharding | None] = {}

    def run(self) -> None:
        for channels, unit in _wanted_units(self.code.graph, self.modules):
            self.cutter.ask(channels, unit)
        renamed: dict[str, str] = {}  # tensors that were changed in place, to what holds the result
        for node in self.code.graph.nodes:
            if node.target is torch.set_grad_enabled:
                raise PlanError(
                    "this stage switches gradients off and on, so that its channels cannot be shared: "
                    "split it by batch"
                )
            named = {n.name: renamed.get(n.name, n.name) for n in node.all_input_nodes}
            self.operands[node.name] = named
            entering = node.name in self.code.entering
            taken = (
                [] if entering else [named[n.name] for n in node.all_input_nodes if n.name not in self.plain]
            )
            self._visit(node, list(dict.fromkeys(taken)))
            module = self.module(node)
            if mutates(node, module):
                written = named[node.args[0].name]
                renamed = {name: node.name if now == written else now for name, now in renamed.items()}
                renamed |= {node.args[0].name: node.name, written: node.name}

    def module(self, node: fx.Node) -> nn.Module | None:
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def _visit(self, node: fx.Node, taken: list[str]) -> None:
        module = self.module(node)
        answered = self._answer(node, module, taken)
        self.shardings[node.name] = answered.sharding
        sharding = self.shardings[taken[0]] if len(taken) == 1 else None
        ways = _whole_ways(node, module, len(taken), sharding) + answered.shared
        self.realisations[node.name] = {_key(realisation.way): realisation for realisation in ways}
        value = self.values[node.name]
        tensor = isinstance(value, Tensor)
        self.operations[node.name] = Operation(
            name=node.name,
            inputs=tuple(taken),
            ways=tuple(realisation.way for realisation in ways),
            work=answered.work,
            size_bytes=float(value.numel() * value.element_size()) if tensor else 0.0,
            gradient=value.requires_grad if tensor else True,
            sharding=answered.sharding,
            tensor=tensor,
            label="" if node.name in self.code.entering or node.name in self.plain else _label(node, module),
            note=answered.note,
        )

    def _answer(self, node: fx.Node, module: nn.Module | None, taken: list[str]) -> Answer:
        value = self.values[node.name]
        if node.name in self.code.entering:
            return Answer(_guess(value, self.cutter))
        if node.op == "get_attr":
            return Answer(_only_dim(value, self.cutter))
        if node.op in ("placeholder", "output") or node.name in self.plain:
            return Answer()
        own = module is None or all(self.used[id(parameter)] == 1 for parameter in module.parameters())
        inputs = tuple(self.nodes[name] for name in taken)
        return answer(Site(node, module, inputs, self.values, self.shardings, self.cutter, own))


def mutates(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the operation writes its result into its first argument."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_module":
        return bool(getattr(module, "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.target in IN_PLACE_OPERATORS or bool(node.kwargs.get("inplace", False))


def _key(way: Way) -> str:
    return f"{way.name} {' '.join(way.inputs)}"


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)) and not hasattr(value, "numel"):
        return any(_holds_tensor(item) for item in value)
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, Tensor)


def _uses(code: Code, modules: Mapping[str, nn.Module]) -> tuple[dict[int, int], set[str]]:
    """How many nodes use each parameter, and the names of those used at all."""
    count: dict[int, int] = {}
    for node in code.graph.nodes:
        if node.op == "call_module":
            tensors = list(modules[str(node.target)].parameters())
        elif node.op == "get_attr":
            tensors = [operator.attrgetter(str(node.target))(code.root)]
        else:
            continue
        for tensor in tensors:
            count[id(tensor)] = count.get(id(tensor), 0) + 1
    return count, {name for name, parameter in code.root.named_parameters() if id(parameter) in count}


def _wanted_units(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> Iterator[tuple[int, int]]:
    """(channels, unit) that grouped operations ask of the cuts."""
    for node in graph.nodes:
        module = modules[str(node.target)] if node.op == "call_module" else None
        if isinstance(module, nn.GroupNorm):
            yield module.num_channels, module.num_channels // module.num_groups
        elif isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1:
            yield module.in_channels, module.in_channels // module.groups
            yield module.out_channels, module.out_channels // module.groups


def _guess(value: Any, cutter: Cutter) -> Sharding | None:
    """The channels of an input: the last dimension of tokens, dimension 1 of anything else."""
    if not isinstance(value, Tensor) or value.ndim < 2 or not value.is_floating_point():
        return None
    dim = 2 if value.ndim == 3 else 1
    return cutter.cut(value.shape[dim], dim)


def _only_dim(value: Any, cutter: Cutter) -> Sharding | None:
    """A parameter used as a tensor, such as a scale per channel, is cut along its only dimension."""
    if not isinstance(value, Tensor):
        return None
    dims = [dim for dim, size in enumerate(value.shape) if size > 1]
    return cutter.cut(value.shape[dims[0]], dims[0]) if len(dims) == 1 else None


def _whole_ways(
    node: fx.Node, module: nn.Module | None, n_inputs: int, sharding: Sharding | None
) -> list[Realisation]:
    """Every member does all of it; without state also on a copied value, and sizes on any form."""
    whole = [Realisation(Way("whole", (Form.REPLICATED,) * n_inputs, Form.REPLICATED))]
    if node.op == "output" or n_inputs == 0:
        return whole
    if module is None or not (any(True for _ in module.parameters()) or any(True for _ in module.buffers())):
        whole.append(Realisation(Way("whole", (Form.COPIED,) * n_inputs, Form.COPIED)))
    if n_inputs == 1 and _reads_other_sizes(node, sharding):
        whole.append(Realisation(Way("whole", (Form.SHARDED,), Form.REPLICATED)))
    return whole


def _reads_other_sizes(node: fx.Node, sharding: Sharding | None) -> bool:
    """Whether the node asks for sizes of dimensions that are not cut."""
    if sharding is None:
        return False
    if node.target == "size" and len(node.args) == 2:
        return isinstance(node.args[1], int) and node.args[1] >= 0 and node.args[1] != sharding.dim
    if node.target == "size" or (node.target is getattr and node.args[1] == "shape"):
        return all(
            user.target is operator.getitem
            and isinstance(user.args[1], int)
            and user.args[1] >= 0
            and user.args[1] != sharding.dim
            for user in node.users
        )
    return False


def _label(node: fx.Node, module: nn.Module | None) -> str:
    if node.op in ("placeholder", "get_attr", "output"):
        return ""
    return type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target))


def _placements(code: Code, realisations: Mapping[str, Realisation]) -> dict[str, Placement]:
    """Cut tensors by their names relative to the pipelined module."""
    return {
        code.name(f"{node.target}.{name}"): placement
        for node in code.graph.nodes
        for name, placement in realisations[node.name].placements.items()
    }
