"""Which ways each kind of operation has: the knowledge of what can be shared by channels, and how.

dense (conv, transposed conv, linear)   whole · column · row · row+scatter
grouped and depthwise conv, GroupNorm   whole · local, where the cuts fall on group boundaries
BatchNorm, InstanceNorm, PReLU          whole · local
activation, dropout, pooling, add, ...  whole · local, operands cut alike
flatten, mean, permute, concat          whole · local, where the cut dimension allows it
MultiheadAttention                      whole · heads (column and row inside)
anything else                           whole
"""

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_hetpipe.shares import channel_bounds
from lightning_hetpipe.stage import kernels
from lightning_hetpipe.stage.consolidate import Placement
from lightning_hetpipe.stage.kernels import Kernel, Member
from lightning_hetpipe.stage.layout import Sharding, Way
from lightning_hetpipe.stage.local import (
    concat,
    flatten,
    over_dim,
    permute,
    pointwise,
    reduction,
    spatial,
    view,
)
from lightning_hetpipe.stage.site import COPY, SHARD, WHOLE, Answer, Realisation, Site, local, size_work

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
POINTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
    nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.Mish, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Identity,
    nn.Threshold, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink,
)  # fmt: skip
# Operate on the dimensions behind the channels, dimension 1.
SPATIAL = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.LPPool1d, nn.LPPool2d,
    nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.ZeroPad2d, nn.ReflectionPad2d,
    nn.ReplicationPad2d,
)  # fmt: skip
DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.RReLU)
CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
POINTWISE_FUNCTIONS = {
    F.relu, F.relu6, F.gelu, F.silu, F.sigmoid, F.tanh, F.hardswish, F.hardsigmoid, F.hardtanh, F.leaky_relu,
    F.elu, F.celu, F.selu, F.mish, F.softplus, F.logsigmoid, torch.relu, torch.sigmoid, torch.tanh, torch.exp,
    torch.abs, torch.sqrt, torch.neg, torch.clamp, torch.add, torch.sub, torch.mul, torch.div, torch.pow,
    torch.square, torch.rsqrt, operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.pow,
}  # fmt: skip
POINTWISE_METHODS = {
    "relu", "relu_", "sigmoid", "tanh", "add", "add_", "sub", "mul", "mul_", "div", "div_", "neg", "abs",
    "exp", "sqrt", "rsqrt", "clamp", "contiguous", "clone", "detach", "float", "half", "double", "bfloat16",
    "type_as",
}  # fmt: skip
SPATIAL_FUNCTIONS = {
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.adaptive_max_pool2d, F.interpolate,
}  # fmt: skip
REDUCTIONS = {torch.mean, torch.sum, torch.amax, torch.amin, "mean", "sum", "amax", "amin"}
IN_PLACE_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv}


def answer(site: Site) -> Answer:
    """How the node can be shared."""
    node, module = site.node, site.module
    if not site.inputs or not isinstance(site.result, Tensor):
        return _heads(site) if isinstance(module, nn.MultiheadAttention) else Answer()
    if isinstance(module, nn.Module):
        return _module(site, module)
    name = getattr(node.target, "__name__", str(node.target))
    if node.target in POINTWISE_FUNCTIONS or (node.op == "call_method" and node.target in POINTWISE_METHODS):
        return pointwise(site)
    if node.target == "to":
        return pointwise(site)
    if node.target in (F.dropout, F.alpha_dropout):
        return pointwise(site, own_randomness=True)
    if name in ("stochastic_depth", "drop_path"):  # one mask per sample: the same for every channel
        return pointwise(site)
    if node.target in SPATIAL_FUNCTIONS:
        return spatial(site)
    if node.target in (torch.flatten, "flatten"):
        return flatten(site, site.argument(1, "start_dim", 0), site.argument(2, "end_dim", -1))
    if node.target in (torch.reshape, "view", "reshape"):
        return view(site)
    if node.target in REDUCTIONS:
        return reduction(site)
    if node.target in (torch.permute, "permute", torch.transpose, "transpose"):
        return permute(site)
    if node.target in (torch.cat, torch.concat):
        return concat(site)
    if node.target in (F.softmax, torch.softmax, "softmax", F.log_softmax):
        return over_dim(site, site.argument(1, "dim"))
    if node.target is operator.getitem:
        return Answer()
    return Answer(note="not known to be separable by channels")


def _module(site: Site, module: nn.Module) -> Answer:
    if not _plain(module):
        return Answer(work=size_work(site), note="its parameters are computed or hooked")
    if isinstance(module, (*CONVS, *TRANSPOSED, nn.Linear)):
        return _dense(site, module)
    if isinstance(module, nn.MultiheadAttention):
        return _heads(site)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _channelwise(site, module, module.num_features)
    if isinstance(module, INSTANCE_NORMS):
        return _channelwise(site, module, module.num_features, lambda _: kernels.instance_norm(module))
    if isinstance(module, nn.GroupNorm):
        return _group_norm(site, module)
    if isinstance(module, nn.PReLU):
        if module.num_parameters == 1:
            return Answer(work=size_work(site), note="one slope for all channels")
        return _channelwise(site, module, module.num_parameters)
    if isinstance(module, POINTWISE):
        return pointwise(site)
    if isinstance(module, DROPOUTS):
        return pointwise(site, own_randomness=True)
    if isinstance(module, CHANNEL_DROPOUTS):
        return spatial(site, own_randomness=True)
    if isinstance(module, SPATIAL):
        return spatial(site)
    if isinstance(module, nn.Flatten):
        return flatten(site, module.start_dim, module.end_dim)
    if isinstance(module, (nn.Softmax, nn.LogSoftmax)):
        return over_dim(site, module.dim)
    if isinstance(module, nn.Embedding):
        return _embedding(site, module)
    coupled = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    note = "normalises over the channels" if coupled else "not known to be separable by channels"
    return Answer(work=size_work(site) if coupled else _module_work(site, module), note=note)


def _plain(module: nn.Module) -> bool:
    """Whether the module computes what its class says, from parameters of its own."""
    return not module._forward_pre_hooks and not hasattr(module, "parametrizations")


def _module_work(site: Site, module: nn.Module) -> float:
    weights = sum(parameter.numel() for parameter in module.parameters())
    positions = site.value().numel() / max(1, site.value().shape[-1])
    return 6.0 * weights * positions + size_work(site)


def _dense(site: Site, module: nn.Module) -> Answer:
    x, y = site.value(), site.result
    linear = isinstance(module, nn.Linear)
    channel_dim = x.ndim - 1 if linear else 1
    weight: Tensor = module.weight  # type: ignore[assignment]
    groups = 1 if linear else int(module.groups)  # type: ignore[arg-type]
    transposed = isinstance(module, TRANSPOSED)
    # every output (or, transposed, input) position costs the weights of one output channel, three times
    per_channel = weight.numel() // (weight.shape[0])
    work = 6.0 * per_channel * (x.numel() if transposed else y.numel())
    if not linear and x.ndim != weight.ndim:
        return Answer(work=work, note="called without a batch dimension")
    if not site.own:
        return Answer(work=work, note="its parameters are used more than once")
    if len(site.node.args) != 1 or site.node.kwargs:
        return Answer(work=work, note="called with options")
    out = site.cutter.cut(y.shape[channel_dim], channel_dim)
    taken = site.sharding()
    if taken is not None and taken.dim != channel_dim:
        taken = None
    if groups > 1:
        return _grouped(site, module, taken, work)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    bias = module.bias is not None
    shared = []
    if out is not None:
        cuts = {"weight": Placement(Sharding(out_dim, out.bounds))}
        if bias:
            cuts["bias"] = Placement(Sharding(0, out.bounds))
        shared.append(Realisation(Way("column", (COPY,), SHARD, shared=True), cuts))
    if taken is not None:
        size = float(y.numel() * y.element_size())
        cuts = {"weight": Placement(Sharding(in_dim, taken.bounds))}
        whole = Way("row", (SHARD,), WHOLE, True, (("all_reduce", size),))
        shared.append(Realisation(whole, cuts, lambda member: kernels.row(module, member, None)))
        if out is not None:
            if bias:
                cuts = cuts | {"bias": Placement(Sharding(0, out.bounds))}
            scattered = Way(
                "row+scatter", (SHARD,), SHARD, True, (("reduce_scatter", size),), (("all_gather", size),)
            )
            shared.append(Realisation(scattered, cuts, lambda member: kernels.row(module, member, out)))
    note = "" if shared else "fewer channels than devices"
    return Answer(out, shared, work, note)


def _grouped(site: Site, module: nn.Module, taken: Sharding | None, work: float) -> Answer:
    groups = int(module.groups)  # type: ignore[arg-type]
    x, y = site.value(), site.result
    per_in, per_out = x.shape[1] // groups, y.shape[1] // groups
    if taken is None or not taken.aligned(per_in) or isinstance(module, TRANSPOSED):
        return Answer(work=work, note="no cut of its input falls on group boundaries")
    bounds = tuple(bound // per_in for bound in taken.bounds)
    out = Sharding(1, tuple(bound * per_out for bound in bounds))
    cuts = {name: Placement(Sharding(0, out.bounds)) for name, _ in module.named_parameters()}
    counts = Sharding(0, bounds).counts
    found = local(
        site, out, placements=cuts, kernel=lambda member: kernels.grouped_conv(module, counts[member.index])
    )
    found.work = work
    return found


def _channelwise(
    site: Site, module: nn.Module, channels: int, kernel: Callable[[Member], Kernel] | None = None
) -> Answer:
    """Parameters and buffers of one number per channel, cut with the channels."""
    sharding = site.sharding()
    if sharding is None or sharding.dim != 1 or not site.own:
        return Answer(work=size_work(site))
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    cut = Placement(Sharding(0, sharding.bounds))
    cuts = {name: cut for name, tensor in tensors.items() if tensor.ndim and tensor.shape[0] == channels}
    return local(site, sharding, placements=cuts, kernel=kernel)


def _group_norm(site: Site, module: nn.GroupNorm) -> Answer:
    sharding = site.sharding()
    per_group = module.num_channels // module.num_groups
    if sharding is None or sharding.dim != 1 or not sharding.aligned(per_group):
        return Answer(work=size_work(site), note=f"no cut falls on its groups of {per_group} channels")
    counts = tuple(count // per_group for count in sharding.counts)
    return _channelwise(
        site, module, module.num_channels, lambda member: kernels.group_norm(module, counts[member.index])
    )


def _embedding(site: Site, module: nn.Embedding) -> Answer:
    y = site.result
    out = site.cutter.cut(module.embedding_dim, y.ndim - 1)
    if out is None or not site.own or module.max_norm is not None:
        return Answer(work=size_work(site))
    cuts = {"weight": Placement(Sharding(1, out.bounds))}
    column = Realisation(Way("column", (COPY,), SHARD, shared=True), cuts)
    return Answer(out, [column], size_work(site))


def _heads(site: Site) -> Answer:
    module = site.module
    assert isinstance(module, nn.MultiheadAttention)
    x = site.value()
    width, tokens = module.embed_dim, x.numel() // module.embed_dim
    length = x.shape[1 if module.batch_first else 0]
    work = 6.0 * tokens * (4 * width * width + 2 * length * width)
    known = {"query", "key", "value", "need_weights", "average_attn_weights", "is_causal"}
    mask = site.node.kwargs.get("attn_mask")
    masked = any(v is not None for k, v in site.node.kwargs.items() if k not in (*known, "attn_mask"))
    if isinstance(mask, fx.Node):
        masked = masked or site.values[mask.name].ndim != 2
    weights_used = any(
        user.target is not operator.getitem or user.args[1] != 0 for user in site.node.users if user.users
    )
    reason = ""
    if x.ndim != 3 or masked or len(site.node.args) > 3:
        reason = "called with masks per sample or without a batch dimension"
    elif weights_used:
        reason = "its attention weights are used"
    elif module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        reason = "its projections are not joint"
    elif not site.own:
        reason = "its parameters are used more than once"
    elif module.num_heads < len(site.cutter.shares):
        reason = f"{module.num_heads} heads are fewer than {len(site.cutter.shares)} devices"
    if reason:
        return Answer(work=work, note=reason)
    per_head = channel_bounds(module.num_heads, site.cutter.shares)
    counts = Sharding(0, per_head).counts
    bounds = tuple(bound * module.head_dim for bound in per_head)
    joint = Placement(Sharding(0, bounds), blocks=3)
    cuts = {"in_proj_weight": joint, "out_proj.weight": Placement(Sharding(1, bounds))}
    if module.in_proj_bias is not None:
        cuts["in_proj_bias"] = joint
    size = float(x.numel() * x.element_size())
    way = Way("heads", (COPY,) * len(site.inputs), WHOLE, True, (("all_reduce", size),))
    realisation = Realisation(
        way,
        cuts,
        lambda member: kernels.heads(module, member, counts[member.index]),
        own_randomness=module.dropout > 0,
    )
    return Answer(None, [realisation], work)
