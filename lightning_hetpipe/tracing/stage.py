"""A run of layers as a module: code generated over the original submodules."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from lightning_hetpipe.errors import GraphError
from lightning_hetpipe.tracing.analysis import Chain, is_size
from lightning_hetpipe.tracing.fake import Root


class StageModule(nn.Module):
    """Runs layers ``start`` to ``stop - 1`` of a traced module.

    The submodules are the original ones, by reference: their mode, hooks and parameters, wherever these
    were moved, are in force. They are not registered as children here, so this module owns nothing.

    Attributes:
        input_names: Values that enter the run, in the order of the graph.
        output_names: Values that leave it, in the order of the graph.
        graph: The generated code as a graph: inputs are popped from its one placeholder, a mapping.
        root: What the graph's targets are relative to; the pipelined module is ``root.module``.
    """

    def __init__(
        self,
        root: Root,
        graph: fx.Graph,
        input_names: tuple[str, ...],
        output_names: tuple[str, ...],
        returns: "Returns | None",
    ) -> None:
        super().__init__()
        self.__dict__["root"] = root  # not a child
        self.graph = graph
        self.input_names = input_names
        self.output_names = output_names
        self._returns = returns
        self._run = _compile(graph)

    def forward(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs the layers.

        Args:
            values: At least one tensor per input name. They are never changed in place. Each is let go of
                after its last use; it is freed then if the caller does not hold it either.

        Returns:
            One tensor per output name.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # restored if a layer fails under no_grad
            return self._run(self.__dict__["root"], {name: values[name] for name in self.input_names})

    def output(self, values: Mapping[str, Tensor]) -> Any:
        """Makes what the module returns of what this last stage's forward returned.

        Raises:
            GraphError: This is not the last stage.
        """
        if self._returns is None:
            raise GraphError(f"the stage that ends with {self.output_names} is not the last one")
        return self._returns(values, self.__dict__["root"].module.training)


class Returns:
    """The module's return value as a structure over values, for either mode."""

    def __init__(
        self, training: tuple[Any, pytree.TreeSpec], evaluation: tuple[Any, pytree.TreeSpec]
    ) -> None:
        self._modes = {True: training, False: evaluation}

    def __call__(self, values: Mapping[str, Tensor], training: bool) -> Any:
        leaves, structure = self._modes[bool(training)]
        return pytree.tree_unflatten([leaf.take(values) for leaf in leaves], structure)


class Leaf:
    """One leaf of the return value: a value by name, or a constant."""

    def __init__(self, name: str | None, constant: Any = None, size: bool = False) -> None:
        self.name = name
        self.constant = constant
        self.size = size

    def take(self, values: Mapping[str, Tensor]) -> Any:
        if self.name is None:
            return self.constant
        value = values[self.name]
        return unpack_size(value, isinstance(self.constant, int)) if self.size else value


def build_graph(
    chain: Chain,
    nodes: Sequence[fx.Node],
    entering: Iterable[fx.Node],
    leaving: Iterable[fx.Node],
    device: torch.device | None,
) -> fx.Graph:
    """The graph of a stage.

    Args:
        chain: The whole module.
        nodes: The stage's part.
        entering, leaving: Nodes whose values cross the stage's boundary.
        device: Where tensors are made whose device the forward took from its inputs; None to keep it.
    """
    written = {chain.storage[old] for node in nodes for old in chain.mutated.get(node, ())}
    graph = fx.Graph()
    values = graph.placeholder("values")
    copies: dict[fx.Node, fx.Node] = {}
    for node in entering:
        copy = graph.call_method("pop", (values, node.meta["name"]))
        if is_size(node.meta["value"]):
            copy = graph.call_function(unpack_size, (copy, isinstance(node.meta["value"], int)))
        elif chain.storage[node] in written:
            # Neither a leaf that requires grad nor another stage's tensor may be changed in place.
            copy = graph.call_method("clone", (copy,))
        copies[node] = copy
    graph_mode: fx.Node | None = None
    for node in nodes:
        if graph_mode is None and not node.meta["grad"]:
            graph_mode = graph.call_function(_disable_grad)
        elif graph_mode is not None and node.meta["grad"]:
            graph.call_function(torch.set_grad_enabled, (graph_mode,))
            graph_mode = None
        for argument in node.all_input_nodes:
            if argument.op == "get_attr" and argument not in copies:
                copies[argument] = graph.node_copy(argument)
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
        if device is not None:
            _move_constants(copies[node], device)
    if graph_mode is not None:
        graph.call_function(torch.set_grad_enabled, (graph_mode,))
    outputs: dict[str, fx.Node] = {}
    for node in leaving:
        outputs[node.meta["name"]] = (
            graph.call_function(pack_size, (copies[node],)) if is_size(node.meta["value"]) else copies[node]
        )
    graph.output(outputs)
    return graph


def pack_size(size: int | tuple[int, ...]) -> Tensor:
    """Sizes as the shape of a tensor without elements, so that they travel like any other value."""
    return torch.empty((*((size,) if isinstance(size, int) else size), 0), dtype=torch.uint8)


def unpack_size(tensor: Tensor, scalar: bool) -> int | torch.Size:
    """What `pack_size` was given."""
    return tensor.shape[0] if scalar else tensor.shape[:-1]


def _disable_grad() -> bool:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    return before


def _move_constants(node: fx.Node, device: torch.device) -> None:
    def move(leaf: Any) -> Any:
        return device if isinstance(leaf, torch.device) else leaf

    node.args = map_aggregate(node.args, move)
    node.kwargs = map_aggregate(node.kwargs, move)


def _compile(graph: fx.Graph) -> Callable[[Root, dict[str, Tensor]], dict[str, Tensor]]:
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<stage>", "exec"), scope)
    run: Callable[[Root, dict[str, Tensor]], dict[str, Tensor]] = scope["forward"]
    return run
