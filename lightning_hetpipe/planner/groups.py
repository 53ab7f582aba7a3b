"""Groups of devices as the planner sees them: who can share what, in which shares, and as one device.

A group is a `Stage` whose layers are yet to be found. As a *composite* it stands in a smaller cluster for
its members, with the seconds that they need together, so that layers are placed on it as on any device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from lightning_hetpipe.cluster import ANY, Cluster, Device, Link, slowest_link
from lightning_hetpipe.planner.channel import can_share, channel_parts, channel_run, pace_of
from lightning_hetpipe.plans import Split, Stage
from lightning_hetpipe.profiles import DeviceProfile, Profile
from lightning_hetpipe.shares import largest_remainder

_ROUNDS = 30  # of balancing shares whose seconds are not proportional to them
_LEAST = 1 / 3  # of the share by speed alone: where a part takes as long as the whole, no share balances


def composite_name(devices: Sequence[str]) -> str:
    """What a group is called where it stands for one device.

    >>> composite_name(("b", "c"))
    'b+c'
    """
    return "+".join(devices)


def make_group(
    profile: Profile, cluster: Cluster, devices: Sequence[str], split: Split, micro_batch: int
) -> Stage:
    """A group of these devices for the whole model, its shares balanced by what they take."""
    stage = Stage(0, len(profile.graph), tuple(devices), (1 / len(devices),) * len(devices), split)
    if split == "channel":
        stage = replace(stage, pace=pace_of(profile, cluster, devices, micro_batch))
    return balanced(profile, stage, micro_batch)


def balanced(profile: Profile, stage: Stage, micro_batch: int) -> Stage:
    """The group with the shares that let its members finish together, for micro-batches of that size."""
    devices, run = [profile.device(name) for name in stage.devices], slice(stage.start, stage.stop)
    if stage.split == "batch":
        return replace(stage, shares=_rows_as_shares(devices, run, micro_batch))
    whole = [sum(float(table[run].sum()) for table in d.layer_seconds(micro_batch)) for d in devices]
    rates = 1 / np.maximum(np.array(whole), 1e-12)
    shares = rates / rates.sum()
    least = shares * _LEAST
    for _ in range(_ROUNDS):
        taken = np.array(
            [
                sum(
                    float(table[run] @ factors[run])
                    for table, factors in zip(device.layer_seconds(micro_batch), device.share_factors(share))
                )
                for device, share in zip(devices, shares)
            ]
        )
        shares = shares / np.maximum(taken, 1e-12) ** 0.5
        shares = np.maximum(shares / shares.sum(), least)
        shares = shares / shares.sum()
    return replace(stage, shares=tuple(map(float, shares)))


def _rows_as_shares(devices: Sequence[DeviceProfile], run: slice, micro_batch: int) -> tuple[float, ...]:
    """Each sample to the member that would be done with it first; none is left without any."""
    rows = [1] * len(devices)
    for _ in range(micro_batch - len(devices)):
        after = [
            sum(float(table[run].sum()) for table in device.layer_seconds(held + 1))
            for device, held in zip(devices, rows)
        ]
        rows[int(np.argmin(after))] += 1
    return tuple(held / sum(rows) for held in rows)


def refusal(profile: Profile, cluster: Cluster, stage: Stage, micro_batch: int, *, exact: bool) -> str:
    """Why a group cannot hold a stage; empty if it can.

    Args:
        exact: Whether what is computed must be what one device would compute: BatchNorm with statistics
            of its own does not allow that a group divides its samples.
    """
    if stage.split == "none":
        return ""
    sharing, n = profile.sharing, len(stage.devices)
    if sharing is None:
        return "shares were not measured: profile with merge on"
    if stage.split == "channel":
        kinds = sorted({cluster.device(name).kind for name in stage.devices})
        if len(kinds) > 1:
            return f"devices of kinds {' and '.join(kinds)} cannot share channels"
        if not can_share(sharing, stage.start, stage.stop, n):
            return f"no operation of its layers has channels (or groups of them) for {n} devices"
        return ""
    if micro_batch < n:
        return f"a micro-batch of {micro_batch} has no sample for some of {n} devices"
    layers = range(stage.start, stage.stop)
    names = [layer.name for layer in profile.graph.layers]
    if exact:
        coupled = next((names[layer] for layer in sharing.coupled if layer in layers), None)
        if coupled is not None:
            return f"{coupled} would normalise by each device's own samples"
    enters = False
    for value in profile.graph.values:
        outside = value.output or any(layer not in layers for layer in value.consumers)
        made_here = value.producer in layers
        used_here = any(layer in layers for layer in value.consumers)
        crosses = outside if made_here else used_here
        if crosses and value.name in sharing.rowless:
            return f"{value.name!r} crosses its boundary, and no dimension of it counts the samples"
        enters = enters or (used_here and not made_here)
    return "" if enters else "no value with samples enters it"


def composite_profile(profile: Profile, cluster: Cluster, group: Stage, micro_batch: int) -> DeviceProfile:
    """The seconds of every layer on the group, boundaries between stages aside."""
    first = profile.device(group.devices[0])
    forward, backward = [], []
    for size in first.micro_batches:
        if group.split == "channel":
            assert group.pace is not None
            run = channel_run(profile, cluster, group, group.pace, micro_batch, size)
            forward.append(run.forward_s)
            backward.append(run.backward_s)
        else:
            rows = largest_remainder(size, group.shares)
            tables = [
                profile.device(name).layer_seconds(held) for name, held in zip(group.devices, rows) if held
            ]
            forward.append(np.max([table[0] for table in tables], axis=0))
            backward.append(np.max([table[1] for table in tables], axis=0))
    return DeviceProfile(
        composite_name(group.devices),
        first.micro_batches,
        tuple(map(tuple, np.column_stack(forward).tolist())),
        tuple(map(tuple, np.column_stack(backward).tolist())),
        optimizer_s_per_byte=first.optimizer_s_per_byte,
        forward_peak_bytes=first.forward_peak_bytes,
        backward_peak_bytes=first.backward_peak_bytes,
        optimizer_peak=first.optimizer_peak,
    )


def reduced_cluster(profile: Profile, cluster: Cluster, groups: Sequence[Stage], micro_batch: int) -> Cluster:
    """The cluster with a composite in place of the members of each group."""
    merged = {name for group in groups for name in group.devices}
    devices = [device for device in cluster.devices if device.name not in merged]
    devices += [_composite_device(profile, cluster, group, micro_batch) for group in groups]
    names = {device.name for device in devices}
    known = {ANY, *names, *(device.host for device in devices)}
    links = [link for link in cluster.links if {link.source, link.target} <= known]
    alone = [Stage(0, 1, (device.name,)) for device in devices if device.name not in _names(groups)]
    for group in groups:
        links += _rules(profile, cluster, group, [*alone, *(each for each in groups if each is not group)])
    return replace(cluster, devices=tuple(devices), links=tuple(links))


def _names(groups: Iterable[Stage]) -> set[str]:
    return {composite_name(group.devices) for group in groups}


def _composite_device(profile: Profile, cluster: Cluster, group: Stage, micro_batch: int) -> Device:
    """Its limit is that of the member which is full first, if all layers were alike."""
    members = [cluster.device(name) for name in group.devices]
    limits = []
    for member, share in zip(members, group.shares):
        if member.memory_bytes is not None:
            part = 1.0
            if group.pace is not None:
                part = max(channel_parts(profile, group, group.pace, micro_batch, share))
            limits.append(int(member.memory_bytes / part))
    first = members[0]
    return Device(
        composite_name(group.devices),
        kind=first.kind,
        model=f"{len(members)} of {first.name} by {group.split}",
        host=first.host,
        index=first.index,
        memory_bytes=min(limits, default=None),
    )


def _rules(profile: Profile, cluster: Cluster, group: Stage, others: Sequence[Stage]) -> list[Link]:
    """Its links, as one rule for both directions each where they are all alike."""
    found = [
        (composite_name(each.devices), _between(profile, cluster, *ends))
        for each in others
        for ends in ((group, each), (each, group))
    ]
    name = composite_name(group.devices)
    rules = []
    for index, sends in enumerate((True, False)):
        links = found[index::2]
        if len({(link.latency_s, link.bandwidth_bytes_per_s) for _, link in links}) == 1:
            links = [(ANY, links[0][1])]
        for other, link in links:
            source, target = (name, other) if sends else (other, name)
            rules.append(replace(link, source=source, target=target))
    return rules


def _between(profile: Profile, cluster: Cluster, source: Stage, target: Stage) -> Link:
    """As fast as the slowest pair of members, each of which carries its part of a tensor only."""
    slowest = slowest_link(profile.link(cluster, a, b) for a in source.devices for b in target.devices)
    sent = max(source.shares) if source.split == "batch" else 1 / len(source.devices)
    taken = max(target.shares) if target.split == "batch" else 1.0
    way = Link(slowest.latency_s, slowest.bandwidth_bytes_per_s / (sent * taken))
    return profile.software.after(way)  # `Profile.link` adds the sender's part to what a cluster declares
