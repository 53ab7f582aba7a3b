"""Shards join to the full tensors, and full tensors cut to the shards."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.stage.analyse import analyse
from lightning_hetpipe.stage.channel import ChannelStage
from lightning_hetpipe.stage.consolidate import (
    Placement,
    cut_optimizer_state,
    cut_state,
    join_optimizer_state,
    join_state,
    norm_weight,
    unshard_,
)
from lightning_hetpipe.stage.layout import Sharding
from tests.helpers.ranks import run_ranks
from tests.stage.parity import free_communication

SHARES = (5 / 8, 2 / 8, 1 / 8)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 5, 3),
        nn.Flatten(),
        nn.Linear(20, 4),
    ).double()


def _layout(net: nn.Module):
    x = torch.zeros(2, 3, 6, 6, dtype=torch.float64)
    return analyse(fx.symbolic_trace(net), {"input": x}, SHARES, free_communication(SHARES))


@pytest.mark.parametrize(
    ("placement", "shape"),
    [
        (Placement(Sharding(0, (0, 5, 7, 8))), (8, 3)),
        (Placement(Sharding(1, (0, 5, 5, 8))), (2, 8, 3)),
        (Placement(Sharding(0, (0, 4, 6, 8)), blocks=3), (24, 2)),
    ],
)
def test_joining_what_was_cut_gives_the_tensor_back(placement: Placement, shape: tuple[int, ...]):
    full = torch.randn(shape)
    shards = [placement.cut(full, member) for member in range(3)]
    assert [shard.shape[placement.dim] for shard in shards] == [placement.length(i) for i in range(3)]
    assert torch.equal(placement.join(shards), full)
    for member, shard in enumerate(shards):
        rows = [i for start, stop in placement.intervals(member) for i in range(start, stop)]
        assert torch.equal(shard, full.index_select(placement.dim, torch.tensor(rows, dtype=torch.long)))


def test_tensors_of_another_layout_are_refused():
    placement = Placement(Sharding(0, (0, 5, 8)))
    with pytest.raises(PlanError, match="is not the full tensor of this layout"):
        placement.cut(torch.zeros(9, 2), 0)
    with pytest.raises(
        PlanError, match=r"shards of \[4, 4\] along dimension 0 are not the layout's \[5, 3\]"
    ):
        placement.join([torch.zeros(4), torch.zeros(4)])


def test_a_state_dict_cuts_and_joins():
    net = _net()
    placements = _layout(net).placements
    assert {"0.weight", "1.running_mean", "3.weight"} <= set(placements)
    full = net.state_dict()
    parts = [cut_state(full, placements, member) for member in range(3)]
    joined = join_state(parts, placements)
    assert list(joined) == list(full)
    assert all(torch.equal(joined[name], full[name]) for name in full)


def _train(rank: int):
    single = _net()
    stage = fx.symbolic_trace(_net())
    layout = _layout(stage)
    shapes = {name: parameter.shape for name, parameter in stage.named_parameters()}
    objects = {name: id(parameter) for name, parameter in stage.named_parameters()}
    # made before the cut: its groups refer to the same Parameter objects
    optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)
    shared = ChannelStage(stage, layout, dist.group.WORLD).shard_()
    assert {name: id(parameter) for name, parameter in stage.named_parameters()} == objects
    reference = torch.optim.Adam(single.parameters(), lr=0.01)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        shared({"input": x}).square().mean().backward()
        single(x).square().mean().backward()
        optimizer.step()
        reference.step()
    squared = sum(
        norm_weight(name, layout.placements, rank) * float(p.grad.square().sum())
        for name, p in stage.named_parameters()
    )
    state = {name: optimizer.state[parameter] for name, parameter in stage.named_parameters()}
    wanted = {name: reference.state[parameter] for name, parameter in single.named_parameters()}
    local = {name: parameter.shape for name, parameter in stage.named_parameters()}
    weights, sd = stage.state_dict(), single.state_dict()
    norm = sum(float(p.grad.square().sum()) for p in single.parameters())
    unshard_(stage, sd, layout.placements)
    assert {name: id(parameter) for name, parameter in stage.named_parameters()} == objects
    assert all(
        torch.equal(tensor, sd[name])
        for name, tensor in stage.state_dict().items()
        if name in layout.placements
    )
    return layout.placements, squared, state, wanted, local, shapes, weights, sd, norm


def test_what_members_trained_joins_to_what_one_device_trained():
    results = run_ranks(3, _train)
    placements, _, _, wanted, _, shapes, _, single, norm = results[0]
    joined = join_state([copy.deepcopy(r[6]) for r in results], placements)
    for name, tensor in single.items():
        torch.testing.assert_close(joined[name], tensor, rtol=0, atol=1e-12)
    state = join_optimizer_state([r[2] for r in results], [r[4] for r in results], placements)
    for name, entries in wanted.items():
        for key, value in entries.items():
            torch.testing.assert_close(state[name][key], value, rtol=0, atol=1e-12)
    assert sum(r[1] for r in results) == pytest.approx(norm, rel=1e-12)
    again = cut_optimizer_state(state, shapes, placements, 1)
    assert torch.equal(again["0.weight"]["exp_avg"], results[1][2]["0.weight"]["exp_avg"])
