import logging
import math

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_hetpipe.stage.consolidate import Placement
from lightning_hetpipe.stage.layout import Sharding
from lightning_hetpipe.strategy.clipping import (
    clip_grad_norm,
    install_clipping,
    total_norm,
    warn_of_own_clipping,
)
from lightning_hetpipe.strategy.partition import OwnerMap, borrowed_parameters, partition
from tests.helpers.ranks import run_ranks


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 4))
    model[2].weight = model[0].weight
    return model.double()


def give_gradients(model: nn.Module) -> None:
    """A gradient that depends on the parameter's name only, so that it is the same under any partition."""
    for index, parameter in enumerate(model.parameters()):
        if not parameter.is_meta:
            parameter.grad = torch.linspace(-1, index + 1, parameter.numel()).double().view(parameter.shape)


def on_rank(rank: int, n: int = 3) -> tuple[nn.Module, set[nn.Parameter], dist.ProcessGroup]:
    model = build()
    holders = [([f"{i}.{name}" for name in child.state_dict()], (i % n,)) for i, child in enumerate(model)]
    owners = OwnerMap.of_stages(model, "", holders)
    partition(model, owners, rank, dist.group.WORLD)
    give_gradients(model)
    return model, borrowed_parameters(model, owners, rank), dist.group.WORLD


def _clip(rank: int, norm_type: float, max_norm: float) -> float:
    model, borrowed, group = on_rank(rank)
    whole = build()
    give_gradients(whole)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm, norm_type)
    norm = clip_grad_norm(model.parameters(), max_norm, group, borrowed, norm_type)
    torch.testing.assert_close(norm, expected)
    for mine, reference in zip(model.parameters(), whole.parameters(), strict=True):
        if not mine.is_meta:
            torch.testing.assert_close(mine.grad, reference.grad)
    return float(norm)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_the_norm_of_all_ranks_is_the_norm_of_one_device_and_tied_weights_count_once(norm_type, max_norm):
    assert len(set(run_ranks(3, _clip, norm_type, max_norm))) == 1


def _rank_without_gradients(rank: int) -> float:
    return float(total_norm([torch.tensor([3.0, 4.0])] if rank else [], dist.group.WORLD))


def test_a_rank_without_gradients_takes_part():
    assert run_ranks(2, _rank_without_gradients) == [5.0, 5.0]


def _cut_norm(rank: int) -> tuple[float, float]:
    """Three ranks share the first layer's weight by rows, have its bias whole, and rank 2 the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()
    give_gradients(model)
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    cut = Placement(Sharding(0, (0, 2, 3, 4)))
    owners = OwnerMap(
        {"0.weight": (1, 2, 0), "0.bias": (1, 2, 0), "1.weight": (2,), "1.bias": (2,)}, {"0.weight": cut}
    )
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    partition(model, owners, rank, dist.group.WORLD)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            whole = gradients[name]
            parameter.grad = cut.cut(whole, owners.of(name).index(rank)) if name in owners.shards else whole
    borrowed = borrowed_parameters(model, owners, rank)
    return float(clip_grad_norm(model.parameters(), 1.0, dist.group.WORLD, borrowed)), expected


def test_the_norm_takes_each_part_of_a_cut_weight_and_a_weight_that_all_hold_once():
    for norm, expected in run_ranks(3, _cut_norm):
        assert norm == pytest.approx(expected, rel=1e-12)


def _plugin(rank: int) -> list[float]:
    model, borrowed, group = on_rank(rank)
    optimizer, plugin = torch.optim.SGD(model.parameters(), 0.1), Precision()
    remove = install_clipping(plugin, group, borrowed)
    plugin.clip_gradients(optimizer, 0.25)
    norm = float(
        total_norm([p.grad for p in model.parameters() if p.grad is not None and p not in borrowed], group)
    )
    remove()
    assert not vars(plugin)
    return [round(norm, 5)]


def test_the_trainers_gradient_clip_val_limits_the_norm_over_all_ranks():
    assert run_ranks(3, _plugin) == [[0.25]] * 3


def test_an_overridden_clipping_hook_is_warned_about(caplog):
    class Own(pl.LightningModule):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            pass

    with caplog.at_level(logging.WARNING):
        warn_of_own_clipping(pl.LightningModule())
        assert not caplog.records
        warn_of_own_clipping(Own())
    assert "Own overrides configure_gradient_clipping" in caplog.text
