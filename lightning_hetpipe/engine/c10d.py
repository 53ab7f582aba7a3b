"""The parts of torch.distributed below its process groups, with types.

The engine builds its groups directly on a store: neither WORLD nor torch's registry of groups knows
them, only the ranks of a group take part in creating it, and dropping the last reference closes it.
"""

import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = [
    "Collectives",
    "Group",
    "PrefixStore",
    "Store",
    "Work",
    "gloo_device",
    "gloo_group",
    "nccl_group",
    "thread_store",
]


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> bool: ...

    def is_completed(self) -> bool: ...


class Group(Protocol):
    """Ranks that send to each other by their index in the group."""

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


class Collectives(Group, Protocol):
    """Ranks that do something together, by their index in the group."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def broadcast(self, tensor: Tensor, root: int) -> Work: ...

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int]
    ) -> Work: ...


def thread_store(timeout_s: float) -> Store:
    """A store for threads of one process."""
    library: Any = dist  # whose types do not know this store
    store: Store = library.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def gloo_device() -> Any:
    """One listening socket and one thread, for all gloo groups of a process.

    They are on the (first) interface that ``GLOO_SOCKET_IFNAME`` names, as those of torch itself; else on
    that of the host's name.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def gloo_group(store: Store, index: int, size: int, device: Any, timeout_s: float) -> Collectives:
    """Connects to the other ranks of a group; returns once all are there."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [device]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_s)
    group: Collectives = kind(store, index, size, options)
    return group


def nccl_group(store: Store, index: int, size: int, device: torch.device, timeout_s: float) -> Group:
    """Two ranks with a GPU each; connects at the first transfer, for which both ends have to come."""
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(device):
        group: Group = kind(store, index, size, options)
    return group
