"""Tensors of which several ranks hold a part: joined, saved and loaded. (`partition` cuts them.)

join        each member's part ──►  the whole on every member
save        the first member has the whole, the others placeholders
load        each cuts its part from the whole
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetpipe.stage.consolidate import Placement
from lightning_hetpipe.strategy.partition import Group, OwnerMap, receive, send, slots

_Path = tuple[Any, ...]


def join(module: nn.Module, owners: OwnerMap, rank: int, group: Group) -> None:
    """Gives every member the whole tensors back, on the CPU; gradients are dropped.

    Collective over ``group``.
    """
    for name, tensor in _shared(module, owners, rank):
        shard = tensor.detach()
        parts = []
        for holder in owners.of(name):
            if holder == rank:
                for other in owners.of(name):
                    if other != rank:
                        send(shard, other, group)
                parts.append(shard.cpu())
            else:
                parts.append(_receive_part(owners, name, shard, holder, group))
        tensor.grad = None
        tensor.data = owners.shards[name].join(parts)  # no device may have room for it


def consolidate(
    checkpoint: dict[str, Any],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    owners: OwnerMap,
    rank: int,
    group: Group,
) -> dict[str, Any]:
    """A checkpoint with whole tensors on the first member of each group, placeholders on the others.

    Parameters, buffers and copies of them are known by their names, wherever a hook or a callback put
    them; optimizer state by the parameter, where it has its shape. Collective over ``group``.

    Args:
        checkpoint: What Lightning dumped on this rank; it is not changed.
        module: The LightningModule, cut.
        optimizers: Whose states the checkpoint has, in order.
    """
    held = {name: tensor.shape for name, tensor in _shared(module, owners, rank, aliases=True)}
    if not held:
        return checkpoint
    by_index = [_names_by_index(module, optimizer) for optimizer in optimizers]
    found = [
        (path, name, tensor)
        for path, tensor in _tensors(checkpoint)
        if (name := _name_of(path, held, by_index)) is not None and tensor.shape == held[name]
    ]
    for path, name, tensor in found:
        checkpoint = _with(checkpoint, path, _whole(tensor, owners, name, rank, group))
    return checkpoint


def cut_state(state: Mapping[str, Any], owners: OwnerMap, rank: int) -> Mapping[str, Any]:
    """A full state dict with this rank's part of what it shares."""
    mine = [name for name in owners.shards if name in state and rank in owners.of(name)]
    if not mine:
        return state
    changed: Any = copy.copy(state)
    for name in mine:
        changed[name] = _cut_if_whole(state[name], owners.shards[name], owners.of(name).index(rank))
    return changed  # type: ignore[no-any-return]


def cut_optimizer_state(
    state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer, owners: OwnerMap, rank: int
) -> Mapping[str, Any]:
    """A full optimizer state with this rank's part of what it shares."""
    saved = [index for group in state["param_groups"] for index in group["params"]]
    names = dict(zip(saved, _names_by_index(module, optimizer).values()))
    mine = {
        index: name
        for index, name in names.items()
        if name in owners.shards and rank in owners.of(name) and index in state["state"]
    }
    if not mine:
        return state
    held = {index: state["state"][index] for index in state["state"]}
    for index, name in mine.items():
        placement, member = owners.shards[name], owners.of(name).index(rank)
        held[index] = {key: _cut_if_whole(value, placement, member) for key, value in held[index].items()}
    return {**state, "state": held}


def _shared(
    module: nn.Module, owners: OwnerMap, rank: int, *, aliases: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds a part of; tied tensors once, or under each of their names."""
    for slot in slots(module):
        name = slot.names[0]
        if name in owners.shards and rank in owners.of(name):
            for each in slot.names if aliases else (name,):
                yield each, slot.tensor


def _whole(tensor: Tensor, owners: OwnerMap, name: str, rank: int, group: Group) -> Tensor:
    placement, (first, *others) = owners.shards[name], owners.of(name)
    if rank != first:
        send(tensor, first, group)
        shape = list(tensor.shape)
        shape[placement.dim] = placement.blocks * placement.sharding.bounds[-1]
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    parts = [tensor.detach().cpu()]
    parts += [_receive_part(owners, name, tensor, other, group) for other in others]
    return placement.join(parts)


def _receive_part(owners: OwnerMap, name: str, like: Tensor, source: int, group: Group) -> Tensor:
    placement = owners.shards[name]
    shape = list(like.shape)
    shape[placement.dim] = placement.length(owners.of(name).index(source))
    return receive(torch.empty(shape, dtype=like.dtype), source, group)


def _cut_if_whole(value: Any, placement: Placement, member: int) -> Any:
    size = placement.blocks * placement.sharding.bounds[-1]
    if isinstance(value, Tensor) and value.ndim > placement.dim and value.shape[placement.dim] == size:
        return placement.cut(value, member)
    return value


def _names_by_index(module: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: names.get(parameter, "") for index, parameter in enumerate(parameters)}


def _name_of(path: _Path, held: Mapping[str, Any], by_index: Sequence[Mapping[int, str]]) -> str | None:
    if path[0] == "optimizer_states":
        name = by_index[path[1]].get(path[3], "") if path[2:3] == ("state",) else ""
        return name if name in held else None
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    return next((name for name in held if key == name or key.endswith(f".{name}")), None)


def _tensors(node: Any, path: _Path = ()) -> Iterator[tuple[_Path, Tensor]]:
    if isinstance(node, Tensor):
        yield path, node
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _tensors(child, (*path, key))
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _tensors(child, (*path, index))


def _with(node: Any, path: _Path, value: Tensor) -> Any:
    """The node with the value at the path, in new containers along it."""
    if not path:
        return value
    child = _with(node[path[0]], path[1:], value)
    if isinstance(node, tuple):
        return (*node[: path[0]], child, *node[path[0] + 1 :])
    changed = copy.copy(node)
    changed[path[0]] = child
    return changed
