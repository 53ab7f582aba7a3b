"""What layers cost per sample, counted on fake tensors: operations, and activations kept for the backward."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetpipe.tracing.fake import Root, State, run_fake
from lightning_hetpipe.tracing.spec import TensorSpec


def layer_costs(
    root: Root,
    state: State,
    graph: fx.Graph,
    groups: Sequence[Sequence[fx.Node]],
    inputs: Mapping[str, TensorSpec],
    device: torch.device,
) -> list[tuple[float, float]]:
    """FLOPs of the forward and saved bytes of each layer, per sample of the first input.

    A tensor that several layers save counts where it is saved first; parameters and buffers do not count.
    """
    layer_of = {node: index for index, nodes in enumerate(groups) for node in nodes}
    flops = [0.0] * len(groups)
    saved = [0.0] * len(groups)
    seen: dict[int, Any] = {}  # by memory; the storage is held so that its key stays unique
    counter = FlopCounterMode(display=False)
    current = 0

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter) and storage._cdata not in seen:
            seen[storage._cdata] = storage
            saved[current] += storage.nbytes()
        return tensor

    def count(node: fx.Node, env: dict[fx.Node, Any], run: Any) -> Any:
        nonlocal current
        if node.op == "get_attr":
            value = run()
            if isinstance(value, Tensor):
                seen[value.untyped_storage()._cdata] = value.untyped_storage()
            return value
        if node not in layer_of:
            return run()
        current = layer_of[node]
        if node.op == "call_module":
            for tensors in (root.get_submodule(str(node.target)).parameters, root.buffers):
                for tensor in tensors():
                    seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        before = counter.get_total_flops()
        result = run()
        flops[current] += counter.get_total_flops() - before
        return result

    with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run_fake(root, state, graph.nodes, inputs, device=device, trainable=state.trainable, around=count)
    n_samples = next(iter(inputs.values())).shape[0]
    return [(total / n_samples, kept / n_samples) for total, kept in zip(flops, saved)]
