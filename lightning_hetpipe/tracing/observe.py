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
        kept: What autograd keeps for backwards, by memory; parameters and buffers do not count.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    mutated: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    flops: dict[fx.Node, float] = field(default_factory=dict)
    kept: dict[int, "Kept"] = field(default_factory=dict)


@dataclass
class Kept:
    """Memory that autograd keeps, and the nodes that it is kept for."""

    storage: Any  # held, so that its key stays unique
    nodes: list[fx.Node]

    @property
    def size_bytes(self) -> int:
        return int(self.storage.nbytes())


def observe(
    root: Root, state: State, graph: fx.Graph, inputs: Mapping[str, TensorSpec], device: torch.device
) -> Observation:
    """Runs the whole graph once."""
    seen = Observation()
    counter = FlopCounterMode(display=False)
    owned: dict[int, Any] = {}
    running: list[fx.Node] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            nodes = seen.kept.setdefault(storage._cdata, Kept(storage, [])).nodes
            nodes += [node for node in running if node not in nodes]
        return tensor

    def watch(node: fx.Node, env: dict[fx.Node, Any], run: Callable[[], Any]) -> Any:
        if not owned:
            for tensor in (*root.parameters(), *root.buffers()):
                owned[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        tensors = [(argument, env[argument]) for argument in node.all_input_nodes]
        versions = [value._version if isinstance(value, Tensor) else 0 for _, value in tensors]
        flops = counter.get_total_flops()
        running[:] = [node]
        result = run()
        seen.flops[node] = counter.get_total_flops() - flops
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
