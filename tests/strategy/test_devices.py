"""The cluster decides each rank's device; the Trainer is shown what it can express."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins import MixedPrecision, Precision

from lightning_hetpipe import Cluster, Device, HetPipeStrategy
from lightning_hetpipe.errors import ClusterError, UnsupportedError
from lightning_hetpipe.strategy import devices
from lightning_hetpipe.strategy.devices import refuse_autocast_across_kinds, stand_ins, take_device

CPU = torch.device("cpu")
GPU = Device("gpu", kind="cuda")
MIXED = Cluster("mixed", (GPU, Device("cpu")))
SHARED = Cluster("shared", (Device("a", kind="cuda", index=0), Device("b", kind="cuda", index=0)))


def test_a_cluster_of_several_kinds_stands_as_cpus_until_ranks_take_their_devices() -> None:
    assert stand_ins(MIXED) == [CPU, CPU]
    assert HetPipeStrategy(cluster=MIXED).parallel_devices == [CPU, CPU]


def test_so_does_one_whose_ranks_share_a_gpu() -> None:
    assert stand_ins(SHARED) == [CPU, CPU]


@pytest.mark.parametrize(
    "cluster",
    [
        None,
        Cluster("cpus", (Device("a"), Device("b"))),
        Cluster("gpus", (Device("a", kind="cuda"), Device("b", kind="cuda"))),
        Cluster("hosts", (Device("a", kind="cuda", host="x"), Device("b", kind="cuda", host="y"))),
    ],
)
def test_the_trainer_chooses_where_it_can_express_the_cluster(cluster: Cluster | None) -> None:
    assert stand_ins(cluster) is None


def rank_of(cluster: Cluster | None, rank: int, precision: Any = None) -> Any:
    """What `take_device` sees of a strategy."""
    return SimpleNamespace(
        options=SimpleNamespace(known_cluster=cluster),
        namespace="lightning.pytorch",
        global_rank=rank,
        local_rank=rank,
        parallel_devices=[CPU, CPU],
        accelerator=CPUAccelerator(),
        precision_plugin=precision or Precision(),
        root_device=CPU,
    )


def test_a_rank_takes_the_device_of_its_place_with_its_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "check_present", lambda device: None)
    first, second = rank_of(MIXED, 0), rank_of(MIXED, 1)
    take_device(first)
    take_device(second)
    assert first.parallel_devices[0] == torch.device("cuda", 0)
    assert isinstance(first.accelerator, CUDAAccelerator)
    assert second.parallel_devices[1] == CPU
    assert isinstance(second.accelerator, CPUAccelerator)


def test_without_a_cluster_a_rank_keeps_what_the_trainer_chose() -> None:
    rank = rank_of(None, 1)
    before = dict(vars(rank))
    take_device(rank)
    assert vars(rank) == before


def test_autocast_is_for_the_device_that_the_rank_has() -> None:
    plugin = MixedPrecision("bf16-mixed", "cuda")
    take_device(rank_of(None, 0, plugin))
    assert plugin.device == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA devices")
def test_a_rank_whose_device_is_missing_says_so() -> None:
    with pytest.raises(
        ClusterError, match="'gpu' is cuda:0 of host 'localhost', and this machine has 0 cuda"
    ):
        take_device(rank_of(MIXED, 0))


def test_autocast_is_refused_across_kinds_and_nowhere_else() -> None:
    mixed_precision = MixedPrecision("bf16-mixed", "cpu")
    with pytest.raises(UnsupportedError, match="'bf16-mixed' was asked for on a cluster of cpu and cuda"):
        refuse_autocast_across_kinds(mixed_precision, MIXED)
    refuse_autocast_across_kinds(mixed_precision, SHARED)
    refuse_autocast_across_kinds(Precision(), MIXED)
    refuse_autocast_across_kinds(mixed_precision, None)
