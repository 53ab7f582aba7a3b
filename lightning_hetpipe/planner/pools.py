"""Turns profile and cluster into a `Chain`: which devices are interchangeable, and what each may hold."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetpipe.cluster import ANY, MESSAGE_BYTES, Cluster, Device, Link, slowest_link
from lightning_hetpipe.planner.chain import Array, Chain, Depth, MemoryTables
from lightning_hetpipe.planner.cost import LayerCosts, batch_bytes, is_copied
from lightning_hetpipe.profiles import Profile

_TOLERANCE = 0.2  # times that differ by less are one link measured twice
MAX_POOLS = 24  # more (many hosts, each pair with its own link) are put together by kind of device


@dataclass(frozen=True)
class Pools:
    """Devices in groups that the planner need not tell apart.

    Attributes:
        names: The devices of each pool.
        links: ``[from][to]``, between two devices of these pools (two different ones of the same pool).
        exact: False when pools with different links were put together; each pair then counts with its
            slowest link.
        ordered: True when each pool is one device, and stages must follow their order.
    """

    names: tuple[tuple[str, ...], ...]
    links: tuple[tuple[Link, ...], ...]
    exact: bool
    ordered: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.names))


def make_pools(profile: Profile, cluster: Cluster, *, pinned_last: str | None = None) -> Pools:
    """Groups devices of equal kind, measurements and links; a pinned device stands alone.

    Raises:
        ProfileError: A device was not profiled.
    """
    named = {end for link in cluster.links for end in (link.source, link.target)}
    alike = _alike(profile, cluster)

    def key(device: Device, by_link: bool) -> tuple[object, ...]:
        measured = profile.device(device.name)
        place = device.name if device.name in named else device.host if device.host in named else ANY
        return (
            device.kind_key,
            measured.micro_batches,
            measured.forward_s,
            measured.backward_s,
            measured.forward_peak_bytes,
            measured.backward_peak_bytes,
            measured.optimizer_peak,
            device.name == pinned_last,
            (place, alike.get(device.name)) if by_link else ANY,
        )

    for by_link in (True, False):
        groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for device in cluster.devices:
            groups[key(device, by_link)].append(device.name)
        if len(groups) <= MAX_POOLS:
            break
    names = tuple(map(tuple, groups.values()))
    return Pools(names, _links(profile, cluster, names, exact=by_link), exact=by_link)


def _alike(profile: Profile, cluster: Cluster) -> dict[str, int]:
    """The number of a class for every device with measured links; equal where the links are.

    Links are equal when `MESSAGE_BYTES` take equally long within `_TOLERANCE` of the first of their class: a
    measurement repeats no better. Two devices are alike when their links to every third device are,
    in both directions, and when the links between the two agree with each other; so measured clusters of
    equal devices make as few pools as declared ones.
    """
    names = [device.name for device in cluster.devices]
    measured = {end for link in profile.links for end in (link.source, link.target)}
    if not measured:
        return {}
    seconds = np.array(
        [
            [profile.link(cluster, a, b).transfer_s(MESSAGE_BYTES) if a != b else np.nan for b in names]
            for a in names
        ]
    )
    firsts: list[int] = []
    found: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in measured:
            kind = cluster.device(name).kind_key
            same = (
                number
                for number, first in enumerate(firsts)
                if cluster.device(names[first]).kind_key == kind and _same_links(seconds, first, index)
            )
            found[name] = next(same, len(firsts))
            if found[name] == len(firsts):
                firsts.append(index)
    return found


def _same_links(seconds: Array, a: int, b: int) -> bool:
    """Whether two devices reach all others, and are reached, equally fast."""
    others = np.ones(len(seconds), dtype=bool)
    others[[a, b]] = False
    mine = np.concatenate([seconds[a, others], seconds[others, a], [seconds[a, b]]])
    theirs = np.concatenate([seconds[b, others], seconds[others, b], [seconds[b, a]]])
    return bool((np.abs(mine - theirs) <= _TOLERANCE * np.minimum(mine, theirs)).all())


def in_order(profile: Profile, cluster: Cluster, order: Sequence[str]) -> Pools:
    """One pool per device, for stages in a given order."""
    names = tuple((name,) for name in order)
    return Pools(names, _links(profile, cluster, names, exact=True), exact=True, ordered=True)


def _links(
    profile: Profile, cluster: Cluster, names: Sequence[tuple[str, ...]], *, exact: bool
) -> tuple[tuple[Link, ...], ...]:
    def between(sources: tuple[str, ...], targets: tuple[str, ...]) -> Link:
        if exact:
            source = sources[0]
            target = next((name for name in targets if name != source), source)
            return profile.link(cluster, source, target)
        # One device of each host stands for it.
        ends = [_one_per_host(cluster, side) for side in (sources, targets)]
        links = [profile.link(cluster, a, b) for a in ends[0] for b in ends[1] if a != b]
        return slowest_link(links) if links else profile.link(cluster, sources[0], targets[0])

    return tuple(tuple(between(sources, targets) for targets in names) for sources in names)


def _one_per_host(cluster: Cluster, names: tuple[str, ...]) -> list[str]:
    return list({cluster.device(name).host: name for name in names}.values())[:32]


def make_chain(
    costs: LayerCosts,
    cluster: Cluster,
    pools: Pools,
    *,
    batch_size: int,
    pinned_last: str | None = None,
    n_stages: int | None = None,
    depth: Depth = "safe",
) -> Chain:
    """The placement problem of one micro-batch size, with one choice per pool.

    Args:
        costs: A profile at this micro-batch size.
        cluster: Memory limits.
        pools: Of the same cluster.
        batch_size: Samples per step.
        pinned_last: The device that must hold the last stage, or None.
        n_stages: How many stages there must be, or None.
        depth: In-flight counts that memory must have room for.
    """
    profile, n_layers = costs.profile, len(costs.graph)
    firsts = [names[0] for names in pools.names]
    seconds = np.stack([sum(costs.seconds(name), np.zeros(n_layers + 1)) for name in firsts])
    hop, occupied = _transfers(costs, pools)
    last = np.array([pinned_last in (None, *names) for names in pools.names])
    inner = np.array([pinned_last not in names for names in pools.names])
    if pools.ordered:
        n_stages = len(firsts)
        last = np.arange(n_stages) == n_stages - 1
        inner = ~last
        follows = np.arange(n_stages)[:, None] + 1 == np.arange(n_stages)[None, :]
        occupied[:, :, 1:-1] = np.where(follows[:, :, None], occupied[:, :, 1:-1], np.inf)
    uses, available = np.eye(len(firsts), dtype=np.int64), np.array(pools.sizes, dtype=np.int64)
    if n_stages is not None:
        uses = np.column_stack([uses, np.ones(len(firsts), dtype=np.int64)])
        available = np.append(available, n_stages)
    step_s = profile.step_forward_s + profile.step_backward_s
    m = -(-batch_size // costs.micro_batch)
    return Chain(
        seconds=seconds,
        hop_s=hop,
        occupied_s=occupied,
        uses=uses,
        available=available,
        n_micro_batches=m,
        last_s=np.where(last, step_s, np.inf),
        inner=inner,
        memory=_memory(costs, cluster, firsts, batch_size, m),
        n_stages=n_stages,
        depth=depth,
    )


def _transfers(costs: LayerCosts, pools: Pools) -> tuple[Array, Array]:
    """``hop_s`` and ``occupied_s`` of a chain; nothing crosses the ends of the model."""
    forward, backward = costs.forward_bytes, costs.backward_bytes
    latency = np.array([[link.latency_s for link in row] for row in pools.links])
    rate = np.array([[link.bandwidth_bytes_per_s for link in row] for row in pools.links])
    there = forward / rate[:, :, None]
    back = backward / rate.T[:, :, None]
    hop = there + back + latency[:, :, None] + np.where(backward > 0, latency.T[:, :, None], 0.0)
    occupied = np.maximum(there, back)
    for table in (hop, occupied):
        table[:, :, [0, -1]] = 0.0
    return hop, occupied


def _memory(
    costs: LayerCosts, cluster: Cluster, firsts: Sequence[str], batch_size: int, m: int
) -> MemoryTables | None:
    """Memory tables, or None where the whole model with all micro-batches fits everywhere."""
    limits = [cluster.device(name).memory_bytes for name in firsts]
    if all(limit is None for limit in limits):
        return None
    moments = [costs.memory(name).tables(copied=is_copied(cluster)) for name in firsts]
    every, steady, fill, optimizer = (
        np.stack(tables)
        for tables in (
            [each.peak(m, m) for each in moments],
            [each.steady for each in moments],
            [each.fill for each in moments],
            [each.optimizer for each in moments],
        )
    )
    for table in (every, steady, fill, optimizer):
        table[:, :, -1] += batch_bytes(costs, batch_size)
    held = moments[0].held
    tables = MemoryTables(
        every=every,
        steady=steady,
        fill=fill,
        optimizer=optimizer,
        kept=held.kept,
        sent=held.sent,
        n_micro_batches=m,
        limit=np.array([np.inf if limit is None else float(limit) for limit in limits]),
        grows=costs.parameter_bytes * (2 + costs.optimizer_copies) + m * costs.activations.sums,
        crosses=np.stack([costs.forward_bytes, costs.backward_bytes, costs.activations.waiting]),
    )
    limit = tables.limit[:, None, None]
    most = np.maximum(steady + m * held.kept, fill + m * (held.kept + held.sent))
    return None if (np.maximum(every, most) <= limit).all() else tables
