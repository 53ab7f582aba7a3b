"""The code of a stage as a graph, and the shapes of its nodes, without running it on real data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module


@dataclass(frozen=True)
class Code:
    """What a stage runs.

    Attributes:
        root: What the graph's targets are relative to.
        graph: Its operations; inputs are placeholders, or are popped from one placeholder by name.
        entering: Node name to the name of the value that enters there.
        prefix: Of the targets, before names that are relative to the pipelined module.
    """

    root: nn.Module
    graph: fx.Graph
    entering: Mapping[str, str]
    prefix: str = ""

    def name(self, target: str) -> str:
        """A parameter's name relative to the pipelined module."""
        return target.removeprefix(self.prefix)

    @property
    def module(self) -> nn.Module:
        """The pipelined module."""
        return self.root.get_submodule(self.prefix.rstrip("."))


def code_of(stage: nn.Module) -> Code:
    """Reads a `StageModule`, or any `torch.fx.GraphModule`."""
    graph = stage.graph
    assert isinstance(graph, fx.Graph)
    if isinstance(stage, fx.GraphModule):
        entering = {node.name: str(node.target) for node in graph.nodes if node.op == "placeholder"}
        return Code(stage, graph, entering)
    popped = {
        node.name: str(node.args[1])
        for node in graph.nodes
        if node.op == "call_method" and node.target == "pop" and node.args[0].op == "placeholder"
    }
    root = stage.root
    assert isinstance(root, nn.Module)
    return Code(root, graph, popped, "module.")


def infer_shapes(code: Code, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Runs the stage on tensors without content; parameters, buffers and RNG stay untouched.

    Args:
        code: Of the stage.
        inputs: A tensor per value that enters; only shape, dtype and ``requires_grad`` are used.

    Returns:
        Node name to its result, with fake tensors that say whether they require grad.
    """
    root = code.root
    results: dict[str, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        device = _device(root)
        names = (*root.named_parameters(), *root.named_buffers())
        fakes = {name: _fake(tensor, device) for name, tensor in names}
        # cloned: an operation in place may follow, which autograd forbids on a leaf
        values = {name: _fake(tensor, device).clone() for name, tensor in inputs.items()}
        arguments = [values] if code.prefix else [values[name] for name in code.entering.values()]
        with _reparametrize_module(root, fakes, tie_weights=True):
            _Recorder(code, results).run(*arguments)
    return results


def samples_axis(small: Sequence[int], large: Sequence[int], n: int) -> int | None:
    """The one dimension that counts the samples, from a value's shapes for ``n`` and for ``2n`` of them."""
    other = [axis for axis, pair in enumerate(zip(small, large)) if pair[0] != pair[1]]
    if len(other) == 1 and (small[other[0]], large[other[0]]) == (n, 2 * n):
        return other[0]
    return None


class _Recorder(fx.Interpreter):
    def __init__(self, code: Code, results: dict[str, Any]) -> None:
        super().__init__(code.root, garbage_collect_values=False, graph=code.graph)
        self.results = results

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.results[n.name] = dict(result) if isinstance(result, dict) else result
        return result


def _device(root: nn.Module) -> torch.device:
    """Where the stage will run: where any of its parameters is that is somewhere."""
    devices = [parameter.device for parameter in root.parameters() if not parameter.is_meta]
    return devices[0] if devices else torch.device("cpu")


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    made.requires_grad_(tensor.requires_grad)
    return nn.Parameter(made.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
