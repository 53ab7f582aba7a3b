"""Shapes of every node of a traced stage, without running it on real data."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn


def infer_shapes(stage: fx.GraphModule, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Runs a copy of the stage on the meta device; parameters, buffers and RNG stay untouched.

    Args:
        stage: Its placeholders are the names in ``inputs``.
        inputs: Tensors on any device; only shape, dtype and ``requires_grad`` are used.

    Returns:
        Node name to its result, with meta tensors that say whether they require grad.
    """
    memo: dict[int, Any] = {}
    for tensor in (*stage.parameters(), *stage.buffers()):
        memo[id(tensor)] = _meta(tensor)
    twin = copy.deepcopy(stage, memo)
    results: dict[str, Any] = {}
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        # cloned: an operation in place may follow, which autograd forbids on a leaf
        _Recorder(twin, results).run(*(_meta(inputs[name]).clone() for name in placeholders(stage)))
    return results


def placeholders(stage: fx.GraphModule) -> list[str]:
    """Names of the values that enter the stage, in the order of its arguments."""
    return [node.target for node in stage.graph.nodes if node.op == "placeholder"]


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, results: dict[str, Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.results = results

    def run_node(self, n: fx.Node) -> Any:
        self.results[n.name] = super().run_node(n)
        return self.results[n.name]


def _meta(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
