"""From a traced stage to the layout of its group: what is shared, what is whole, where it communicates."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
from lightning_hetpipe.stage.rules import (
    IN_PLACE_OPERATORS,
    Answer,
    Cutter,
    Realisation,
    Site,
    answer,
)
from lightning_hetpipe.stage.shapes import infer_shapes


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
            form, sharding = self.form(name)
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
        shared = sum(self.operations[n].work for n, way in self.choice.ways.items() if way.shared)
        total = sum(operation.work for operation in self.operations.values()) or 1.0
        lines.append(
            f"shared by {len(self.shares)} devices: {shared / total:.0%} of the arithmetic, "
            f"{len(self.placements)} tensors cut, {len(self.whole)} parameters whole"
        )
        return "\n".join(lines)


def analyse(
    stage: fx.GraphModule,
    inputs: Mapping[str, Tensor],
    shares: tuple[float, ...],
    cost: Cost | None = None,
    align: int = 1,
) -> StageLayout:
    """Chooses the layout of a stage; must see the full (or meta) tensors, before they are cut.

    Args:
        stage: The traced stage; its placeholders are the names of the values that enter.
        inputs: One tensor per placeholder, of one micro-batch (meta will do).
        shares: Fractions of the members, in order of the group's ranks.
        cost: Seconds of compute and collectives; default: speeds proportional to the shares.
        align: Multiple of channels that the members' kernels prefer; kept where there are enough.

    Raises:
        PlanError: No operation can be shared: fewer channels than devices, or nothing of a known kind.
    """
    shares = tuple(shares)
    values = infer_shapes(stage, inputs)
    cutter = Cutter(shares, align)
    modules = dict(stage.named_modules())
    used = _uses(stage)
    for unit in _wanted_units(stage, modules):
        cutter.ask(*unit)
    operations: dict[str, Operation] = {}
    found: dict[str, dict[str, Realisation]] = {}
    operands: dict[str, dict[str, str]] = {}
    shardings: dict[str, Sharding | None] = {}
    renamed: dict[str, str] = {}
    for node in stage.graph.nodes:
        named = {n.name: renamed.get(n.name, n.name) for n in node.all_input_nodes}
        operands[node.name] = named
        tensors = [n for n in node.all_input_nodes if _holds_tensor(values[n.name])]
        taken = list(dict.fromkeys(named[n.name] for n in tensors))
        module = modules.get(node.target) if node.op == "call_module" else None
        answered = _answer(node, module, taken, stage, values, shardings, cutter, used)
        shardings[node.name] = answered.sharding
        ways = _whole_ways(node, module, len(taken), values, shardings, taken) + answered.shared
        found[node.name] = {_key(r.way): r for r in ways}
        operations[node.name] = _operation(node, module, taken, ways, values, answered)
        if mutates(node, module):
            written = named[node.args[0].name]
            renamed = {name: node.name if now == written else now for name, now in renamed.items()}
            renamed |= {node.args[0].name: node.name, written: node.name}
    if not any(way.shared for operation in operations.values() for way in operation.ways):
        notes = "; ".join(f"{o.name}: {o.note}" for o in operations.values() if o.note)
        raise PlanError(
            f"nothing in this stage can be shared by channels among {len(shares)} devices at shares {shares}: "
            f"{notes or 'it has no operation with channels'}. Use a smaller group, or split by batch"
        )
    chosen = choose(list(operations.values()), cost or GroupCost(shares))
    realisations = {name: found[name][_key(way)] for name, way in chosen.ways.items()}
    placements = _placements(stage, realisations)
    plain = frozenset(name for name, value in values.items() if not _holds_tensor(value))
    whole = tuple(name for name, _ in stage.named_parameters() if name not in placements)
    return StageLayout(shares, operations, chosen, realisations, operands, plain, placements, whole)


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


def _uses(stage: fx.GraphModule) -> dict[int, int]:
    """How many nodes use each parameter."""
    count: dict[int, int] = {}
    modules = dict(stage.named_modules())
    for node in stage.graph.nodes:
        if node.op == "call_module":
            for parameter in modules[node.target].parameters():
                count[id(parameter)] = count.get(id(parameter), 0) + 1
        elif node.op == "get_attr":
            tensor = operator.attrgetter(node.target)(stage)
            count[id(tensor)] = count.get(id(tensor), 0) + 1
    return count


def _wanted_units(stage: fx.GraphModule, modules: Mapping[str, nn.Module]) -> Iterator[tuple[int, int]]:
    """(channels, unit) that grouped operations ask of the cuts."""
    for node in stage.graph.nodes:
        module = modules.get(node.target) if node.op == "call_module" else None
        if isinstance(module, nn.GroupNorm):
            yield module.num_channels, module.num_channels // module.num_groups
        elif isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1:
            yield module.in_channels, module.in_channels // module.groups
            yield module.out_channels, module.out_channels // module.groups


def _answer(
    node: fx.Node,
    module: nn.Module | None,
    taken: list[str],
    stage: fx.GraphModule,
    values: Mapping[str, Any],
    shardings: Mapping[str, Sharding | None],
    cutter: Cutter,
    used: Mapping[int, int],
) -> Answer:
    if node.op == "placeholder":
        return Answer(_guess(values[node.name], cutter))
    if node.op == "get_attr":
        return Answer(_only_dim(values[node.name], cutter))
    if node.op == "output":
        return Answer()
    nodes = {n.name: n for n in stage.graph.nodes}
    own = module is None or all(used[id(parameter)] == 1 for parameter in module.parameters())
    site = Site(node, module, tuple(nodes[name] for name in taken), values, shardings, cutter, own)
    return answer(site)


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
    node: fx.Node,
    module: nn.Module | None,
    n_inputs: int,
    values: Mapping[str, Any],
    shardings: Mapping[str, Sharding | None],
    taken: list[str],
) -> list[Realisation]:
    """Every member does all of it; without parameters also on a copied value, and sizes on any form."""
    whole = [Realisation(Way("whole", (Form.REPLICATED,) * n_inputs, Form.REPLICATED))]
    if node.op == "output" or n_inputs == 0:
        return whole
    if module is None or not any(True for _ in module.parameters()):
        if module is None or not any(True for _ in module.buffers()):
            whole.append(Realisation(Way("whole", (Form.COPIED,) * n_inputs, Form.COPIED)))
    if n_inputs == 1 and _reads_other_sizes(node, shardings[taken[0]]):
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


def _operation(
    node: fx.Node,
    module: nn.Module | None,
    taken: list[str],
    ways: list[Realisation],
    values: Mapping[str, Any],
    answered: Answer,
) -> Operation:
    value = values[node.name]
    tensor = isinstance(value, Tensor)
    label = ""
    if node.op in ("call_module", "call_function", "call_method"):
        label = (
            type(module).__name__
            if module is not None
            else getattr(node.target, "__name__", str(node.target))
        )
    return Operation(
        name=node.name,
        inputs=tuple(taken),
        ways=tuple(realisation.way for realisation in ways),
        work=answered.work,
        size_bytes=float(value.numel() * value.element_size()) if tensor else 0.0,
        gradient=value.requires_grad if tensor else True,
        sharding=answered.sharding,
        tensor=tensor,
        label=label,
        note=answered.note,
    )


def _placements(stage: fx.GraphModule, realisations: Mapping[str, Realisation]) -> dict[str, Placement]:
    """Cut tensors by their fully qualified names."""
    return {
        f"{node.target}.{name}": placement
        for node in stage.graph.nodes
        for name, placement in realisations[node.name].placements.items()
    }
