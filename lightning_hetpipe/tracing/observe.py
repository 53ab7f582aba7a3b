"""One exact run on fake tensors in training mode, watched: values, changes in place, costs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetpipe.tracing.fake import Root, State, run_fake
from lightning_hetpipe.tracing.spec import TensorSpec


@dataclass
class Observation:
    """What each node did.

    Attributes:
        values: Its result.
        mutated: The arguments whose memory it wrote to; nodes that wrote to none are left out.
        flops: Floating-point operations of its forward.
        saved_bytes: What autograd keeps for its backward. A tensor that several nodes save counts at the
            first; parameters and buffers do not count.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    mutated: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    flops: dict[fx.Node, float] = field(default_factory=dict)
    saved_bytes: dict[fx.Node, float] = field(default_factory=dict)


def observe(
    root: Root, state: State, graph: fx.Graph, inputs: Mapping[str, TensorSpec], device: torch.device
) -> Observation:
    """Runs the whole graph once."""
    seen = Observation()
    counter = FlopCounterMode(display=False)
    kept: dict[int, Any] = {}  # by memory; the storage is held so that its key stays unique
    saving = 0.0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal saving
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            kept[storage._cdata] = storage
            saving += storage.nbytes()
        return tensor

    def watch(node: fx.Node, env: dict[fx.Node, Any], run: Callable[[], Any]) -> Any:
        nonlocal saving
        if not kept:
            for owned in (*root.parameters(), *root.buffers()):
                kept[owned.untyped_storage()._cdata] = owned.untyped_storage()
        tensors = [(argument, env[argument]) for argument in node.all_input_nodes]
        versions = [value._version if isinstance(value, Tensor) else 0 for _, value in tensors]
        flops, saving = counter.get_total_flops(), 0.0
        result = run()
        seen.flops[node] = counter.get_total_flops() - flops
        seen.saved_bytes[node] = saving
        written = tuple(
            argument
            for (argument, value), version in zip(tensors, versions)
            if isinstance(value, Tensor) and value._version != version
        )
        if written:
            seen.mutated[node] = written
        return result

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with in_mode(root, training=True), counter, hooks:
        seen.values = run_fake(
            root, state, graph.nodes, inputs, device=device, trainable=state.trainable, around=watch
        )
    return seen


@contextmanager
def in_mode(root: nn.Module, training: bool) -> Iterator[None]:
    """All modules in one mode, for as long as nothing real runs."""
    before = {module: module.training for module in root.modules()}
    try:
        for module in before:
            module.__dict__["training"] = training
        yield
    finally:
        for module, flag in before.items():
            module.__dict__["training"] = flag
