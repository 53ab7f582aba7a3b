import pytest
import torch
from torch import nn

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.engine.survey import fastest_alike, profile
from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.profiles import Software
from lightning_hetpipe.profiling import device


@pytest.fixture
def module():
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 8))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETPIPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "reference_seconds", lambda place, section: 0.05)
    return tmp_path / "cache"


def cluster(*devices):
    return Cluster.from_mapping({"name": "lab", "devices": list(devices)})


def test_every_device_is_profiled_and_equal_devices_share_their_measurements(module):
    lab = cluster({"name": "fast", "speed": 0.8}, {"name": "slow", "speed": 0.4, "count": 2})
    measured = profile(module, torch.randn(16, 64), lab)
    assert [device.device for device in measured.devices] == ["fast", "slow1", "slow2"]
    assert measured.device("slow1").forward_s == measured.device("slow2").forward_s
    assert measured.device("slow1").micro_batches == (2, 4, 8, 16)
    assert measured.origin == "measured"
    assert measured.software != Software()


def test_profiling_leaves_the_module_as_it_was(module):
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    profile(module, torch.randn(8, 64), cluster({"name": "cpu", "speed": 0.9}))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_second_profile_is_read_from_the_cache(module, cache):
    lab, example = cluster({"name": "cpu", "speed": 0.9}), torch.randn(8, 64)
    first = profile(module, example, lab)
    assert len(list(cache.rglob("*.json"))) == 1
    assert profile(module, example, lab) == first


def test_devices_that_are_not_here_are_profiled_from_their_data_sheet_or_not_at_all(module):
    lab = cluster({"name": "gpu", "kind": "cuda", "flops_per_s": 1e13, "memory_bandwidth": "500GB/s"})
    estimate = profile(module, torch.randn(8, 64), lab, origin="analytic")
    assert estimate.device("gpu").micro_batches == (2, 4, 8)
    assert estimate.software == Software()
    if not torch.cuda.is_available():
        with pytest.raises(ProfileError, match="has cuda devices and this machine has none"):
            profile(module, torch.randn(8, 64), lab)


def test_a_slower_emulated_device_takes_longer_in_proportion_to_its_speed(module):
    lab = cluster({"name": "fast", "speed": 0.8}, {"name": "slow", "speed": 0.2})
    measured = profile(module, torch.randn(16, 64), lab)
    for fast, slow in zip(measured.device("fast").layer_seconds(8), measured.device("slow").layer_seconds(8)):
        assert slow == pytest.approx(4 * fast)


def test_devices_of_unequal_memory_are_measured_apart():
    lab = cluster({"name": "a", "speed": 0.5, "memory": "1GB"}, {"name": "b", "speed": 0.4, "memory": "2GB"})
    assert [fastest_alike(device, lab).name for device in lab.devices] == ["a", "b"]
