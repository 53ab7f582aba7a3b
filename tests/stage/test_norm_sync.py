"""Shared BatchNorm over forked ranks against one BatchNorm on all the samples."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetpipe.errors import NormError
from lightning_hetpipe.stage.norm import convert_norm, set_process_group
from tests.helpers.ranks import run_ranks

SHAPES = {1: (), 2: (3, 2), 3: (2, 1, 2)}
KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def net(axes: int, **options: object) -> nn.Module:
    """Two BatchNorms with something between, so that statistics depend on statistics."""
    torch.manual_seed(1)
    bias = options.pop("bias", True)
    norms = [KINDS[axes](4, **options) for _ in range(2)]
    if not bias:  # an argument of BatchNorm in newer torch
        for norm in norms:
            norm.register_parameter("bias", None)
    return nn.Sequential(norms[0], nn.GELU(), norms[1]).double()


def data(n: int, axes: int, step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    shape = (n, 4, *SHAPES[axes])
    return 50 + torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def train(module: nn.Module, inputs: Tensor, weights: Tensor, recompute: bool) -> tuple[Tensor, Tensor]:
    inputs = inputs.clone().requires_grad_()
    output = checkpoint(module, inputs, use_reentrant=False) if recompute else module(inputs)
    (output.sin() * weights).sum().backward()
    return output.detach(), inputs.grad


def _train_share(rank: int, shares: list[list[int]], axes: int, options: dict, recompute: bool) -> tuple:
    module = convert_norm(net(axes, **options), "sync")
    set_process_group(module, dist.group.WORLD)
    results = []
    for step, share in enumerate(shares):
        inputs, weights = (each.split(share)[rank] for each in data(sum(share), axes, step))
        results.append(train(module, inputs, weights, recompute))
    return results, [p.grad for p in module.parameters()], module.state_dict()


@pytest.mark.parametrize(
    ("axes", "options", "shares", "recompute"),
    [
        (2, {}, [[3, 2, 1], [4, 0, 1], [1, 1, 0]], False),
        (1, {}, [[3, 2], [4, 0], [1, 1]], False),
        (3, {"momentum": None}, [[1, 2], [0, 3]], False),
        (2, {"affine": False, "momentum": 0.3}, [[1, 2]], False),
        (2, {"bias": False}, [[1, 2]], False),
        (2, {"track_running_stats": False}, [[1, 2], [2, 0]], False),
        (2, {}, [[3, 2], [0, 4]], True),
    ],
)
def test_outputs_gradients_and_buffers_are_those_of_one_device_on_all_samples(
    axes: int, options: dict, shares: list[list[int]], recompute: bool
) -> None:
    members = run_ranks(len(shares[0]), _train_share, shares, axes, options, recompute)
    whole = net(axes, **options)
    close = {"rtol": 1e-9, "atol": 1e-9}
    for step, share in enumerate(shares):
        output, grad = train(whole, *data(sum(share), axes, step), recompute=False)
        torch.testing.assert_close(torch.cat([m[0][step][0] for m in members]), output, **close)
        torch.testing.assert_close(torch.cat([m[0][step][1] for m in members]), grad, **close)
    for index, parameter in enumerate(whole.parameters()):
        torch.testing.assert_close(sum(m[1][index] for m in members), parameter.grad, **close)
    for _, _, state in members:
        assert state.keys() == whole.state_dict().keys()
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[name], value, **close)


def test_without_a_group_it_is_torchs_batchnorm() -> None:
    plain = net(2)
    alone = convert_norm(copy.deepcopy(plain), "sync")
    inputs, weights = data(5, 2, 0)
    for ours, torchs in zip(
        train(alone, inputs, weights, False), train(plain, inputs, weights, False), strict=True
    ):
        torch.testing.assert_close(ours, torchs, rtol=0, atol=0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(alone.state_dict()[name], value)


def _half(rank: int) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    layer = convert_norm(nn.BatchNorm2d(4), "sync")
    layer.set_process_group(dist.group.WORLD)
    inputs = torch.randn(2, 4, 3, 3).bfloat16().requires_grad_()
    output = layer(inputs)
    output.sum().backward()
    return output.dtype, inputs.grad.dtype, layer.weight.grad.dtype


def test_half_precision_inputs_keep_their_type_and_the_parameters_theirs() -> None:
    assert run_ranks(2, _half) == [(torch.bfloat16, torch.bfloat16, torch.float32)] * 2


def _shapes_only(rank: int) -> tuple[int, ...]:
    layer = convert_norm(nn.BatchNorm2d(4, device="meta"), "sync")
    layer.set_process_group(dist.group.WORLD)
    if rank:  # a collective would wait for the other rank
        return (0,)
    return tuple(layer(torch.empty(2, 4, 3, 3, device="meta")).shape)


def test_meta_tensors_start_no_collective() -> None:
    assert run_ranks(2, _shapes_only, timeout_s=20) == [(2, 4, 3, 3), (0,)]


def _copies(rank: int) -> list[bool]:
    layer = convert_norm(nn.BatchNorm2d(4), "sync")
    layer.set_process_group(dist.group.WORLD)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    return [other.process_group is None for other in copies] + [layer.process_group is dist.group.WORLD]


def test_copies_and_pickles_share_with_nobody() -> None:
    assert run_ranks(2, _copies) == [[True, True, True]] * 2


def _one_value(rank: int) -> str:
    layer = convert_norm(nn.BatchNorm1d(4), "sync")
    layer.set_process_group(dist.group.WORLD)
    try:
        layer(torch.randn(1 - rank, 4))
    except NormError as error:
        return str(error)
    return "accepted"


def test_one_value_per_channel_in_the_whole_group_is_refused_by_every_member() -> None:
    for message in run_ranks(2, _one_value):
        assert message.startswith("SharedBatchNorm1d(4) saw a whole batch with one value per channel")
