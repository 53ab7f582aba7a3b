"""Under autocast a shared stage computes in the types that one device would."""

import copy

import torch
import torch.distributed as dist
from torch import fx, nn

from lightning_hetpipe.stage.analyse import analyse
from lightning_hetpipe.stage.channel import ChannelStage
from tests.helpers.ranks import run_ranks
from tests.stage.parity import free_communication, worst


def _run(rank: int) -> tuple[float, float, float]:
    torch.manual_seed(0)
    single = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    stage = fx.symbolic_trace(copy.deepcopy(single))
    x, shares = torch.randn(4, 3, 6, 6), (0.75, 0.25)
    with torch.autocast("cpu", torch.bfloat16):
        layout = analyse(stage, {"input": x}, shares, free_communication(shares))
        shared = ChannelStage(stage, layout, dist.group.WORLD).shard_()
        found, wanted = shared({"input": x}), single(x)
    assert found.dtype is wanted.dtype is torch.bfloat16
    found.float().square().mean().backward()
    wanted.float().square().mean().backward()
    error, scale = 0.0, 0.0
    for name, parameter in stage.named_parameters():
        grad = single.get_parameter(name).grad
        assert parameter.grad.dtype is torch.float32
        cut = layout.placements.get(name)
        error = max(error, worst(parameter.grad, cut.cut(grad, rank) if cut else grad))
        scale = max(scale, float(grad.abs().max()))
    return worst(found, wanted), error, scale


def test_types_are_those_of_one_device_and_values_agree_within_them():
    for output, gradient, scale in run_ranks(2, _run):
        assert output < 0.05
        assert gradient < 0.05 * scale
