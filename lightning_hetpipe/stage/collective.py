"""Communication that autograd can differentiate, over groups whose members hold unequal parts.

A tensor of a group has one of four forms. Value and gradient are treated alike, and the adjoint
of every function below swaps the two columns:

    form         value on each member      gradient on each member
    replicated   the whole                 the whole
    copied       the whole                 one term of the sum
    partial      one term of the sum       the whole
    sharded      its interval of `dim`     its interval of `dim`

Intervals are given by ``bounds``: member ``i`` holds ``bounds[i]`` to ``bounds[i + 1]`` of ``dim``;
empty intervals are allowed. Every member of the group calls the same functions in the same order.
Nothing is padded. Large gathers are one broadcast per shard, small ones a single all-to-all.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.stage.layout import SMALL_BYTES
from lightning_hetpipe.stage.members import Members

Bounds = tuple[int, ...]


def copy_to_group(x: Tensor, group: Members) -> Tensor:
    """Replicated to copied: the value as it is; its gradient is summed over the members."""
    return _call(_Copy, x, group)


def sum_over_group(x: Tensor, group: Members) -> Tensor:
    """Partial to replicated: the value is summed over the members; its gradient as it is."""
    return _call(_Sum, x, group)


def gather_channels(x: Tensor, bounds: Bounds, dim: int, group: Members) -> Tensor:
    """Sharded to copied: every member gets the whole; the gradients are summed and cut."""
    return _call(_Gather, x, bounds, dim, group)


def gather_replicated(x: Tensor, bounds: Bounds, dim: int, group: Members) -> Tensor:
    """Sharded to replicated: every member gets the whole; each keeps its interval of the gradient."""
    return _call(_GatherReplicated, x, bounds, dim, group)


def scatter_sum(x: Tensor, bounds: Bounds, dim: int, group: Members) -> Tensor:
    """Partial to sharded: the terms are summed and cut; the gradient is gathered."""
    return _call(_ScatterSum, x, bounds, dim, group)


def slice_replicated(x: Tensor, bounds: Bounds, dim: int, group: Members) -> Tensor:
    """Replicated to sharded: each member keeps its interval; the gradient is gathered."""
    return _call(_Slice, x, bounds, dim, group)


def slice_copied(x: Tensor, bounds: Bounds, dim: int, group: Members) -> Tensor:
    """Copied to sharded: each member keeps its interval; its term of the gradient is zero elsewhere."""
    return _interval(x, bounds, dim, group.rank())


def replicate_copied(x: Tensor, group: Members) -> Tensor:
    """Copied to replicated: the first member's gradient is the sum's only term."""
    return _call(_Once, x, group.rank() == 0)


def all_gather(x: Tensor, bounds: Bounds, dim: int, group: Members) -> Tensor:
    """The whole tensor from everyone's interval; no gradient."""
    lengths = [stop - start for start, stop in pairwise(bounds)]
    rank = group.rank()
    assert x.shape[dim] == lengths[rank], (
        f"member {rank} holds {tuple(x.shape)}, not {lengths[rank]} of {dim}"
    )
    shape = list(x.shape)
    shape[dim] = bounds[-1]
    row = torch.Size(_with(x.shape, dim, 1)).numel()
    sizes = [row * length for length in lengths]
    flat = x.new_empty(sum(sizes))
    parts = torch.split(flat, sizes)
    mine = x.contiguous().view(-1)
    if flat.numel() * flat.element_size() <= SMALL_BYTES:
        group.alltoall_base(flat, mine.repeat(len(sizes)), sizes, [mine.numel()] * len(sizes)).wait()
    else:
        parts[rank].copy_(mine)
        works = [group.broadcast(part, i) for i, part in enumerate(parts) if part.numel()]
        for work in works:
            work.wait()
    if torch.Size(x.shape[: dim % x.ndim]).numel() == 1:
        return flat.view(shape)
    return torch.cat([part.view(_with(shape, dim, n)) for part, n in zip(parts, lengths)], dim)


def reduce_scatter(x: Tensor, bounds: Bounds, dim: int, group: Members) -> Tensor:
    """This member's interval of the sum over the members; no gradient."""
    rank = group.rank()
    pieces = [_interval(x, bounds, dim, i) for i in range(len(bounds) - 1)]
    sizes = [piece.numel() for piece in pieces]
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    received = x.new_empty(len(sizes) * sizes[rank])
    group.alltoall_base(received, sent, [sizes[rank]] * len(sizes), sizes).wait()
    return received.view(len(sizes), *pieces[rank].shape).sum(0)


def all_reduce(x: Tensor, group: Members) -> Tensor:
    """The sum over the members, in a new tensor; no gradient."""
    total = x.clone(memory_format=torch.contiguous_format)
    group.allreduce([total]).wait()
    return total


def _interval(x: Tensor, bounds: Bounds, dim: int, member: int) -> Tensor:
    return x.narrow(dim, bounds[member], bounds[member + 1] - bounds[member])


def _with(shape: Sequence[int], dim: int, length: int) -> list[int]:
    changed = list(shape)
    changed[dim] = length
    return changed


def _call(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Members) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Members) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: bool) -> Tensor:
        ctx.first = first
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.first else torch.zeros_like(grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bounds: Bounds, dim: int, group: Members) -> Tensor:
        ctx.where = (bounds, dim, group)
        return all_gather(x, bounds, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scatter(grad, *ctx.where), None, None, None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bounds: Bounds, dim: int, group: Members) -> Tensor:
        ctx.where = (bounds, dim, group.rank())
        return all_gather(x, bounds, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _interval(grad, *ctx.where), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bounds: Bounds, dim: int, group: Members) -> Tensor:
        ctx.where = (bounds, dim, group)
        return reduce_scatter(x, bounds, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_gather(grad, *ctx.where), None, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bounds: Bounds, dim: int, group: Members) -> Tensor:
        ctx.where = (bounds, dim, group)
        return _interval(x, bounds, dim, group.rank()).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_gather(grad, *ctx.where), None, None, None
