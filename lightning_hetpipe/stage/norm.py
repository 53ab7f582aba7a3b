"""The policy for BatchNorm in a pipeline: what its layers become, and when to choose which.

| policy | a layer becomes | normalises by | exact under any micro-batching |
|---|---|---|---|
| keep | torch's BatchNorm | the micro-batch | neither output nor running statistics |
| deferred | `DeferredBatchNorm` | the micro-batch | running statistics, given the layer's inputs |
| sync | `SharedBatchNorm` | the micro-batch of all members of a group | as keep, but exact over the members |
| group | `torch.nn.GroupNorm` | each sample by itself | yes |
| freeze | `FrozenBatchNorm` | the running statistics | yes |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_hetpipe.errors import NormError
from lightning_hetpipe.stage import batchnorm
from lightning_hetpipe.stage.batchnorm import FrozenBatchNorm, SharedBatchNorm
from lightning_hetpipe.stage.members import Members

Policy = Literal["keep", "deferred", "sync", "group", "freeze"]

# Per dimension, what a BatchNorm becomes; "group" alone is another kind of layer.
_KINDS: dict[str, tuple[type[_BatchNorm], ...]] = {
    "keep": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "deferred": (batchnorm.DeferredBatchNorm1d, batchnorm.DeferredBatchNorm2d, batchnorm.DeferredBatchNorm3d),
    "sync": (batchnorm.SharedBatchNorm1d, batchnorm.SharedBatchNorm2d, batchnorm.SharedBatchNorm3d),
    "freeze": (batchnorm.FrozenBatchNorm1d, batchnorm.FrozenBatchNorm2d, batchnorm.FrozenBatchNorm3d),
}
_AXIS = {kind: axis for kinds in _KINDS.values() for axis, kind in enumerate(kinds)}

# The state of a recorded layer that is not BatchNorm's own.
_OWN_STATE = ("pending", "process_group", "recording")

_MAX_GROUPS = 32
_MIN_GROUP_CHANNELS_1D = 16


def convert_norm(
    module: nn.Module,
    policy: Policy,
    cuts: Mapping[str, Sequence[int]] | None = None,
) -> nn.Module:
    """Turns every BatchNorm of `module` into the kind that `policy` asks for, in place.

    The layers stay the same objects: names, parameters, hooks, devices, training flags, ties between
    modules and whatever else refers to them hold. Only their class changes (for "group", also their
    buffers go), so the state dict keeps its keys and a converted module converts again, back by "keep".

    Args:
        module: may be a BatchNorm itself.
        policy: "keep", "deferred", "sync", "group" or "freeze"; see the table above this function.
        cuts: for "group": by the layer's name in `module`, the channels at which a channel split cuts it;
            its groups end there.

    Returns:
        `module`.

    Raises:
        NormError: no such policy; no fitting number of groups; a layer that cannot be converted (lazy,
            synchronised, a subclass with a forward of its own, without running statistics). Nothing is
            converted then.
    """
    if policy not in get_args(Policy):
        raise NormError(f"norm={policy!r} is no policy; choose one of {', '.join(get_args(Policy))}")
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    for name, layer in layers.items():
        _check(name, layer, policy)
    if unknown := set(cuts or {}) - {name for name, _ in module.named_modules(remove_duplicate=False)}:
        raise NormError(f"cuts name no module: {', '.join(sorted(unknown))}")
    if policy == "group":
        groups = {name: _groups_of(name, layer, cuts or {}) for name, layer in layers.items()}
        for name, layer in layers.items():
            _become_group_norm(layer, groups[name])
    else:
        for layer in layers.values():
            if type(layer) not in _AXIS:  # a subclass of its own, which only "keep" lets pass
                continue
            for state in _OWN_STATE:
                layer.__dict__.pop(state, None)
            layer.__class__ = _KINDS[policy][_AXIS[type(layer)]]
    return module


def group_count(channels: int, cuts: Sequence[int] = (), min_channels: int = 1) -> int:
    """The largest number of GroupNorm groups, at most 32, that divides `channels` and ends at every cut.

    Args:
        channels: C of the layer.
        cuts: channel positions between 0 and C.
        min_channels: the fewest channels of a group (all of them when there are fewer).

    Raises:
        NormError: the cuts would need more groups, or smaller ones.
    """
    unit = math.gcd(channels, *cuts)  # a group's size divides it
    smallest = min(channels, max(min_channels, math.ceil(channels / _MAX_GROUPS)))
    for size in range(smallest, unit + 1):
        if unit % size == 0:
            return channels // size
    raise NormError(
        f"{channels} channels cut at {list(cuts)} need groups of at most {unit} channels; GroupNorm here "
        f"takes at least {smallest} (at most {_MAX_GROUPS} groups): move the cuts to multiples of {smallest}"
    )


def set_process_group(module: nn.Module, group: Members | None) -> None:
    """Shares the statistics of every `sync` layer of `module` with the members of `group`."""
    for layer in module.modules():
        if isinstance(layer, SharedBatchNorm):
            layer.set_process_group(group)


def small_batch_advice(module: nn.Module, samples: int, min_samples: int = 16) -> str | None:
    """What to tell a user whose BatchNorm layers normalise over few samples, or None.

    Args:
        module: the pipelined module, converted or not.
        samples: that the statistics see at once: a micro-batch, times the members for "sync".
        min_samples: from which on there is nothing to tell.
    """
    names = [
        name or type(layer).__name__
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, FrozenBatchNorm) and layer.training
    ]
    if samples >= min_samples or not names:
        return None
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"{len(names)} BatchNorm layer(s) ({some}) normalise by the statistics of {samples} sample(s), one "
        f"micro-batch; below {min_samples} these are noisy. Choose norm='group' when training from scratch, "
        "norm='freeze' when fine-tuning, norm='deferred' to keep BatchNorm with one update of its running "
        f"statistics per batch, or micro_batch={min_samples} or more"
    )


def _check(name: str, layer: _BatchNorm, policy: Policy) -> None:
    """Refuses what cannot become `policy`, by name."""
    where = f"{type(layer).__name__} {name!r}" if name else type(layer).__name__
    if isinstance(layer, LazyModuleMixin):
        raise NormError(f"{where} has no parameters yet: run one forward of the model, then convert it")
    if isinstance(layer, nn.SyncBatchNorm):
        raise NormError(
            f"{where} shares statistics with all ranks, which in a pipeline hold other layers: "
            "build the model with BatchNorm and choose norm='sync', which shares with the right ones"
        )
    if policy != "keep" and type(layer) not in _AXIS:
        raise NormError(
            f"{where} is a subclass of BatchNorm whose forward norm={policy!r} would replace: "
            "use torch.nn.BatchNorm1d, 2d or 3d there, or norm='keep'"
        )
    if policy in ("deferred", "freeze") and not layer.track_running_stats:
        raise NormError(
            f"{where} tracks no running statistics: norm={policy!r} is about those; choose another"
        )


def _groups_of(name: str, layer: _BatchNorm, cuts: Mapping[str, Sequence[int]]) -> int:
    # A BatchNorm1d may see one value per channel: a group of few channels would erase it.
    least = _MIN_GROUP_CHANNELS_1D if isinstance(layer, nn.BatchNorm1d) else 1
    try:
        return group_count(layer.num_features, cuts.get(name, ()), least)
    except NormError as error:
        raise NormError(f"{name}: {error}") from None


def _become_group_norm(layer: _BatchNorm, groups: int) -> None:
    channels = layer.num_features
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        delattr(layer, name)
    for name in ("num_features", "momentum", "track_running_stats", *_OWN_STATE):
        layer.__dict__.pop(name, None)
    layer.__class__ = cast(type[_BatchNorm], nn.GroupNorm)
    layer.num_groups, layer.num_channels = groups, channels  # type: ignore[assignment]
