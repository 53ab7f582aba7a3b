"""Profiles a whole cluster from one process: every kind of device in turn, links as the cluster gives them.

What messages and collectives cost in software comes on top of such links; between CPUs it is measured.
Right for emulated clusters and for the devices of one host. The strategy profiles differently: each
rank measures its own device.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_hetpipe.checks import require
from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.engine.emulate import Emulator
from lightning_hetpipe.engine.places import torch_device
from lightning_hetpipe.engine.shares import measuring_shares, sharing_of
from lightning_hetpipe.engine.software import software_here
from lightning_hetpipe.errors import ClusterError, GraphError, ProfileError
from lightning_hetpipe.profiles import DeviceProfile, Origin, Profile
from lightning_hetpipe.profiling.analytic import analytic_profile
from lightning_hetpipe.profiling.cache import processor_name
from lightning_hetpipe.profiling.device import Optimizer, allocator_for, profile_device
from lightning_hetpipe.profiling.memory import tune_allocator
from lightning_hetpipe.tracing import Traced, trace

Progress = Callable[[str, int, int], None]


def profile(
    module: nn.Module,
    example: Tensor | tuple[Any, ...],
    cluster: Cluster,
    *,
    origin: Origin = "measured",
    blocks: str | None = None,
    merge: bool = True,
    optimizer: Optimizer | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measures every layer of a module on every device of a cluster.

    Args:
        module: Neither its parameters nor its buffers change.
        example: The module's arguments; tensors of shape ``[batch, ...]``. The batch is the largest
            micro-batch that is measured.
        cluster: Devices of this host. Of emulated ones that differ in speed only, the fastest is measured.
        origin: ``analytic`` derives the figures from the devices' published peaks instead.
        blocks: Name of a sequence of blocks, for a module that does not trace.
        merge: Whether shares of layers are measured too, for plans in which devices share stages.
        optimizer: Class and settings of one whose step is timed and weighed too.
        progress: Called with (device name, parts done, parts in all).

    Returns:
        A profile with one entry per device, and what messages and collectives cost between CPUs (zero in
        a cluster with other devices). What is measured is kept in the user's cache folder.

    Raises:
        GraphError: The module does not trace.
        ProfileError: A device has no published figures, or is not of this host; or processes of this machine
            cannot reach each other.
    """
    require(isinstance(module, nn.Module), GraphError, "module", module, "a torch.nn.Module")
    require(isinstance(cluster, Cluster), ClusterError, "cluster", cluster, "a Cluster")
    require(origin in get_args(Origin), ProfileError, "origin", origin, " or ".join(get_args(Origin)))
    args = example if isinstance(example, tuple) else (example,)
    traced = trace(module, args, {}, blocks)
    inputs = traced.bind(args, {})
    sizes = tabulated_sizes(next(iter(inputs.values())).shape[0])
    sharing = sharing_of(traced, inputs, len(cluster.devices)) if merge else None
    if origin == "analytic":
        return replace(analytic_profile(traced.graph, cluster, sizes), sharing=sharing)
    if "cuda" in {device.kind for device in cluster.devices} and not torch.cuda.is_available():
        raise ProfileError(
            f"cluster {cluster.name!r} has cuda devices and this machine has none: profile there, or say "
            "origin='analytic' (profile=analytic) where the cluster gives published figures"
        )
    measured = _measure(module, args, blocks, sizes, cluster, optimizer, sharing is not None, progress)
    return replace(measured, sharing=sharing, software=software_here(cluster))


def tabulated_sizes(batch_size: int) -> tuple[int, ...]:
    """Micro-batch sizes to measure: the whole batch, halved four times.

    Never 1 beside others: BatchNorm refuses a single value per channel.

    >>> tabulated_sizes(64), tabulated_sizes(9), tabulated_sizes(1)
    ((4, 8, 16, 32, 64), (2, 4, 9), (1,))
    """
    halved = {batch_size >> k for k in range(5)}
    return tuple(sorted(size for size in halved if size >= min(2, batch_size)))


def _measure(
    module: nn.Module,
    args: tuple[Any, ...],
    blocks: str | None,
    sizes: tuple[int, ...],
    cluster: Cluster,
    optimizer: Optimizer | None,
    shares: bool,
    progress: Progress | None,
) -> Profile:
    measured: dict[Device, DeviceProfile] = {}
    fastest = {device.name: fastest_alike(device, cluster) for device in cluster.devices}
    for place in dict.fromkeys(map(torch_device, cluster.devices)):
        there = module if place.type == "cpu" else copy.deepcopy(module).to(place)
        placed = pytree.tree_map_only(Tensor, methodcaller("to", place), args)
        traced = trace(there, placed, {}, blocks)
        inputs = traced.bind(placed, {})
        for device in dict.fromkeys(fastest.values()):
            if torch_device(device) == place:
                measured[device] = _measure_one(traced, inputs, sizes, device, optimizer, shares, progress)
    devices = tuple(as_slow_as(each, measured[fastest[each.name]], cluster) for each in cluster.devices)
    environment = {"torch": torch.__version__, "processor": processor_name()}
    return Profile(traced.graph, devices, environment=environment)


def fastest_alike(device: Device, cluster: Cluster) -> Device:
    """The device that is measured for this one: of those that differ in an emulated speed only, the fastest.

    An emulated device takes exactly its processor's time divided by its speed (`engine.emulate`), so that
    one measurement serves all speeds; two would differ by what the processor's own speed did meanwhile.
    """
    alike = [each for each in cluster.devices if _unslowed(each) == _unslowed(device)]
    return max(alike, key=speed_of)


def as_slow_as(device: Device, measured: DeviceProfile, cluster: Cluster) -> DeviceProfile:
    """The profile of a device from that of `fastest_alike`."""
    fastest = speed_of(cluster.device(measured.device))
    return measured.slowed(fastest / speed_of(device), device.name)


def speed_of(device: Device) -> float:
    """The fraction of its processor's speed that a device keeps to."""
    return device.emulation.speed if device.emulation else 1.0


def _unslowed(device: Device) -> tuple[object, ...]:
    emulation = device.emulation and replace(device.emulation, speed=1.0)
    return replace(device, emulation=emulation).kind_key


def _measure_one(
    traced: Traced,
    inputs: Mapping[str, Tensor],
    sizes: tuple[int, ...],
    device: Device,
    optimizer: Optimizer | None,
    shares: bool,
    progress: Progress | None,
) -> DeviceProfile:
    threads = torch.get_num_threads()
    torch.set_num_threads(device.threads)
    try:
        return profile_device(
            traced,
            inputs,
            sizes,
            device,
            section=Emulator(device).section,
            optimizer=optimizer,
            settings=allocator_for(device),
            shares=measuring_shares(traced, inputs) if shares else None,
            progress=None if progress is None else partial(progress, device.name),
        )
    finally:
        torch.set_num_threads(threads)
        tune_allocator()
