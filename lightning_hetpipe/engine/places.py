"""Where ranks compute: their devices as torch names them, and what joins two of them.

GPU 0 ── nccl ── GPU 1        two GPUs
GPU 0 ── gloo ── GPU 0        two ranks that share one: NCCL refuses them
GPU 0 ── gloo ── CPU          through host memory
"""

from typing import Literal

import torch

from lightning_hetpipe.cluster import Device
from lightning_hetpipe.errors import ClusterError


def torch_device(device: Device) -> torch.device:
    """What torch calls a device of a cluster.

    Raises:
        ClusterError: Ranks cannot compute on that kind.
    """
    if device.kind not in ("cpu", "cuda"):
        raise ClusterError(
            f"device {device.name!r} is of kind {device.kind!r}: ranks compute on cpu and cuda; other kinds "
            "can only be planned for"
        )
    return torch.device("cpu") if device.kind == "cpu" else torch.device("cuda", device.index or 0)


def check_present(device: Device) -> None:
    """Refuses a device that this machine does not have.

    Raises:
        ClusterError: It is missing, or of a kind that ranks cannot compute on.
    """
    if torch_device(device).type == "cpu":
        return
    index, n_found = device.index or 0, torch.cuda.device_count()  # torch.device keeps 8 bits of an index
    if index >= n_found:
        raise ClusterError(
            f"device {device.name!r} is cuda:{index} of host {device.host!r}, and this machine has {n_found} "
            "cuda devices: change the cluster's kind or index (two devices may have the same index: their "
            "ranks share it), or start this rank elsewhere"
        )


def processor(device: torch.device) -> str | None:
    """The identity of a GPU, equal in all processes that use it; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def backend_between(source: str | None, target: str | None) -> Literal["gloo", "nccl"]:
    """What carries messages between two processors, given by their identity.

    >>> backend_between("GPU-a", "GPU-b"), backend_between("GPU-a", "GPU-a"), backend_between("GPU-a", None)
    ('nccl', 'gloo', 'gloo')
    """
    return "gloo" if source is None or target is None or source == target else "nccl"
