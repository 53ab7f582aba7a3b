"""Precision plugins on a pipeline: which work, their contexts on every stage, and one loss scale for all."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from torch.optim import Optimizer

from lightning_hetpipe.errors import UnsupportedError
from lightning_hetpipe.strategy.partition import Group

# By name, because `lightning.pytorch` and `pytorch_lightning` have classes of their own.
_REFUSED = {
    "BitsandbytesPrecision",
    "DeepSpeedPrecision",
    "FSDPPrecision",
    "TransformerEnginePrecision",
    "XLAPrecision",
}


def prepare_precision(plugin: Any, device: torch.device, group: Group) -> None:
    """Fits the plugin to this rank: its autocast device, and a loss scaler that asks all ranks.

    Call `Precision.convert_module` (``bf16-true``, ``64-true``) before the module is partitioned.

    Args:
        plugin: The Trainer's plugin, changed in place.
        device: Where this rank computes.
        group: A CPU (gloo) group of all ranks that take one optimizer step together.

    Raises:
        UnsupportedError: The plugin replaces layers or belongs to another strategy.
    """
    if _REFUSED & {base.__name__ for base in type(plugin).__mro__}:
        raise UnsupportedError(
            f"{type(plugin).__name__} cannot run on a pipeline: choose precision 32-true, 64-true, "
            "bf16-true, 16-true, bf16-mixed or 16-mixed"
        )
    if hasattr(plugin, "scaler"):  # mixed precision
        plugin.device = device.type
        if plugin.scaler is not None and not isinstance(plugin.scaler, PipelineGradScaler):
            plugin.scaler = PipelineGradScaler.like(plugin.scaler, device)
        if plugin.scaler is not None:
            plugin.scaler.group = group


def check_optimizers(plugin: Any, optimizers: Iterable[Optimizer]) -> None:
    """Refuses optimizers that unscale gradients by themselves, unseen by the other ranks.

    Raises:
        UnsupportedError: A fused optimizer under ``16-mixed``.
    """
    if getattr(plugin, "scaler", None) is None:
        return
    for optimizer in optimizers:
        if _optimizer_handles_unscaling(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__}(fused=True) unscales its own gradients, so ranks would disagree "
                "on skipping a step: use fused=False, or bf16-mixed"
            )


class PipelineGradScaler(torch.amp.GradScaler):
    """A loss scaler whose overflow check covers all ranks, also those that hold no gradient."""

    group: Group = None
    home: torch.device

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler, device: torch.device) -> "PipelineGradScaler":
        """A scaler with the other one's scale and settings, for this device."""
        new = cls(device.type, enabled=scaler.is_enabled())
        new.home = device
        if scaler.is_enabled():
            new.load_state_dict(scaler.state_dict())
        return new

    def unscale_(self, optimizer: Optimizer) -> None:
        if not self.is_enabled():
            return
        if self._scale is None:  # a rank other than the reader never scales a loss
            self._lazy_init_scale_growth_tracker(self.home)
        super().unscale_(optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        worst = torch.tensor(max((float(each) for each in found.values()), default=0.0))
        if self.group is not None:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.group)
        for device in list(found) or [self.home]:
            found[device] = worst.to(device)
