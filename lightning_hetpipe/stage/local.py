"""Rules for operations without parameters: they run on shards where the cut dimension allows it."""

from math import prod
from typing import Any

import torch

from lightning_hetpipe.stage.layout import Sharding, Way
from lightning_hetpipe.stage.site import COPY, SHARD, Answer, Realisation, Site, local, size_work


def pointwise(site: Site, own_randomness: bool = False) -> Answer:
    """Operands of the full size are cut alike; those that are broadcast over the channels stay whole."""
    y = site.result
    found: Sharding | None = None
    for index, _ in enumerate(site.inputs):
        x, sharding = site.value(index), site.sharding(index)
        if sharding is not None:
            dim = sharding.dim + y.ndim - x.ndim
            if y.shape[dim] == x.shape[sharding.dim] > 1 and found is None:
                found = Sharding(dim, sharding.bounds)
    forms = []
    for index, _ in enumerate(site.inputs):
        x, sharding = site.value(index), site.sharding(index)
        if found is None:
            return Answer(work=size_work(site))
        dim = found.dim - (y.ndim - x.ndim)
        if dim < 0 or x.shape[dim] == 1:
            forms.append(COPY)
        elif sharding == Sharding(dim, found.bounds):
            forms.append(SHARD)
        else:
            return Answer(work=size_work(site), note="its operands are cut differently")
    assert found is not None
    way = Way("local", tuple(forms), SHARD, shared=True)
    return Answer(found, [Realisation(way, own_randomness=own_randomness)], size_work(site))


def spatial(site: Site, own_randomness: bool = False) -> Answer:
    sharding = site.sharding()
    if (
        sharding is None
        or sharding.dim != 1
        or site.value().ndim < 3
        or site.result.ndim != site.value().ndim
    ):
        return Answer(work=size_work(site))
    return local(site, sharding, own_randomness=own_randomness)


def flatten(site: Site, start: int, end: int) -> Answer:
    """Channels that are the outermost flattened dimension stay contiguous: cuts are multiplied."""
    sharding, x = site.sharding(), site.value()
    start, end = start % x.ndim, end % x.ndim
    if sharding is None or (start < sharding.dim <= end and prod(x.shape[start : sharding.dim]) > 1):
        return Answer(work=0.0)
    if sharding.dim < start:
        return local(site, sharding)
    if sharding.dim > end:
        return local(site, Sharding(sharding.dim - (end - start), sharding.bounds))
    return local(site, sharding.scaled(prod(x.shape[sharding.dim + 1 : end + 1]), start))


def view(site: Site) -> Answer:
    """Only ``view(n, -1)``, which is a flatten."""
    x, y = site.value(), site.result
    last = site.node.args[-1]
    if isinstance(last, (tuple, list)):
        last = last[-1]
    if x.ndim >= 2 and y.ndim == 2 and y.shape[0] == x.shape[0] and last == -1:
        return flatten(site, 1, -1)
    return Answer(note="a reshape that mixes channels with other dimensions")


def reduction(site: Site) -> Answer:
    sharding, x = site.sharding(), site.value()
    dims = site.argument(1, "dim")
    if sharding is None or dims is None:
        return Answer(work=size_work(site))
    reduced = {d % x.ndim for d in (dims if isinstance(dims, (tuple, list)) else (dims,))}
    if sharding.dim in reduced:
        return Answer(work=size_work(site), note="reduces over the channels")
    kept = site.result.ndim == x.ndim
    dim = sharding.dim if kept else sharding.dim - sum(d < sharding.dim for d in reduced)
    found = local(site, Sharding(dim, sharding.bounds))
    found.work = 40.0 * x.numel()
    return found


def permute(site: Site) -> Answer:
    sharding, x = site.sharding(), site.value()
    if sharding is None:
        return Answer()
    if site.node.target in (torch.permute, "permute"):
        order: Any = site.argument(1, "dims") if site.node.target is torch.permute else site.node.args[1:]
        if len(order) == 1 and isinstance(order[0], (tuple, list)):
            order = order[0]
        dims = [d % x.ndim for d in order]
    else:
        dims = list(range(x.ndim))
        first, second = site.argument(1, "dim0") % x.ndim, site.argument(2, "dim1") % x.ndim
        dims[first], dims[second] = dims[second], dims[first]
    return local(site, Sharding(dims.index(sharding.dim), sharding.bounds))


def concat(site: Site) -> Answer:
    """Along the channels, shards would come out of order: the operands are gathered first."""
    first = site.sharding()
    dim = site.argument(1, "dim", 0) % site.value().ndim
    if first is None or any(site.sharding(i) != first for i in range(len(site.inputs))) or dim == first.dim:
        return Answer(work=size_work(site), note="joins channels, so that its operands are gathered")
    return local(site, first)


def over_dim(site: Site, dim: int | None) -> Answer:
    sharding = site.sharding()
    if sharding is None or dim is None or dim % site.value().ndim == sharding.dim:
        return Answer(work=size_work(site), note="couples the channels")
    return local(site, sharding)
