"""BatchNorm in a pipeline: three kinds that keep BatchNorm's names, parameters, buffers and state dict.

A pipeline shows a BatchNorm one micro-batch at a time; a group that shares samples shows each member a part:

    batch   [ . . . . . . . . . . ]        statistics normalise over     running statistics see
    keep    [ . . . ][ . . . ][ . . ]      each micro-batch              every micro-batch, one by one
    deferred[ . . . ][ . . . ][ . . ]      each micro-batch              the batch, once, at ``commit()``
    sync    [ . | . . ][ . | . . ] ..      a micro-batch of all members  every micro-batch of all members
    freeze                                 the running statistics        nothing

Every kind is a ``torch.nn.BatchNorm*d``: a tracer that treats those as leaves needs no other rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetpipe.errors import NormError
from lightning_hetpipe.stage.members import Members
from lightning_hetpipe.stage.moments import Moments, pool, pool_all


class RecordedBatchNorm(_BatchNorm):
    """A BatchNorm that decides itself when the statistics it saw reach its buffers.

    A forward during a backward pass is a recomputation (activation checkpointing) and records nothing;
    neither does one within `paused_statistics`, or on fake and meta tensors.
    """

    recording = True  # an attribute of the class until `paused_statistics` says otherwise

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        fake = input.is_meta or isinstance(input, FakeTensor)
        recomputing = torch._C._current_graph_task_id() != -1
        record = self.recording and self.running_mean is not None and not fake and not recomputing
        return self._normalise(input, record)

    def _normalise(self, input: Tensor, record: bool) -> Tensor:
        raise NotImplementedError

    def _normalise_alone(self, input: Tensor) -> tuple[Tensor, Moments]:
        """Normalises by the statistics of `input` itself, and returns them."""
        like = self.running_mean if self.running_mean is not None else self.weight
        dtype = _wide(input.dtype) if like is None else like.dtype
        # With momentum 1 the kernel leaves the mean and the unbiased variance it computed anyway.
        mean = torch.zeros(input.size(1), dtype=dtype, device=input.device)
        variance = torch.zeros_like(mean)
        cudnn = torch.backends.cudnn.enabled
        output = torch.batch_norm(input, self.weight, self.bias, mean, variance, True, 1.0, self.eps, cudnn)
        count = input.numel() // max(input.size(1), 1)
        mean, variance = mean.to(_wide(dtype)), variance.to(_wide(dtype))
        m2 = variance * (count - 1) if count > 1 else torch.zeros_like(variance)
        return output, Moments(count, mean, m2)

    def _update_running(self, count: int | Tensor, mean: Tensor, m2: Tensor) -> None:
        """One update of the buffers, as torch makes it for a batch of `count` values per channel."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            momentum = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            variance = m2 / (count - 1)
            self.running_mean.mul_(1 - momentum).add_(mean.to(self.running_mean), alpha=momentum)
            self.running_var.mul_(1 - momentum).add_(variance.to(self.running_var), alpha=momentum)


class DeferredBatchNorm(RecordedBatchNorm):
    """Normalises by the micro-batch, as torch does; the running statistics see the batch once, at `commit`.

    After `commit` the buffers are those of one BatchNorm that saw all the micro-batches' inputs as one
    batch. (Below a normalised layer those inputs themselves depend on the micro-batching.) A micro-batch
    with one value per channel normalises to the bias, where torch refuses; a batch with one is refused.
    A layer that a model calls at several places commits all its calls as one batch.
    """

    pending: Moments | None = None  # since the last commit; not in the state dict

    def _normalise(self, input: Tensor, record: bool) -> Tensor:
        output, moments = self._normalise_alone(input)
        if record and moments.count:
            self.pending = moments if self.pending is None else self.pending.merge(moments)
        return output

    def take_pending(self) -> Moments:
        """What was recorded since the last commit, and forgets it; a count of zero for nothing."""
        moments, self.pending = self.pending, None
        if moments is None:
            assert self.running_mean is not None
            zeros = torch.zeros_like(self.running_mean, dtype=_wide(self.running_mean.dtype))
            moments = Moments(0, zeros, zeros)
        return moments

    def commit_moments(self, moments: Moments) -> None:
        """Updates the buffers once by the moments of a whole batch; does nothing for an empty one.

        Raises:
            NormError: the batch has one value per channel, which has no variance.
        """
        if moments.count == 1:
            raise NormError(_single_value(self))
        if moments.count:
            self._update_running(moments.count, moments.mean, moments.m2)

    def commit(self, group: Members | None = None) -> None:
        """Ends a batch, as `commit_all` does for every layer of a module at once."""
        commit_all(self, group)

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        self.pending = None


class SharedBatchNorm(RecordedBatchNorm):
    """Normalises by the statistics of a process group's samples, weighted by their counts.

    Members may hold different numbers of samples, none included; each must run the same forwards and
    backwards in the same order. Outputs, input gradients and buffers are those of one BatchNorm on
    all samples; the gradients of weight and bias are this member's part: their sum over the members is
    the whole. Without a process group (`set_process_group`) it is torch's own BatchNorm. Copies and
    pickles share with nobody until they are given a group.
    """

    process_group: Members | None = None

    def set_process_group(self, group: Members | None) -> None:
        """Shares statistics with the members of `group` from the next forward on; None shares with nobody."""
        self.process_group = group

    def _normalise(self, input: Tensor, record: bool) -> Tensor:
        group = self.process_group
        alone = group is None or group.size() == 1
        if alone or input.is_meta or isinstance(input, FakeTensor):
            output, moments = self._normalise_alone(input)
            if moments.count == 1:
                raise NormError(_single_value(self))
            if record and moments.count:
                self._update_running(moments.count, moments.mean, moments.m2)
            return output
        output, count, mean, m2 = _Shared.apply(input, self.weight, self.bias, self.eps, group)
        # Reading the count stalls a GPU; only a member with so few values can be part of such a batch.
        if input.numel() <= input.size(1) and count.item() <= 1:
            raise NormError(_single_value(self))
        if record:
            self._update_running(count, mean, m2)
        return output  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}


class FrozenBatchNorm(_BatchNorm):
    """Normalises by the running statistics, in training too, and never changes them.

    Weight and bias stay as trainable as they were: they are exact under any slicing.
    """

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class DeferredBatchNorm1d(DeferredBatchNorm, nn.BatchNorm1d): ...


class DeferredBatchNorm2d(DeferredBatchNorm, nn.BatchNorm2d): ...


class DeferredBatchNorm3d(DeferredBatchNorm, nn.BatchNorm3d): ...


class SharedBatchNorm1d(SharedBatchNorm, nn.BatchNorm1d): ...


class SharedBatchNorm2d(SharedBatchNorm, nn.BatchNorm2d): ...


class SharedBatchNorm3d(SharedBatchNorm, nn.BatchNorm3d): ...


class FrozenBatchNorm1d(FrozenBatchNorm, nn.BatchNorm1d): ...


class FrozenBatchNorm2d(FrozenBatchNorm, nn.BatchNorm2d): ...


class FrozenBatchNorm3d(FrozenBatchNorm, nn.BatchNorm3d): ...


@contextmanager
def paused_statistics(module: nn.Module) -> Iterator[None]:
    """Within it the deferred and shared layers of `module` normalise as ever but record nothing.

    For forwards that are not part of training: a measurement, a recomputation outside a backward pass.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, RecordedBatchNorm) and layer.recording]
    for layer in layers:
        layer.recording = False
    try:
        yield
    finally:
        for layer in layers:
            layer.recording = True


def commit_all(module: nn.Module, group: Members | None = None) -> None:
    """Ends a batch for every deferred layer of `module`: one update of its running statistics.

    Args:
        module: the layers this rank holds; layers on the meta device are left alone.
        group: the ranks that saw other samples of the same batch through the same layers. Every member
            calls, also one that saw none; one collective for all layers.

    Raises:
        NormError: the whole batch had one value per channel in some layer.
    """
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, DeferredBatchNorm)
        and layer.running_mean is not None
        and not layer.running_mean.is_meta
    ]
    batch = [layer.take_pending() for layer in layers]
    if group is not None:
        batch = pool_all(batch, group)
    for layer, moments in zip(layers, batch, strict=True):
        layer.commit_moments(moments)


class _Shared(torch.autograd.Function):
    """BatchNorm over the samples of a group: one collective forward, one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Members,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = input.to(_wide(input.dtype))
        rows = values.new_zeros(input.size(1), 3, dtype=torch.float64)
        if local := input.numel() // max(input.size(1), 1):
            variance, mean = torch.var_mean(values, _all_but_channels(input), correction=0)
            rows[:, 0], rows[:, 1], rows[:, 2] = local, mean, variance.double() * local
        counts, mean, m2 = pool(rows, group).unbind(-1)
        count = counts[0].clone()
        invstd = (m2 / count.clamp(min=1) + eps).rsqrt()
        output = (values - _spread(mean, values)) * _spread(invstd, values)
        if weight is not None:
            output = output * _spread(weight, values)
        if bias is not None:
            output = output + _spread(bias, values)
        ctx.save_for_backward(input, weight, mean, invstd, count)
        ctx.group = group
        ctx.mark_non_differentiable(count, mean, m2)
        return output.to(input.dtype), count, mean, m2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd, count = ctx.saved_tensors
        values = input.to(_wide(input.dtype))
        grad = grad.to(values.dtype)
        unit = (values - _spread(mean, values)) * _spread(invstd, values)
        dims = _all_but_channels(input)
        grad_bias, grad_weight = grad.sum(dims), (grad * unit).sum(dims)
        sums = torch.stack([grad_bias, grad_weight]).double()
        ctx.group.allreduce([sums]).wait()  # by every member, whatever it needs itself
        grad_input = None
        if ctx.needs_input_grad[0]:
            over_bias, over_weight = (_spread(each, values) for each in sums / count.clamp(min=1))
            scale = invstd if weight is None else invstd * weight
            grad_input = (grad - over_bias - unit * over_weight) * _spread(scale, values)
            grad_input = grad_input.to(input.dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        return (
            grad_input,
            grad_weight.to(weight.dtype) if needs_weight else None,
            grad_bias.to(weight.dtype) if needs_bias else None,
            None,
            None,
        )


def _all_but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _spread(channels: Tensor, like: Tensor) -> Tensor:
    """[C] in the shape and type in which it broadcasts over `like` [N, C, ...]."""
    return channels.to(like.dtype).reshape(1, -1, *[1] * (like.dim() - 2))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type statistics are kept in: float32 for the half types, else the type itself."""
    return torch.promote_types(dtype, torch.float32)


def _single_value(layer: _BatchNorm) -> str:
    return (
        f"{type(layer).__name__}({layer.num_features}) saw a whole batch with one value per channel, "
        "which has no variance: use a larger batch (or drop_last=True in the DataLoader), or norm='group'"
    )
