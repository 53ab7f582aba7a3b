"""One stage held whole by several members, each of which runs a share of the samples.

    micro-batch  [ . . . . . . . . ]   5:2:1     member 0 [ . . . . . ]  1 [ . . ]  2 [ . ]

The gradient of an output row is what the next stage sends for that row, so that the gradient of a
parameter is the plain sum over the members, reduced once per step. Where each member makes a mean loss of
its own, its weight is ``n_i / n``: `sample_weight`. Statistics of BatchNorm are per member under
``norm="keep"``, and after every step all members have the first one's running statistics; under
``norm="sync"`` and ``"deferred"`` these are those of all samples.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_hetpipe.shares import bounds_of, largest_remainder
from lightning_hetpipe.stage.members import Members

BUCKET_BYTES = 25 * 2**20
Stage = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def sample_bounds(n_samples: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Rows of a micro-batch by shares; a member may get none of a ragged one.

    >>> sample_bounds(8, (5, 2, 1)), sample_bounds(1, (5, 2, 1))
    ((0, 5, 7, 8), (0, 1, 1, 1))
    """
    return bounds_of(largest_remainder(n_samples, shares))


def sample_weight(bounds: Sequence[int], member: int) -> float:
    """The weight of a member's mean loss, so that the group's sum is the mean over all samples."""
    return (bounds[member + 1] - bounds[member]) / bounds[-1] if bounds[-1] else 0.0


def take_samples(values: Mapping[str, Tensor], bounds: Sequence[int], member: int) -> dict[str, Tensor]:
    """A member's rows, as views; a value that does not have all rows is the same for every sample."""
    start, stop = bounds[member], bounds[member + 1]
    return {
        name: value[start:stop] if value.ndim and value.shape[0] == bounds[-1] else value
        for name, value in values.items()
    }


def join_samples(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Every value of the members' rows, in order; members without samples give empty rows, or nothing."""
    names = list(next(part for part in parts if part))
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}


def reduce_gradients(
    parameters: Iterable[nn.Parameter],
    group: Members,
    weight: float = 1.0,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replaces every gradient by the sum over the members of ``weight`` times theirs.

    Args:
        parameters: Equal, and in equal order, on every member; those that need no gradient are left
            alone. A member whose samples gave none contributes zeros, and ends up with the sum; where
            no member has a gradient, none comes to be.
        group: The members.
        weight: Of this member.
        bucket_bytes: Gradients of one dtype and device are reduced together up to this size.
    """
    for bucket in _buckets((p for p in parameters if p.requires_grad), bucket_bytes):
        present = bucket[0].new_tensor([float(p.grad is not None) for p in bucket])
        flat = torch.cat(
            [
                *(
                    torch.zeros_like(p).view(-1) if p.grad is None else p.grad.detach().reshape(-1) * weight
                    for p in bucket
                ),
                present,
            ]
        )
        group.allreduce([flat]).wait()
        *parts, present = torch.split(flat, [*(p.numel() for p in bucket), len(bucket)])
        for parameter, part, holders in zip(bucket, parts, present.tolist()):
            if holders:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part.view_as(parameter))


def share_buffers(buffers: Sequence[Tensor], group: Members) -> None:
    """Gives every member the first one's values; equal, and in equal order, on every member."""
    if not buffers:
        return
    parts = [buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers]
    flat = torch.cat(parts)
    group.broadcast(flat, 0).wait()
    for buffer, part in zip(buffers, torch.split(flat, [len(part) for part in parts])):
        buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


class BatchStage:
    """One member's part of a stage that a group shares by samples.

    Args:
        stage: The whole stage.
        axes: The dimension of each value that counts the samples.
        together: Whether the members exchange statistics while they run, so that a member without samples
            has to take part; otherwise it makes nothing.
    """

    def __init__(self, stage: Stage, axes: Mapping[str, int], *, together: bool) -> None:
        self._stage, self._axes, self._together = stage, axes, together

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = [value.shape[self._axes[name]] for name, value in values.items() if name in self._axes]
        if min(rows) == 0 and not self._together:
            return {}
        return self._stage(values)


def _buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Parameters that are reduced together, in the order in which they come."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = parameter.dtype, parameter.device
        bucket = open_buckets.setdefault(key, [])
        if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > bucket_bytes:
            yield open_buckets.pop(key)
            bucket = open_buckets.setdefault(key, [])
        bucket.append(parameter)
    yield from open_buckets.values()
