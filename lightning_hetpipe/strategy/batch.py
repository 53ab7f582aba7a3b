"""Cuts a batch into micro-batches, and joins what came of them.

A batch is any nest of lists, tuples, mappings and dataclasses. Its number of samples ``n`` is the
first dimension of its first tensor; whatever else has ``n`` rows is cut with it, the rest is repeated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.errors import StepError


def count_samples(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first tensor that has one.

    Raises:
        StepError: There is no such tensor.
    """
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise StepError(
        f"the batch is {_describe(batch)} and holds no tensor with a first dimension, so it cannot be cut "
        "into micro-batches. Collate samples into tensors, in lists, tuples, mappings or dataclasses."
    )


def cut(batch: Any, n_samples: int, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop - 1`` of a batch of ``n_samples``, in the batch's own structure."""
    if (start, stop) == (0, n_samples):
        return batch
    if isinstance(batch, Tensor):
        return batch[start:stop] if _has_rows(batch, n_samples) else batch
    if isinstance(batch, Mapping):
        cut_items = {key: cut(value, n_samples, start, stop) for key, value in batch.items()}
        return cut_items if type(batch) is dict else _rebuild_mapping(batch, cut_items)
    if is_dataclass(batch) and not isinstance(batch, type):
        changes = {
            field.name: cut(getattr(batch, field.name), n_samples, start, stop)
            for field in fields(batch)
            if field.init
        }
        return replace(batch, **changes)
    if isinstance(batch, (list, tuple)):
        if _is_per_sample(batch, n_samples):
            return batch[start:stop]
        parts = [cut(value, n_samples, start, stop) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if hasattr(batch, "shape") and getattr(batch, "ndim", None) and batch.shape[0] == n_samples:
        return batch[start:stop]
    return batch


def join(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One value from those of all micro-batches.

    Tensors with one row per sample are concatenated, other numbers averaged by weight; where
    neither makes sense the last one stands.

    Args:
        parts: Values of equal structure, one per micro-batch.
        sizes: Samples of each micro-batch.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        if all(part.ndim and part.shape[0] == size for part, size in zip(parts, sizes)):
            return torch.cat(tuple(parts))
        return _mean(parts, sizes)
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(part * size for part, size in zip(parts, sizes)) / sum(sizes)
    if isinstance(first, Mapping):
        items = {key: join([part[key] for part in parts], sizes) for key in first}
        return items if type(first) is dict else _rebuild_mapping(first, items)
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        return replace(first, **{n: join([getattr(part, n) for part in parts], sizes) for n in names})
    if isinstance(first, (list, tuple)):
        if all(len(part) == size for part, size in zip(parts, sizes)) and not _holds_tensors(first):
            return type(first)(value for part in parts for value in part)
        joined = [join(values, sizes) for values in zip(*parts)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return parts[-1]


def _mean(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    if len({part.shape for part in parts}) > 1 or not (parts[0].is_floating_point() or parts[0].ndim == 0):
        return parts[-1]
    total = sum(sizes)
    return torch.stack([part * (size / total) for part, size in zip(parts, sizes)]).sum(0)


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _leaves(getattr(batch, field.name))
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)
    else:
        yield batch


def _has_rows(value: Any, n_samples: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == n_samples


def _is_per_sample(values: Sequence[Any], n_samples: int) -> bool:
    """True for a list with one entry per sample, such as captions or boxes of each image."""
    return (
        len(values) == n_samples
        and not hasattr(values, "_fields")
        and not any(_has_rows(leaf, n_samples) for leaf in _leaves(values))
    )


def _holds_tensors(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in _leaves(values))


def _rebuild_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    kind: Any = type(like)
    default_factory = getattr(like, "default_factory", None)
    return kind(default_factory, items) if default_factory else kind(items)


def _describe(batch: Any) -> str:
    return "None" if batch is None else f"of type {type(batch).__name__}"
