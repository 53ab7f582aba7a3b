"""Shares of layers are measured without touching the module, and planned as they are executed."""

import copy
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from lightning_hetpipe import Cluster, Device, Link, Profile, profile
from lightning_hetpipe.engine import membership
from lightning_hetpipe.engine.membership import Membership
from lightning_hetpipe.engine.shares import FRACTIONS, sharing_of, with_shares
from lightning_hetpipe.planner.channel import layout_of
from lightning_hetpipe.plans import Pace, Stage
from lightning_hetpipe.profiles import DeviceProfile
from lightning_hetpipe.profiling.measure import measure_device
from lightning_hetpipe.stage import collective
from lightning_hetpipe.stage.analyse import analyse
from lightning_hetpipe.stage.layout import SMALL_BYTES, GroupCost, collectives_of
from lightning_hetpipe.tracing import TensorSpec, trace
from lightning_hetpipe.tracing.traced import resized


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv1(x)))
        return self.fc(torch.relu(self.conv2(x)).mean((2, 3)))


def test_measuring_shares_leaves_weights_buffers_gradients_and_randomness_alone() -> None:
    net, x = Net(), torch.randn(8, 3, 8, 8)
    net.fc.weight.grad = torch.ones_like(net.fc.weight)
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    parameters = dict(net.named_parameters())
    traced = trace(net, (x,), {})
    inputs = traced.bind((x,), {})
    whole = measure_device(traced, inputs, (4, 8), "d")
    found = with_shares(whole, traced, inputs, context=nullcontext, spent_s=100.0)
    assert found.fractions == FRACTIONS
    for table in (found.forward_factors, found.backward_factors):
        assert np.shape(table) == (len(traced.graph), len(FRACTIONS))
        assert np.min(table) > 0
    assert found.forward_s == whole.forward_s
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(parameters[name] is parameter for name, parameter in net.named_parameters())
    assert torch.equal(net.fc.weight.grad, torch.ones_like(net.fc.weight))
    assert net.conv1.weight.grad is None
    assert torch.equal(random, torch.get_rng_state())


def test_a_layer_that_no_two_devices_can_share_takes_as_long_on_each() -> None:
    net, x = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)), torch.randn(4, 4)
    traced = trace(net, (x,), {})
    whole = DeviceProfile("d", (4,), ((1.0,),) * 2, ((1.0,),) * 2)
    found = with_shares(whole, traced, traced.bind((x,), {}), context=nullcontext, spent_s=0.0)
    assert found.forward_factors == ((1.0, 1.0),) * 2  # at two fractions


def test_a_profile_of_one_device_or_without_merging_has_no_shares(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HETPIPE_CACHE_DIR", str(tmp_path))
    x = torch.randn(8, 3, 8, 8)
    one, two = Cluster("one", (Device("a"),)), Cluster("two", (Device("a"), Device("b")))
    for found in (profile(Net(), x, one), profile(Net(), x, two, merge=False)):
        assert found.sharing is None
        assert found.devices[0].fractions == ()
    found = profile(Net(), x, two)
    assert found.devices[0].fractions
    assert [found.graph.layers[layer].name for layer in found.sharing.coupled] == ["norm"]
    assert Profile.from_json(found.to_json()) == found


@pytest.mark.parametrize("pace", [Pace(5e9, 2e-4, 1.25e8), Pace(5e10, 1e-5, 1e10)], ids=["slow", "fast"])
@pytest.mark.parametrize(
    ("part", "shares"), [((0, 1), (0.5, 0.5)), ((0.3, 1), (0.5, 0.3, 0.2)), ((0, 0.5), (0.25,) * 4)]
)
def test_the_planner_counts_the_collectives_of_the_layout_that_runs(pace, part, shares) -> None:
    net, x = resnet18(num_classes=10), torch.randn(8, 3, 32, 32)
    traced = trace(net, (x,), {})
    start, stop = (round(fraction * len(traced.graph)) for fraction in part)
    stage = Stage(start, stop, tuple("abcd"[: len(shares)]), shares, "channel", pace)
    planned = layout_of(
        SimpleNamespace(derived={}, sharing=sharing_of(traced, traced.bind((x,), {}), 4)), stage, pace, 4
    )

    specs = traced.shapes(resized({k: TensorSpec.of(v) for k, v in traced.bind((x,), {}).items()}, 4))
    module = traced.stage(start, stop, returns=False)
    inputs = {
        name: torch.empty(specs[name].shape, device="meta", requires_grad=specs[name].requires_grad)
        for name in module.input_names
    }
    cost = GroupCost(shares, **asdict(pace))
    layout = analyse(module, inputs, shares, cost)
    for direction, found in enumerate((planned.forward, planned.backward)):
        executed = [
            cost.collective_s(*each)
            for operation in layout.operations.values()
            for each in collectives_of(operation, layout.choice, layout.operations)[direction]
        ]
        expected = sum(cost.collective_s(kind, size * 4) for _, kind, size in found)
        assert expected == pytest.approx(sum(executed), rel=0.01)
    assert planned.parts.max() == 1


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("size_bytes", [SMALL_BYTES // 2, SMALL_BYTES * 4])
@pytest.mark.parametrize("counts", [(4, 4), (6, 2), (4, 3, 1)])
def test_a_collective_costs_what_the_emulated_link_makes_it_cost(
    kind, size_bytes, counts, monkeypatch
) -> None:
    slept = []
    monkeypatch.setattr(membership, "sleep", slept.append)
    link, total = Link(1e-3, 1e8), sum(counts)
    bounds = (0, *np.cumsum(counts).tolist())
    work = SimpleNamespace(wait=lambda: True)
    group = SimpleNamespace(
        allreduce=lambda *_: work, broadcast=lambda *_: work, alltoall_base=lambda *_: work
    )
    taken = []
    for rank, count in enumerate(counts):
        member = object.__new__(Membership)
        member.ranks = tuple(range(len(counts)))
        member._control = SimpleNamespace(rank=rank, naming=lambda *_: nullcontext())
        member._emulator = SimpleNamespace(waiting=nullcontext)
        member._link, member._group, member._label = link, group, ""
        width = size_bytes // 4 // total
        slept.clear()
        if kind == "all_gather":
            collective.all_gather(torch.zeros(count, width), bounds, 0, member)
        elif kind == "reduce_scatter":
            collective.reduce_scatter(torch.zeros(total, width), bounds, 0, member)
        else:
            collective.all_reduce(torch.zeros(total, width), member)
        taken.append(sum(slept))
    shares = tuple(count / total for count in counts)
    cost = GroupCost(shares, latency_s=1e-3, bandwidth_bytes_per_s=1e8)
    assert cost.collective_s(kind, size_bytes) == pytest.approx(max(taken), rel=1e-3)
