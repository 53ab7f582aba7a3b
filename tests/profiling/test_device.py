import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_hetpipe.cluster import Device, Emulation
from lightning_hetpipe.profiling import device as device_module
from lightning_hetpipe.profiling.device import Optimizer, profile_device
from lightning_hetpipe.profiling.measure import measure_device
from lightning_hetpipe.tracing import trace

DEVICE = Device("left", emulation=Emulation(0.5))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The devices that were really measured, and a pace that holds still."""
    names = []

    def count(traced, inputs, sizes, name, **more):
        names.append(name)
        return measure_device(traced, inputs, sizes, name, budget_s=0.01, **more)

    monkeypatch.setenv("HETPIPE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(device_module, "measure_device", count)
    monkeypatch.setattr(device_module, "reference_seconds", lambda place, section: 0.05)
    return names


def module(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def profile(net: nn.Module, device: Device = DEVICE, sizes=(2, 4), **more):
    traced = trace(net, (torch.ones(4, 4),), {})
    return profile_device(traced, traced.bind((torch.ones(4, 4),), {}), sizes, device, **more)


def test_a_second_run_reads_what_the_first_measured(measured):
    first = profile(module())
    assert first.micro_batches == (2, 4)
    assert profile(module()) == first
    assert profile(module(), replace(DEVICE, name="right")) == replace(first, device="right")
    assert measured == ["left"]


def frozen(net: nn.Module) -> nn.Module:
    net[0].requires_grad_(False)
    return net


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize(
    "change",
    [
        lambda: profile(module(width=9)),
        lambda: profile(module().double().float(), sizes=(2, 3, 4)),
        lambda: profile(module(), replace(DEVICE, emulation=Emulation(0.25))),
        lambda: profile(frozen(module())),
        lambda: profile(module().eval()),
        lambda: profile(module(), context=autocast),
        lambda: profile(module(), settings="another allocator"),
        lambda: profile(module(), optimizer=Optimizer(torch.optim.SGD, {"lr": 0.1})),
    ],
    ids=["model", "sizes", "emulation", "frozen", "mode", "autocast", "settings", "optimizer"],
)
def test_whatever_changes_the_speed_is_measured_anew(measured, change):
    profile(module())
    change()
    change()
    assert measured == ["left", "left"]


def test_the_optimizer_is_timed_and_its_settings_count(measured, monkeypatch):
    seen = []

    def cost(make, settings, **more):
        seen.append((make, settings, more["dtype"]))
        return 3e-9

    monkeypatch.setattr(device_module, "optimizer_s_per_byte", cost)
    assert profile(module()).optimizer_s_per_byte == 0.0
    adam = Optimizer(torch.optim.AdamW, {"lr": 0.1})
    assert profile(module(), optimizer=adam).optimizer_s_per_byte == 3e-9
    assert profile(module(), optimizer=adam).optimizer_s_per_byte == 3e-9
    profile(module(), optimizer=Optimizer(torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}))
    assert [settings for _, settings, _ in seen] == [{"lr": 0.1}, {"lr": 0.1, "amsgrad": True}]
    assert seen[0][::2] == (torch.optim.AdamW, torch.float32)


def test_all_computing_runs_within_the_section(measured):
    entered = []

    @contextlib.contextmanager
    def section():
        entered.append(1)
        yield

    profile(module(), section=section)
    count = len(entered)
    assert count > 0
    profile(module(width=9), section=section, optimizer=Optimizer(torch.optim.SGD, {"lr": 0.1}))
    assert len(entered) > count
