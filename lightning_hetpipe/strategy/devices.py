"""The device of each rank, which the cluster decides; a Trainer knows one accelerator for all ranks."""

from importlib import import_module
from typing import Any

import torch

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.engine.places import check_present, torch_device
from lightning_hetpipe.errors import UnsupportedError

_ACCELERATORS = {"cpu": "CPUAccelerator", "cuda": "CUDAAccelerator"}


def stand_ins(cluster: Cluster | None) -> list[torch.device] | None:
    """What a Trainer is shown until its processes run, for a cluster that it would refuse.

    It counts the accelerators of one kind, so it has no word for two kinds, or for two ranks on one GPU.

    Returns:
        As many CPUs as the cluster has devices; None where the Trainer can choose for itself.
    """
    if cluster is None:
        return None
    places = [(each.host, each.kind, each.index) for each in cluster.devices if each.kind != "cpu"]
    if len(set(places)) in (0, len(cluster.devices)):
        return None
    return [torch.device("cpu")] * len(cluster.devices)


def take_device(strategy: Any) -> None:
    """Gives this rank the device that the cluster names, with the accelerator and the autocast that fit it.

    Raises:
        ClusterError: This machine has no such device.
    """
    cluster = strategy.options.known_cluster
    if cluster is not None:
        own = cluster.devices[strategy.global_rank]
        check_present(own)
        devices = list(strategy.parallel_devices)
        devices[strategy.local_rank] = torch_device(own)
        strategy.parallel_devices = devices
        name = _ACCELERATORS[own.kind]
        if type(strategy.accelerator).__name__ != name:
            strategy.accelerator = getattr(import_module(f"{strategy.namespace}.accelerators"), name)()
    if _has_autocast(strategy.precision_plugin):
        strategy.precision_plugin.device = strategy.root_device.type


def refuse_autocast_across_kinds(precision: Any, cluster: Cluster | None) -> None:
    """Refuses what gives a value another dtype on a CPU than on a GPU: the receiver could not know which.

    Raises:
        UnsupportedError: A mixed precision, on a cluster of several kinds.
    """
    kinds = sorted({device.kind for device in cluster.devices}) if cluster is not None else []
    if len(kinds) > 1 and _has_autocast(precision):
        raise UnsupportedError(
            f"precision {precision.precision!r} was asked for on a cluster of {' and '.join(kinds)} devices, "
            "and each kind has its own rules for what autocast computes in which dtype: choose 32-true, "
            "64-true, 16-true or bf16-true"
        )


def _has_autocast(precision: Any) -> bool:
    return hasattr(precision, "scaler")
