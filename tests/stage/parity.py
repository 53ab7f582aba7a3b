"""Compares a stage that a group shares by channels with the same stage on one device."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from lightning_hetpipe.stage.analyse import StageLayout, analyse
from lightning_hetpipe.stage.channel import ChannelStage
from lightning_hetpipe.stage.layout import Cost, GroupCost


def free_communication(shares: tuple[float, ...]) -> Cost:
    """Shares all that can be shared."""
    return GroupCost(shares, latency_s=1e-9, bandwidth_bytes_per_s=1e15)


def plain(module: nn.Module) -> nn.Module:
    """The module in float64 without randomness."""
    for child in module.modules():
        if (
            isinstance(child, (nn.Dropout, nn.MultiheadAttention))
            or type(child).__name__ == "StochasticDepth"
        ):
            setattr(child, "dropout" if isinstance(child, nn.MultiheadAttention) else "p", 0.0)
    return module.double()


def worst(found: Tensor, wanted: Tensor) -> float:
    """The largest difference."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float((found.detach().double() - wanted.detach().double()).abs().max()) if wanted.numel() else 0.0


def parity(
    rank: int,
    make: Callable[[], nn.Module],
    inputs: tuple[Tensor, ...],
    shares: tuple[float, ...],
    cost: Cost,
    steps: int = 3,
) -> tuple[dict[str, float], StageLayout]:
    """Trains both for a few steps of SGD, and returns the largest differences on this rank."""
    torch.manual_seed(0)
    single = plain(make())
    stage = fx.symbolic_trace(copy.deepcopy(single))
    names = [node.target for node in stage.graph.nodes if node.op == "placeholder"]
    values = dict(zip(names, inputs))
    layout = analyse(stage, values, shares, cost)
    shared = ChannelStage(stage, layout, dist.group.WORLD).shard_()
    cut = layout.placements
    ours = dict(stage.named_parameters()) | dict(stage.named_buffers())
    theirs = dict(single.named_parameters()) | dict(single.named_buffers())
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-3)
        for module in (single, stage)
    ]
    errors = dict.fromkeys(("output", "input gradient", "gradient", "state"), 0.0)

    def note(kind: str, found: Any, wanted: Any, name: str = "") -> None:
        wanted = cut[name].cut(wanted.detach(), rank) if name in cut else wanted
        errors[kind] = max(errors[kind], worst(found, wanted))

    for step in range(steps):
        mine, whole = ({name: x.clone() for name, x in values.items()} for _ in range(2))
        for x in (*mine.values(), *whole.values()):
            if x.is_floating_point():
                x.requires_grad_()
        wanted = single(*(x * 1 if x.is_floating_point() else x for x in whole.values()))
        found = shared({name: x * 1 if x.is_floating_point() else x for name, x in mine.items()})
        note("output", found, wanted)
        seed = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(step))
        wanted.backward(seed / wanted.numel())
        found.backward(seed / wanted.numel())
        for name, x in whole.items():
            if x.grad is not None:
                note("input gradient", mine[name].grad, x.grad)
        for name, parameter in single.named_parameters():
            assert (ours[name].grad is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                note("gradient", ours[name].grad, parameter.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, tensor in theirs.items():
            note("state", ours[name], tensor, name)
    single.eval()
    stage.eval()
    with torch.no_grad():
        note("output", shared(values), single(*inputs))
    return errors, layout
