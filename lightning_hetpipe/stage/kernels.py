"""What a member runs for an operation that it shares: the module's own shard, and its collectives.

A kernel refers to the stage's module, whose parameters are shards, and does not own it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hetpipe.stage.collective import scatter_sum, sum_over_group
from lightning_hetpipe.stage.layout import Sharding
from lightning_hetpipe.stage.members import Members

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Member:
    """One member of the group: where a kernel runs."""

    index: int
    group: Members


def row(module: nn.Module, member: Member, scatter: Sharding | None) -> Kernel:
    """Takes a shard of the input channels and sums over the group, whole or scattered; adds the bias once."""
    channel_dim = -1 if isinstance(module, nn.Linear) else 1

    def run(x: Tensor) -> Tensor:
        terms = _without_bias(module, x)
        if scatter is None:
            y = sum_over_group(terms, member.group)
        else:
            y = scatter_sum(terms, scatter.bounds, scatter.dim, member.group)
        bias = module.bias
        if not isinstance(bias, Tensor):
            return y
        shape = [1] * y.ndim
        shape[channel_dim] = -1
        return y + bias.to(y.dtype).view(shape)

    return run


def grouped_conv(module: nn.Module, groups: int) -> Kernel:
    """A grouped convolution of this member's groups."""
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(module.kernel_size) - 1]

    def run(x: Tensor) -> Tensor:
        padding: Any = module.padding
        if module.padding_mode != "zeros":
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
            padding = 0
        return convolve(x, module.weight, module.bias, module.stride, padding, module.dilation, groups)

    return run


def group_norm(module: nn.Module, groups: int) -> Kernel:
    """Normalises this member's groups."""
    assert isinstance(module, nn.GroupNorm)
    return lambda x: F.group_norm(x, groups, module.weight, module.bias, module.eps)


def instance_norm(module: nn.Module) -> Kernel:
    """Normalises this member's channels; the module itself would check for all of them."""
    assert isinstance(module, (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d))

    def run(x: Tensor) -> Tensor:
        use_input_stats = module.training or not module.track_running_stats
        momentum = 0.0 if module.momentum is None else module.momentum
        return F.instance_norm(
            x, module.running_mean, module.running_var, module.weight, module.bias,
            use_input_stats, momentum, module.eps,
        )  # fmt: skip

    return run


def heads(module: nn.Module, member: Member, n_heads: int) -> Kernel:
    """Attention of this member's heads; their output projections are summed over the group."""
    assert isinstance(module, nn.MultiheadAttention)

    def run(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        assert module.in_proj_weight is not None
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        projected = [
            F.linear(x, weight, bias)
            for x, weight, bias in zip((query, key, value), module.in_proj_weight.chunk(3), biases)
        ]
        if not module.batch_first:
            projected = [x.transpose(0, 1) for x in projected]
        batch = projected[0].shape[0]
        q, k, v = (x.reshape(batch, x.shape[1], n_heads, -1).transpose(1, 2) for x in projected)
        dropout = module.dropout if module.training else 0.0
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = ~attn_mask  # True means "leave out" to the module, and "attend" to the function
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout)
        y = y.transpose(1, 2).flatten(2)
        if not module.batch_first:
            y = y.transpose(0, 1)
        y = sum_over_group(F.linear(y, module.out_proj.weight), member.group)
        if module.out_proj.bias is not None:
            y = y + module.out_proj.bias.to(y.dtype)
        return y, None

    return run


def _without_bias(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.Linear):
        return F.linear(x, module.weight)
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return module._conv_forward(x, module.weight, None)  # type: ignore[no-any-return]
    assert isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
    convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(module.kernel_size) - 1]
    result: Tensor = convolve(
        x,
        module.weight,
        None,
        module.stride,
        module.padding,
        module.output_padding,
        module.groups,
        module.dilation,
    )
    return result


def seed_streams(seed: int, devices: Iterable[torch.device]) -> None:
    """Seeds the cpu's stream and those of some cuda devices, and no other."""
    torch.default_generator.manual_seed(seed)
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def with_own_randomness(run: Kernel, member: Member) -> Kernel:
    """Draws from a stream that differs between members, and leaves the common stream where it was."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        devices = {a.device for a in args if isinstance(a, Tensor) and a.device.type == "cuda"}
        # the common stream seeds the members' own, so that they move on with it
        seed = int(torch.randint(1 << 31, ()).item())
        with torch.random.fork_rng(devices=list(devices)):
            seed_streams(seed * 1_000_003 + member.index, devices)
            return run(*args, **kwargs)

    return draw
