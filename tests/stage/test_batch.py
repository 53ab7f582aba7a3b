"""A stage that a group shares by samples trains as on one device."""

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_hetpipe.stage.batch import (
    join_samples,
    reduce_gradients,
    sample_bounds,
    sample_weight,
    take_samples,
)
from tests.helpers.ranks import run_ranks


@given(st.integers(0, 40), st.lists(st.floats(0.05, 1), min_size=1, max_size=5))
def test_samples_are_taken_once_and_in_order(n_samples, shares):
    values = {"x": torch.arange(n_samples), "scale": torch.tensor(2.0)}
    bounds = sample_bounds(n_samples, shares)
    parts = [take_samples(values, bounds, member) for member in range(len(shares))]
    assert all(part["scale"] == 2.0 for part in parts)
    joined = join_samples([{"x": part["x"]} for part in parts])
    assert torch.equal(joined["x"], values["x"])
    weights = [sample_weight(bounds, member) for member in range(len(shares))]
    assert sum(weights) == pytest.approx(1.0 if n_samples else 0.0)


def _net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(20, 4)
    )
    net[0].bias.requires_grad_(False)
    return net.double()


def _train(rank: int, n_samples: int, shares: tuple[int, ...], own_loss: bool, bucket_bytes: int) -> float:
    group = dist.group.WORLD
    single, ours = _net(), _net()
    generator = torch.Generator().manual_seed(1)
    bounds = sample_bounds(n_samples, shares)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (single, ours)]
    for _ in range(3):
        values = {
            "x": torch.randn(n_samples, 3, 6, 6, dtype=torch.float64, generator=generator),
            "y": torch.randn(n_samples, 4, dtype=torch.float64, generator=generator),
        }
        whole = single(values["x"])
        ((whole - values["y"]) ** 2).mean().backward()
        mine = take_samples(values, bounds, rank)
        weight = 1.0
        if len(mine["x"]):
            out = ours(mine["x"])
            if own_loss:
                ((out - mine["y"]) ** 2).mean().backward()
                weight = sample_weight(bounds, rank)
            else:  # what a next stage would send for these rows
                out.backward(2 * (out.detach() - mine["y"]) / values["y"].numel())
        reduce_gradients(ours.parameters(), group, weight, bucket_bytes)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert ours[0].bias.grad is None
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours.parameters(), single.parameters()))


CASES = [(2, 8, (1, 1)), (2, 9, (7, 1)), (2, 1, (7, 1)), (3, 8, (5, 2, 1)), (3, 2, (7, 1, 1))]


@pytest.mark.parametrize(("n", "n_samples", "shares"), CASES)
def test_uneven_samples_train_as_on_one_device(n: int, n_samples: int, shares: tuple[int, ...]):
    for own_loss, bucket_bytes in ((False, 1 << 20), (True, 200)):
        assert max(run_ranks(n, _train, n_samples, shares, own_loss, bucket_bytes)) < 1e-12


def _mixed_types(rank: int) -> list[torch.Tensor]:
    net = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2)])
    if rank == 0:
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
    reduce_gradients(copy.copy(list(net.parameters())), dist.group.WORLD, weight=0.5)
    return [parameter.grad for parameter in net.parameters()]


def test_a_member_without_gradients_ends_up_with_the_sum_in_every_type():
    for gradients in run_ranks(2, _mixed_types):
        assert [g.dtype for g in gradients].count(torch.float64) == 2
        assert all(torch.equal(g, torch.full_like(g, 0.5)) for g in gradients)
