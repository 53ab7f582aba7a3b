"""Finds the cluster: every rank reports the device that it has."""

import os
import platform
import socket

import torch

from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.engine.places import processor
from lightning_hetpipe.strategy.exchange import Exchange


def find_cluster(exchange: Exchange, device: torch.device) -> Cluster:
    """The cluster of all ranks, in rank order. Called on all ranks."""
    places = exchange.gather((socket.gethostname(), processor(device)))
    mine = _describe(device, exchange.rank, places.count(places[exchange.rank]))
    return Cluster("found", tuple(exchange.gather(mine)))


def _describe(device: torch.device, rank: int, n_sharing: int) -> Device:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        model, memory_bytes = properties.name, properties.total_memory
    else:
        model = platform.processor() or platform.machine()
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        name=f"{device.type}{rank}",
        kind=device.type,
        model=model,
        host=socket.gethostname(),
        index=device.index,
        memory_bytes=memory_bytes // n_sharing,
        threads=torch.get_num_threads(),
    )
