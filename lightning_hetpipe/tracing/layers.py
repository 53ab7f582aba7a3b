"""Groups operations into layers, and names what passes between them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from lightning_hetpipe.graph import READER, Layer, Value
from lightning_hetpipe.tracing.analysis import Chain, is_carried
from lightning_hetpipe.tracing.fake import Root
from lightning_hetpipe.tracing.remedies import relative


@dataclass(frozen=True)
class Use:
    """What a layer refers to: first names of parameters and of buffers."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


class Names:
    """First names of a root's parameters and buffers, taken while each is a tensor of its own."""

    def __init__(self, root: Root) -> None:
        first: dict[int, str] = {}
        self.parameters: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            self.parameters[name] = first.setdefault(id(parameter), name)
        for name, buffer in root.named_buffers(remove_duplicate=False):
            self.buffers[name] = first.setdefault(id(buffer), name)

    def used_by(self, root: Root, nodes: Iterable[fx.Node]) -> Use:
        """What some nodes refer to, attributes among their arguments included."""
        parameters: dict[str, None] = {}
        buffers: dict[str, None] = {}
        for node in nodes:
            for target in _targets(root, node):
                if target in self.parameters:
                    parameters[relative(self.parameters[target])] = None
                elif target in self.buffers:
                    buffers[relative(self.buffers[target])] = None
        return Use(tuple(parameters), tuple(buffers))


def cuts(chain: Chain) -> list[int]:
    """Positions that begin a layer: all that crosses there can be carried."""
    n_nodes = len(chain.nodes)
    illegal = [False] * (n_nodes + 1)
    spans = list(chain.ties)
    for node in chain.nodes:
        here = chain.position[node]
        if not is_carried(node.meta["value"]):
            spans.append((here, max(chain.uses[node], here + 1)))
        elif isinstance(node.meta["value"], (int, tuple)):
            spans.append((here, here + 1))  # a size alone is no layer
    for start, stop in spans:
        for position in range(start + 1, min(stop, n_nodes) + 1):
            illegal[position] = True
    return [position for position in range(n_nodes) if not illegal[position]]


def group(chain: Chain) -> list[list[fx.Node]]:
    """The nodes of each layer."""
    starts = cuts(chain)
    return [chain.nodes[start:stop] for start, stop in zip(starts, [*starts[1:], len(chain.nodes)])]


def make_layers(root: Root, names: Names, groups: list[list[fx.Node]]) -> tuple[list[Layer], list[Use]]:
    """Describes each group, without figures that depend on inputs."""
    uses = [names.used_by(root, nodes) for nodes in groups]
    sizes = {relative(name): tensor.nbytes for name, tensor in root.named_parameters()}
    layers: list[Layer] = []
    for nodes, use in zip(groups, uses):
        main = _main(root, nodes)
        layers.append(
            Layer(
                name=main.meta["name"],
                operation=_operation(root, main),
                parameters=use.parameters,
                parameter_bytes=sum(sizes[name] for name in use.parameters),
            )
        )
    return layers, uses


def make_values(
    graph: fx.Graph, groups: list[list[fx.Node]], outputs: Collection[fx.Node]
) -> dict[fx.Node, Value]:
    """What passes between layers, by the node that makes it; sizes in bytes are still unknown."""
    layer_of = {node: index for index, nodes in enumerate(groups) for node in nodes}
    values: dict[fx.Node, Value] = {}
    for node in graph.nodes:
        if node.op != "placeholder" and node not in layer_of:
            continue
        producer = layer_of.get(node, READER)
        consumers = tuple(sorted({layer_of[user] for user in node.users if user in layer_of} - {producer}))
        if consumers or node in outputs or producer == READER:
            values[node] = Value(node.meta["name"], producer, consumers, 0.0, output=node in outputs)
    return values


def keepers(
    values: Mapping[fx.Node, Value], groups: list[list[fx.Node]], chain: Chain
) -> tuple[dict[fx.Node, Value], list[float]]:
    """Who keeps what for its backward, in the run that was watched.

    Returns:
        The values with the layers that keep them, and the bytes that each layer keeps besides.
    """
    layer_of = {node: index for index, nodes in enumerate(groups) for node in nodes}
    named: dict[int, list[fx.Node]] = {}
    for node in values:
        if node in chain.storage:
            named.setdefault(chain.storage[node], []).append(node)
    found: dict[fx.Node, set[int]] = {node: set() for node in values}
    saved = [0.0] * len(groups)
    for memory, kept in chain.seen.kept.items():
        layers = sorted({layer_of[node] for node in kept.nodes if node in layer_of})
        covered = 0
        for layer in layers:
            made = [node for node in named.get(memory, ()) if values[node].producer <= layer]
            if made:  # of several names for one memory, the youngest
                name = max(made, key=lambda node: values[node].producer)
                covered += 0 if found[name] else chain.seen.values[name].nbytes
                found[name].add(layer)
        if layers:
            saved[layers[0]] += max(0, kept.size_bytes - covered)
    return {node: replace(value, kept_by=tuple(sorted(found[node]))) for node, value in values.items()}, saved


def tied_layers(uses: list[Use]) -> tuple[tuple[int, ...], ...]:
    """Groups of layers that use one and the same parameter, each group once."""
    users: dict[str, list[int]] = {}
    for index, use in enumerate(uses):
        for name in use.parameters:
            users.setdefault(name, []).append(index)
    return tuple(sorted({tuple(found) for found in users.values() if len(found) > 1}))


def _targets(root: Root, node: fx.Node) -> list[str]:
    targets = [str(argument.target) for argument in node.all_input_nodes if argument.op == "get_attr"]
    if node.op == "call_module":
        prefix = str(node.target)
        module = root.get_submodule(prefix)
        for tensors in (module.named_parameters, module.named_buffers):
            named: Any = tensors(prefix, remove_duplicate=False)
            targets.extend(name for name, _ in named)
    return targets


def _main(root: Root, nodes: list[fx.Node]) -> fx.Node:
    """The node that a reader would name the layer after: the one with most parameters, else a module."""

    def weight(node: fx.Node) -> tuple[int, bool, bool]:
        makes_tensor = isinstance(node.meta["value"], Tensor)
        if node.op != "call_module":
            return 0, False, makes_tensor
        module = root.get_submodule(str(node.target))
        return sum(tensor.numel() for tensor in module.parameters()), True, makes_tensor

    return max(nodes, key=weight)


def _operation(root: Root, node: fx.Node) -> str:
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))).__name__
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", type(node.target).__name__))


def fingerprint_text(root: Root, groups: list[list[fx.Node]], specs: Mapping[str, str]) -> str:
    """A text that is equal for equal models: structure, constants, shapes and dtypes."""
    lines = [f"{name}: {spec}" for name, spec in specs.items()]
    for nodes in groups:
        lines.append("layer")
        for node in nodes:
            target = node.target if isinstance(node.target, str) else qualified(node.target)
            if node.op == "call_module":
                target = f"{target} {root.get_submodule(target)}"
            arguments = [argument.meta["name"] for argument in node.all_input_nodes]
            constants = [repr(leaf) for leaf in _constants((node.args, node.kwargs))]
            lines.append(f"{node.meta['name']} = {target}({arguments}, {constants})")
    return "\n".join(lines)


def qualified(target: Any) -> str:
    """Module and name of a function."""
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target).__name__)}"


def _constants(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _constants(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _constants(item)
    elif isinstance(value, slice):
        yield from _constants((value.start, value.stop, value.step))
    elif not isinstance(value, fx.Node):
        yield value
