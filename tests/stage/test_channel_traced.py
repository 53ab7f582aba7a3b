"""Stages of a traced module run shared by channels as they run on one device."""

import copy

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from lightning_hetpipe.stage.analyse import analyse
from lightning_hetpipe.stage.channel import ChannelStage
from lightning_hetpipe.stage.norm import convert_norm
from lightning_hetpipe.tracing import trace
from tests.helpers.ranks import run_ranks
from tests.stage.parity import free_communication, plain, worst


def _resnet() -> nn.Module:
    return ResNet(BasicBlock, [1, 1, 1, 1], 5)


def _mobilenet() -> nn.Module:
    return torchvision.models.mobilenet_v3_small(width_mult=0.5, num_classes=5)


def _deferred() -> nn.Module:
    return convert_norm(_resnet(), "deferred")


MODELS = {
    "resnet": (_resnet, 0.4, 0.8),
    "mobilenet": (_mobilenet, 0.3, 0.6),
    "deferred": (_deferred, 0.2, 1.0),
}


def _run(rank: int, name: str, shares: tuple[float, ...]) -> tuple[float, str]:
    make, begin, end = MODELS[name]
    torch.manual_seed(0)
    module = plain(make())
    single = copy.deepcopy(module)
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    traced, other = trace(module, (x,), {}), trace(single, (x,), {})
    n = len(traced.graph)
    start, stop = int(n * begin), int(n * end)
    with torch.no_grad():
        entering = trace(copy.deepcopy(module), (x,), {}).stage(0, start)({"x": x})
    values = {name: value.requires_grad_() for name, value in entering.items()}
    stage, reference = traced.stage(start, stop), other.stage(start, stop)
    layout = analyse(stage, values, shares, free_communication(shares))
    shared = ChannelStage(stage, layout, dist.group.WORLD).shard_()
    found, wanted = shared(values), reference(values)
    assert list(found) == list(wanted) == list(shared.output_names)
    error = max(worst(found[name], wanted[name]) for name in wanted)
    sent = [torch.randn_like(tensor) / tensor.numel() for tensor in wanted.values()]
    ours = torch.autograd.grad(list(found.values()), list(values.values()), sent, retain_graph=True)
    theirs = torch.autograd.grad(list(wanted.values()), list(values.values()), sent, retain_graph=True)
    error = max(error, *(worst(a, b) for a, b in zip(ours, theirs)))
    torch.autograd.backward(list(found.values()), sent)
    torch.autograd.backward(list(wanted.values()), sent)
    parts = dict(module.named_parameters()) | dict(module.named_buffers())

    def mine(name: str, tensor: Tensor) -> Tensor:
        return layout.placements[name].cut(tensor, rank) if name in layout.placements else tensor

    for name, parameter in single.named_parameters():
        assert (parts[name].grad is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            error = max(error, worst(parts[name].grad, mine(name, parameter.grad)))
    for name, buffer in single.named_buffers():
        error = max(error, worst(parts[name], mine(name, buffer)))
    if stop == n:
        error = max(error, worst(shared.output(found), reference.output(wanted)))
    assert set(layout.whole) | set(layout.placements) >= set(traced.parameters_of(start, stop))
    return error, layout.describe()


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_in_the_middle_is_exact(name: str):
    shares = (0.7, 0.3)
    for error, listing in run_ranks(2, _run, name, shares, timeout_s=100):
        assert error < 1e-11, listing
        assert " local " in listing
