"""Every rank keeps its own tensors of the module; the others become placeholders, and come back.

    as built on rank 0          rank 0         rank 1         rank 2
       a b c d e     partition  a . . . e      . b c . .      . . . d .
                     gather     a b c d e      a b c d e      a b c d e

A placeholder is a ``meta`` tensor of the same shape and dtype that takes no memory. The module tree, the
names, the order of parameters and their aliasing (tied weights) stay, so optimizer indices, parameter
counts and state-dict keys are those of the whole model. Tensors travel one by one over a CPU group.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torchmetrics import Metric

from lightning_hetpipe.errors import PlanError, UnsupportedError
from lightning_hetpipe.stage.consolidate import Placement

Group = dist.ProcessGroup | None  # None: this process is alone


@dataclass(frozen=True)
class OwnerMap:
    """Which ranks of the pipeline's group hold each parameter and buffer of a module.

    Attributes:
        ranks: By fully qualified name; the canonical owner, whose value counts, comes first. A tensor
            that is not named belongs to rank 0.
        shards: Of which tensors each owner holds its part only, and where the parts lie; the owners are
            in order of the parts.
    """

    ranks: Mapping[str, tuple[int, ...]]
    shards: Mapping[str, Placement] = field(default_factory=dict)

    def of(self, name: str) -> tuple[int, ...]:
        return self.ranks.get(name, (0,))

    @classmethod
    def of_stages(
        cls,
        module: nn.Module,
        pipelined: str,
        holders: Iterable[tuple[Iterable[str], tuple[int, ...]]],
        placements: Mapping[str, Placement] | None = None,
    ) -> "OwnerMap":
        """The owners that stages imply.

        Args:
            module: The whole LightningModule, before it is partitioned.
            pipelined: Name of the pipelined submodule in it; "" when that is the module itself.
            holders: For each stage the names, relative to the pipelined submodule, of the parameters and
                buffers it uses (one name of a tied tensor is enough), and the ranks that hold the stage.
            placements: Likewise, the tensors of which the ranks of one stage hold a part each.

        Returns:
            An owner for every tensor: tied ones belong to all their stages' ranks, in order of stages; a
            tensor that is also registered outside the pipelined submodule, or that no stage uses, to rank 0.
        """
        prefix = f"{pipelined}." if pipelined else ""
        ranks_of_name: dict[str, list[int]] = {}
        for names, ranks in holders:
            for name in names:
                ranks_of_name.setdefault(prefix + name, []).extend(ranks)
        owners: dict[str, tuple[int, ...]] = {}
        shards: dict[str, Placement] = {}
        cuts = {prefix + name: placement for name, placement in (placements or {}).items()}
        for slot in slots(module):
            using = [rank for name in slot.names for rank in ranks_of_name.get(name, ())]
            if not using or not all(name.startswith(prefix) for name in slot.names):
                using.append(0)
            owners |= dict.fromkeys(slot.names, tuple(dict.fromkeys(using)))
            placement = next((cuts[name] for name in slot.names if name in cuts), None)
            if placement is not None:
                shards |= dict.fromkeys(slot.names, placement)
        return cls(owners, shards)


@dataclass(frozen=True)
class Slot:
    """One tensor and every place of the module tree at which it is registered."""

    tensor: Tensor
    names: list[str]
    places: list[tuple[nn.Module, str]]

    def put(self, tensor: Tensor) -> None:
        for module, key in self.places:
            setattr(module, key, tensor)  # not into the dict: recurrent layers keep a second list


def slots(module: nn.Module) -> list[Slot]:
    """Parameters and buffers in the order of the tree; torchmetrics metrics stay whole on every rank."""
    found: dict[int, Slot] = {}
    for prefix, child in _walk(module, ""):
        for key, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is None:
                continue
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                raise UnsupportedError(
                    f"{prefix}{key} is a lazy parameter that has no shape yet: run one batch through the "
                    "model before it is given to the Trainer"
                )
            slot = found.setdefault(id(tensor), Slot(tensor, [], []))
            slot.names.append(prefix + key)
            if (child, key) not in slot.places:
                slot.places.append((child, key))
    return list(found.values())


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, Metric):
        return
    yield prefix, module
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{key}.")


def partition(
    module: nn.Module, owners: OwnerMap, rank: int, group: Group, device: torch.device | None = None
) -> None:
    """Leaves each tensor, or each part of one, with its owners only, valued as on rank 0.

    Rank 0's value wins where rank 0 holds one, so models that ranks built with different random numbers
    become the one of rank 0. Otherwise the tensor comes from a rank that holds it: partitioning again, by
    the same or another map, moves what has to move. Owned parameters stay the same objects; create
    optimizers afterwards. Of a tensor that several ranks hold a part of, only the rank it comes from has
    the whole meanwhile.

    Args:
        module: The same module tree on every rank.
        owners: Ranks of ``group`` that hold each tensor.
        rank: This process's rank in ``group``.
        group: A CPU (gloo) group; collective over it.
        device: Where owned tensors go; None leaves them where they are.

    Raises:
        PlanError: The ranks built different modules, a tensor's owner is not in the group, or no rank
            holds a tensor.
    """
    found = slots(module)
    held = _held_by_rank(found, group)
    for slot, holds in zip(found, held, strict=True):
        targets = owners.of(slot.names[0])
        if max(targets) >= len(holds):
            raise PlanError(f"{slot.names[0]} belongs to ranks {targets}, but there are {len(holds)} ranks")
        source = _source(slot, holds, targets)
        if slot.names[0] in owners.shards:
            _deal(slot, owners.shards[slot.names[0]], source, targets, rank, group, device)
            continue
        moves = [target for target in targets if target != source and (holds[0] or not holds[target])]
        value = _move(slot.tensor, source, moves, rank, group)
        if rank not in targets:
            _let_go(slot)
            continue
        if slot.tensor.is_meta:
            slot.put(_renew(slot.tensor, value))
        elif rank in moves:
            slot.tensor.data.copy_(value)
        if device is not None:
            owned = getattr(*slot.places[0])
            owned.data = owned.data.to(device)
    module._apply = MethodType(_apply_to_held, module)  # type: ignore[method-assign]


def _deal(
    slot: Slot,
    placement: Placement,
    source: int,
    targets: tuple[int, ...],
    rank: int,
    group: Group,
    device: torch.device | None,
) -> None:
    """Hands each member its part of the whole that the source has."""
    part: Tensor | None = None
    for member, target in enumerate(targets):
        if rank == source == target:
            part = placement.cut(slot.tensor.detach(), member)
        elif rank == source:
            send(placement.cut(slot.tensor.detach(), member), target, group)
        elif rank == target:
            shape = list(slot.tensor.shape)
            shape[placement.dim] = placement.length(member)
            part = receive(torch.empty(shape, dtype=slot.tensor.dtype, device="meta"), source, group)
    if part is None:
        _let_go(slot)
        return
    if slot.tensor.is_meta:
        slot.put(_renew(slot.tensor, part if device is None else part.to(device)))
    else:
        slot.tensor.data = part.to(device or slot.tensor.device)


def _let_go(slot: Slot) -> None:
    """Leaves a placeholder."""
    if not slot.tensor.is_meta:
        slot.put(_renew(slot.tensor, torch.empty_like(slot.tensor, device="meta")))


def gather(module: nn.Module, owners: OwnerMap, rank: int, group: Group) -> None:
    """Brings every tensor back on every rank, each from its canonical owner.

    What was a placeholder lies on the CPU afterwards; what was held stays where it is. Collective over
    ``group``: never call it while another rank may have failed.
    """
    found = slots(module)
    held = _held_by_rank(found, group)
    for slot, holds in zip(found, held, strict=True):
        source = next(
            (owner for owner in owners.of(slot.names[0]) if holds[owner]),
            _source(slot, holds, range(len(holds))),
        )
        moves = [target for target, holds_it in enumerate(holds) if not holds_it]
        value = _move(slot.tensor, source, moves, rank, group)
        if rank in moves:
            slot.put(_renew(slot.tensor, value))
    if all(not slot.tensor.is_meta for slot in slots(module)):
        vars(module).pop("_apply", None)


def copies_of(module: nn.Module, holders: Iterable[object]) -> Iterator[nn.Module]:
    """Copies of the module that callbacks keep as attributes, such as the averaged model of an EMA.

    They are partitioned and gathered by the module's own owner map.
    """
    seen = {id(module)}
    for holder in holders:
        for value in vars(holder).values():
            for part in value.modules() if isinstance(value, nn.Module) else ():
                if type(part) is type(module) and id(part) not in seen:
                    seen.add(id(part))
                    yield part


def borrowed_parameters(module: nn.Module, owners: OwnerMap, rank: int) -> set[nn.Parameter]:
    """Parameters that this rank holds whole but that their canonical owner, another rank, counts in norms."""
    return {
        slot.tensor
        for slot in slots(module)
        if isinstance(slot.tensor, nn.Parameter)
        and not slot.tensor.is_meta
        and owners.of(slot.names[0])[0] != rank
        and slot.names[0] not in owners.shards
    }


@contextmanager
def only_held(module: nn.Module) -> Iterator[None]:
    """Hides the placeholders from everything that walks the module's parameters and buffers."""
    hidden = [
        (store, key, tensor)
        for child in module.modules()
        for store in (child._parameters, child._buffers)
        for key, tensor in store.items()
        if tensor is not None and tensor.is_meta
    ]
    for store, key, _ in hidden:
        store[key] = None
    try:
        yield
    finally:
        for store, key, tensor in hidden:
            store[key] = tensor  # type: ignore[assignment]
        for child in module.modules():
            if isinstance(child, nn.RNNBase):
                child._init_flat_weights()  # it keeps a second list of its weights


def _apply_to_held(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` (behind ``.to``, ``.cpu``, ``.float``) that passes over the placeholders."""
    with only_held(module):
        type(module)._apply(module, fn, recurse)  # type: ignore[no-untyped-call]
    return module


def _held_by_rank(found: list[Slot], group: Group) -> list[list[bool]]:
    """For each slot, whether each rank holds it; all ranks must have the same slots."""
    own = torch.tensor([not slot.tensor.is_meta for slot in found], dtype=torch.uint8)
    if group is None:
        return [[bool(held)] for held in own]
    listing = [(slot.names[0], tuple(slot.tensor.shape), str(slot.tensor.dtype)) for slot in found]
    digest = torch.frombuffer(bytearray(hashlib.sha256(repr(listing).encode()).digest()), dtype=torch.uint8)
    digests = _all_gather(digest, group)
    if any(not torch.equal(other, digest) for other in digests):
        listings: list[Any] = [None] * len(digests)
        dist.all_gather_object(listings, listing, group=group)
        raise PlanError(_first_difference(listings))
    return [[bool(held) for held in column] for column in torch.stack(_all_gather(own, group), dim=1)]


def _first_difference(listings: list[list[tuple[str, tuple[int, ...], str]]]) -> str:
    rank, other = next((rank, each) for rank, each in enumerate(listings) if each != listings[0])
    ours = next((each for each in listings[0] if each not in other), None)
    theirs = next((each for each in other if each not in listings[0]), None)
    return (
        f"rank 0 and rank {rank} built different modules (rank 0: {ours}, rank {rank}: {theirs}): "
        "every rank must build the same model"
    )


def _all_gather(own: Tensor, group: Group) -> list[Tensor]:
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return everyone


def _source(slot: Slot, holds: list[bool], preferred: Iterable[int]) -> int:
    if True not in holds:
        raise PlanError(
            f"{slot.names[0]} is on the meta device on every rank: give it values in `configure_model` or "
            "earlier"
        )
    return next((rank for rank in (0, *preferred) if holds[rank]), holds.index(True))


def _renew(old: Tensor, value: Tensor) -> Tensor:
    """A tensor of the same kind as the old one, with its flags and attributes, and the new value."""
    if not isinstance(old, nn.Parameter):
        return value
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    return new


def _move(tensor: Tensor, source: int, targets: list[int], rank: int, group: Group) -> Tensor:
    """Sends the tensor to the targets; a target gets its own new CPU tensor back, others what they gave."""
    if rank == source:
        for target in targets:
            send(tensor, target, group)
    elif rank in targets:
        return receive(tensor, source, group)
    return tensor


def send(tensor: Tensor, target: int, group: Group) -> None:
    """Sends the tensor's bytes to a rank of the group, from wherever the tensor lies."""
    if tensor.numel():
        dist.send(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8), group=group, group_dst=target
        )


def receive(like: Tensor, source: int, group: Group) -> Tensor:
    """A new CPU tensor with the shape, dtype and strides of the given one and the sender's values."""
    value = torch.empty(like.shape, dtype=like.dtype)
    if value.numel():
        dist.recv(value.reshape(-1).view(torch.uint8), group=group, group_src=source)
    return value if like.is_contiguous() else torch.empty_like(like, device="cpu").copy_(value)
