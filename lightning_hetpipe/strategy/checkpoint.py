"""One ordinary Lightning checkpoint out of what the ranks hold, and back into any other partition.

    rank 0's dict                        rank 2's dict
      state_dict                           state_dict
        net.0.weight   values                net.0.weight   placeholder
        net.4.weight   placeholder  ◄──────  net.4.weight   values
      optimizer_states                     optimizer_states
        0 . state . 0  {exp_avg}             0 . state . 8  {exp_avg}
        0 . state . 8  absent       ◄────── ┘

A tensor is named by its path in the dict, so whatever a hook or a callback adds (the averaged model of an
EMA) is merged too. Tensors travel one by one; only rank 0 ever holds the whole checkpoint.
"""

import logging
import os
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetpipe.errors import CheckpointError, RankFailedError, UnsupportedError
from lightning_hetpipe.strategy.partition import Group, only_held, receive, send

log = logging.getLogger(__name__)

RNG_KEY = "hetpipe_rng"  # the one key that a checkpoint has beyond Lightning's own

_Path = tuple[Any, ...]


def save_checkpoint(
    checkpoint: dict[str, Any],
    path: str | Path,
    *,
    io: Any,
    rank: int,
    group: Group,
    interrupted: bool = False,
    storage_options: Any = None,
) -> None:
    """Merges the ranks' checkpoints and lets rank 0 write the file.

    Args:
        checkpoint: What Lightning dumped on this rank; rank 0's is filled in place.
        path: Where to write; only rank 0's matters.
        io: A ``CheckpointIO``; `AtomicCheckpointIO` unless the user chose another.
        rank: This process's rank in ``group``.
        group: A CPU (gloo) group; collective over it.
        interrupted: The run is ending by an exception, so the other ranks may be gone: nothing is
            written, because this rank holds only its part, and the last complete file stays.
        storage_options: Passed to ``io``.

    Raises:
        UnsupportedError: Nobody holds values for a tensor of rank 0's checkpoint.
        RankFailedError: Rank 0 could not write the file (rank 0 raises the cause itself).
    """
    if interrupted and group is not None:
        log.warning("not writing %s: the run was interrupted, and no rank holds the whole model", path)
        return
    merged = merge(checkpoint, rank, group)
    failure: list[str | None] = [None]
    try:
        if merged is not None:
            io.save_checkpoint(merged, path, storage_options=storage_options)
    except BaseException as error:
        failure = [f"{type(error).__name__}: {error}"]
        raise
    finally:
        if group is not None:
            dist.broadcast_object_list(failure, group=group, group_src=0)
    if failure[0] is not None:
        raise RankFailedError(f"rank 0 could not write the checkpoint {path}: {failure[0]}")


def merge(checkpoint: dict[str, Any], rank: int, group: Group) -> dict[str, Any] | None:
    """Fills rank 0's checkpoint with what the other ranks hold; None on the other ranks.

    Structure is rank 0's: the others contribute values for its placeholders, states of parameters that
    are not in rank 0's optimizers, and their random-number states.
    """
    if group is None:
        checkpoint[RNG_KEY] = [rng_state()]
        return checkpoint
    own_share = ([_as_placeholders(each.get("state", {})) for each in _optimizers(checkpoint)], rng_state())
    shares: list[Any] | None = [None] * dist.get_world_size(group) if rank == 0 else None
    dist.gather_object(own_share, shares, group=group, group_dst=0)
    wanted: dict[_Path, Tensor] = {}
    twins: dict[_Path, list[_Path]] = {}
    if shares is not None:
        checkpoint[RNG_KEY] = [rng for _, rng in shares]
        for states, _ in shares[1:]:
            for mine, theirs in zip(_optimizers(checkpoint), states, strict=True):
                mine["state"] = dict(sorted((theirs | mine.get("state", {})).items()))
        wanted, twins = _placeholders(checkpoint)
    specs: list[Any] = [[(path, tuple(each.shape), each.dtype) for path, each in wanted.items()]]
    dist.broadcast_object_list(specs, group=group, group_src=0)
    own = dict(_tensors(checkpoint))
    holds = [int(_fits(own.get(path), shape, dtype)) for path, shape, dtype in specs[0]]
    everyone = [torch.empty(len(holds), dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, torch.tensor(holds, dtype=torch.uint8), group=group)
    holders = [column.nonzero().flatten().tolist() for column in torch.stack(everyone, dim=1)]
    for (path, shape, _), ranks in zip(specs[0], holders, strict=True):
        if not ranks:
            raise UnsupportedError(
                f"no rank holds values for {'.'.join(map(str, path))} {list(shape)} of the checkpoint: an "
                "`on_save_checkpoint` hook must treat every entry of the state dict alike on all ranks"
            )
    for (path, _, _), ranks in zip(specs[0], holders, strict=True):
        if rank == ranks[0]:
            send(own[path], 0, group)
        elif rank == 0:
            value = receive(wanted[path], ranks[0], group)
            for place in (path, *twins[path]):
                _replace(checkpoint, place, value)
    return checkpoint if rank == 0 else None


def _optimizers(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = checkpoint.get("optimizer_states", [])
    return states


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        yield from node.items()
    elif isinstance(node, list | tuple):
        yield from enumerate(node)


def _tensors(node: Any, path: _Path = ()) -> Iterator[tuple[_Path, Tensor]]:
    if isinstance(node, Tensor):
        yield path, node
    for key, child in _children(node):
        yield from _tensors(child, (*path, key))


def _as_placeholders(node: Any) -> Any:
    """The same dicts with every tensor replaced by its placeholder."""
    if isinstance(node, Tensor):
        return torch.empty_like(node, device="meta", requires_grad=False)
    if isinstance(node, dict):
        return {key: _as_placeholders(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        children = [_as_placeholders(child) for child in node]
        return children if isinstance(node, list) else tuple(children)
    return node


def _placeholders(checkpoint: dict[str, Any]) -> tuple[dict[_Path, Tensor], dict[_Path, list[_Path]]]:
    """Placeholders by path, and for each the other paths of the same tensor (tied weights)."""
    wanted: dict[_Path, Tensor] = {}
    twins: dict[_Path, list[_Path]] = {}
    first: dict[Any, _Path] = {}
    for path, tensor in _tensors(checkpoint):
        if tensor.is_meta:
            identity = (
                tensor.untyped_storage()._cdata,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )
            if identity in first:
                twins[first[identity]].append(path)
            else:
                first[identity], wanted[path], twins[path] = path, tensor, []
    return wanted, twins


def _fits(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return (
        tensor is not None and not tensor.is_meta and tuple(tensor.shape) == shape and tensor.dtype == dtype
    )


def _replace(node: Any, path: _Path, value: Tensor) -> Any:
    """The node with the value at the path; a tuple is built anew, everything else changes in place."""
    if not path:
        return value
    child = _replace(node[path[0]], path[1:], value)
    if isinstance(node, tuple):
        return (*node[: path[0]], child, *node[path[0] + 1 :])
    node[path[0]] = child
    return node


def load_model_state(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Loads a full state dict into what this rank holds; every rank checks the names of the whole.

    Raises:
        RuntimeError: As ``load_state_dict`` does: missing or unexpected names, or other shapes; a
            CheckpointError where they are those of another rank's part.
    """
    own = module.state_dict()
    elsewhere = {name: each for name, each in own.items() if isinstance(each, Tensor) and each.is_meta}
    missing = [name for name in elsewhere if name not in state]
    other = [name for name in elsewhere if name in state and state[name].shape != elsewhere[name].shape]
    if (missing and strict) or other:
        raise CheckpointError(
            f"Error(s) in loading state_dict for {type(module).__name__}: missing {missing}, "
            f"other shapes {other}. The checkpoint is of another model."
        )
    local = OrderedDict((name, value) for name, value in state.items() if name not in elsewhere)
    # Without it, modules take the state for one of an old version and add to it what is hidden here.
    local._metadata = getattr(state, "_metadata", own._metadata)  # type: ignore[attr-defined]
    with only_held(module):
        module.load_state_dict(local, strict=strict)


def forget_placeholders(optimizer: Optimizer) -> None:
    """Drops state that an optimizer (Adagrad) made for parameters that live elsewhere."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.is_meta:
                optimizer.state.pop(parameter, None)


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of what this rank holds, under the indices of the whole model."""
    forget_placeholders(optimizer)
    return optimizer.state_dict()


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads the part of a full optimizer state that belongs to this rank's parameters.

    Raises:
        CheckpointError: The groups differ, or a state's shape cannot belong to its parameter.
    """
    sizes = [len(group["params"]) for group in state["param_groups"]]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own_sizes:
        raise CheckpointError(
            f"the checkpoint's optimizer has parameter groups of {sizes} parameters, this one of "
            f"{own_sizes}: configure the optimizer as it was when the checkpoint was written"
        )
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    local = {}
    for index, parameter in zip(indices, parameters, strict=True):
        if index not in state["state"]:
            continue
        for name, value in state["state"][index].items():
            if isinstance(value, Tensor) and not _may_belong(value, parameter):
                raise CheckpointError(
                    f"{name} of parameter {index} has shape {list(value.shape)} in the checkpoint, but the "
                    f"parameter has {list(parameter.shape)}: the checkpoint is of another model"
                )
        if not parameter.is_meta:
            local[index] = state["state"][index]
    optimizer.load_state_dict({**state, "state": local})


def _may_belong(value: Tensor, parameter: Tensor) -> bool:
    """Elementwise state has the parameter's shape; factored state (Adafactor) has some sizes of 1."""
    return value.ndim != parameter.ndim or all(
        size in (1, own) for size, own in zip(value.shape, parameter.shape, strict=True)
    )


def rng_state() -> dict[str, Any]:
    """This process's random-number states as plain values that ``weights_only`` loading accepts."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(checkpoint: Mapping[str, Any], rank: int, world: int) -> None:
    """Takes up the random numbers where the checkpoint was written.

    Rank 0, which reads the data, always does; the others do when there are as many ranks as then.
    """
    states = checkpoint.get(RNG_KEY)
    if states is None or (rank > 0 and len(states) != world):
        return
    state = states[rank]
    torch.set_rng_state(state["torch"].cpu())
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames, so a kill at any moment leaves the old file or the new one."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        partial = target.with_name(f".{target.name}.part")
        super().save_checkpoint(checkpoint, partial, storage_options)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
