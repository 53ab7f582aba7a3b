"""Dropout draws its own mask on every shard and the same mask where all compute the whole."""

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from lightning_hetpipe.stage.analyse import analyse
from lightning_hetpipe.stage.channel import ChannelStage
from tests.helpers.ranks import run_ranks
from tests.stage.parity import free_communication


class Dropping(nn.Module):
    """Ones, dropped on shards and on the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 8, 1, bias=False), nn.LayerNorm(4096)
        self.on_shards, self.on_whole = nn.Dropout(0.5), nn.Dropout(0.5)
        nn.init.ones_(self.conv.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.on_shards(self.conv(x)), self.on_whole(self.norm(x))


def _masks(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    stage = fx.symbolic_trace(Dropping())
    x, shares = torch.ones(1, 1, 4096), (0.5, 0.25, 0.25)
    layout = analyse(stage, {"x": x}, shares, free_communication(shares))
    assert layout.form("on_shards")[1] is not None
    assert layout.form("on_whole")[1] is None
    shared = ChannelStage(stage, layout, dist.group.WORLD, seed=3).shard_()
    values = {"x": x + torch.arange(4096) % 2}
    torch.manual_seed(rank)  # members need not agree on the global stream
    before = torch.get_rng_state()
    first = shared(values)
    untouched = torch.equal(torch.get_rng_state(), before)
    second = shared(values)
    shared.forwards = 0
    again = shared(values)
    same = torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    return first[0] != 0, first[1] != 0, second[0] != 0, second[1] != 0, untouched and same


def test_masks_differ_between_shards_agree_on_the_whole_and_repeat_when_asked():
    results = run_ranks(3, _masks)
    on_shards, on_whole, later_shards, later_whole, fine = results[0]
    assert fine
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][:4], other[:4]))
    channels = on_shards[0]
    for i in range(8):
        assert 0.4 < channels[i].float().mean() < 0.6
        for j in range(i):
            assert 0.4 < (channels[i] == channels[j]).float().mean() < 0.6
    assert 0.4 < (on_shards == later_shards).float().mean() < 0.6
    assert 0.4 < (on_whole == later_whole).float().mean() < 0.6
