"""A checkpoint as a directory into which every rank writes what it holds.

    big.ckpt/  __0_0.distcp  __1_0.distcp  ...   tensors, each from a rank that holds it
               .metadata                         where each tensor lies
               meta.pt                           everything else, by rank 0

The layout is that of Lightning's own sharded strategies: ``model``, ``optimizer_0``, ... by
torch.distributed.checkpoint, so ``python -m lightning.pytorch.utilities.consolidate_checkpoint`` makes a
file with ordinary weights of it; `consolidate` keeps the optimizer state too. Ranks on several machines
need one shared file system.
"""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_hetpipe.strategy.checkpoint import RNG_KEY, AtomicCheckpointIO, rng_state
from lightning_hetpipe.strategy.partition import Group

_META = "meta.pt"


def is_sharded(path: str | Path) -> bool:
    return (Path(path) / _META).is_file()


def save_sharded(
    checkpoint: Mapping[str, Any], path: str | Path, *, rank: int, group: Group, interrupted: bool = False
) -> None:
    """Writes the directory beside the target and renames it; collective over ``group``.

    Args:
        checkpoint: What Lightning dumped on this rank.
        path: The directory; a former one of that name is replaced once the new one is whole.
        rank: This process's rank in ``group``.
        group: A CPU (gloo) group; None when this process is alone.
        interrupted: The other ranks may be gone: nothing is written.
    """
    if interrupted and group is not None:
        return
    target = Path(path)
    partial = target.with_name(f".{target.name}.part")
    if rank == 0 and partial.exists():
        shutil.rmtree(partial)
    states: list[Any] = [rng_state()]
    shared = {key for key, value in checkpoint.items() if any(each.is_meta for each in _leaves(value))}
    if group is not None:
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (rng_state(), shared), group=group)
        states = [rng for rng, _ in everyone]
        shared = {key for _, keys in everyone for key in keys}
    named = {key: key for key in shared if key != "optimizer_states"} | {"state_dict": "model"}
    tensors = {name: _held(checkpoint[key]) for key, name in named.items()}
    for index, state in enumerate(checkpoint.get("optimizer_states", ())):
        tensors[f"optimizer_{index}"] = _held(state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        save(tensors, checkpoint_id=partial, process_group=group, no_dist=group is None)
    if rank == 0:
        rest = {
            key: each for key, each in checkpoint.items() if key not in named and key != "optimizer_states"
        }
        torch.save({**rest, RNG_KEY: states}, partial / _META)
        former = target.with_name(f".{target.name}.old")
        if target.exists():
            shutil.rmtree(former, ignore_errors=True)
            target.rename(former)
        partial.rename(target)
        shutil.rmtree(former, ignore_errors=True)
    if group is not None:
        dist.barrier(group)


def load_sharded(path: str | Path) -> dict[str, Any]:
    """The checkpoint in Lightning's ordinary form, on the CPU; no collective.

    Optimizer state stays on disk: it is read parameter by parameter when `load_optimizer_state` asks.
    """
    folder = Path(path)
    checkpoint: dict[str, Any] = torch.load(folder / _META, map_location="cpu", weights_only=True)
    names = {name.split(".")[0] for name in FileSystemReader(folder).read_metadata().state_dict_metadata}
    optimizers = sorted(
        (name for name in names if name.startswith("optimizer_")), key=lambda name: int(name[10:])
    )
    others = names - set(optimizers)
    checkpoint |= _read(folder, others)
    checkpoint["state_dict"] = checkpoint.pop("model")
    if optimizers:
        checkpoint["optimizer_states"] = [
            {"state": StateOnDisk(folder, name), **_read(folder, {f"{name}.param_groups"})[name]}
            for name in optimizers
        ]
    return checkpoint


def consolidate(folder: str | Path, file: str | Path) -> None:
    """Makes an ordinary Lightning checkpoint file of a directory; the whole must fit into memory."""
    checkpoint = load_sharded(folder)
    for state in checkpoint.get("optimizer_states", ()):
        state["state"] = dict(state["state"])
    AtomicCheckpointIO().save_checkpoint(checkpoint, file)


class StateOnDisk(Mapping[int, dict[str, Any]]):
    """One optimizer's state by parameter index, each read when asked for."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        prefix = f"{name}.state."
        keys = FileSystemReader(folder).read_metadata().state_dict_metadata
        self._indices = sorted(
            {int(key[len(prefix) :].split(".")[0]) for key in keys if key.startswith(prefix)}
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index not in self._indices:
            raise KeyError(index)
        found = _read(self._folder, {f"{self._name}.state.{index}"})[self._name]["state"]
        state: dict[str, Any] = found[str(index)]  # torch.distributed.checkpoint makes names of all keys
        return state

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def _read(folder: Path, keys: set[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(keys=keys),  # type: ignore[no-untyped-call]
        no_dist=True,
    )
    return state


def _leaves(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    for child in children:
        yield from _leaves(child)


def _held(node: Any) -> Any:
    """The same dicts without their placeholders."""
    if isinstance(node, Mapping):
        return {
            key: _held(child)
            for key, child in node.items()
            if not (isinstance(child, Tensor) and child.is_meta)
        }
    return node
