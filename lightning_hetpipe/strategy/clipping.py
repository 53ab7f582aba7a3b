"""Clips gradients by the norm of the whole model's gradient, of which each rank holds a part."""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetpipe.strategy.partition import Group

log = logging.getLogger(__name__)


def total_norm(gradients: Iterable[Tensor], group: Group, norm_type: float = 2.0) -> Tensor:
    """The norm of all ranks' gradients as if they were one vector; a float64 scalar on the CPU.

    Args:
        gradients: This rank's part; it may be empty.
        group: A CPU (gloo) group; collective over it.
        norm_type: p of the p-norm, positive; ``inf`` for the largest magnitude.
    """
    local = torch.nn.utils.get_total_norm(list(gradients), norm_type).double().cpu()
    if group is None:
        return local
    if math.isinf(norm_type):
        dist.all_reduce(local, dist.ReduceOp.MAX, group=group)
        return local
    powers = local**norm_type
    dist.all_reduce(powers, group=group)
    return powers ** (1.0 / norm_type)


def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    group: Group,
    borrowed: Collection[nn.Parameter] = (),
    norm_type: float = 2.0,
) -> Tensor:
    """Scales the gradients in place so that their norm over all ranks is at most ``max_norm``.

    Args:
        parameters: The same parameters on every rank; placeholders have no gradient and pass.
        max_norm: The largest norm that may remain.
        group: A CPU (gloo) group; collective over it, so every rank must call.
        borrowed: Parameters that another rank counts (`borrowed_parameters`); they are scaled alike.
        norm_type: p of the p-norm, or ``inf``.

    Returns:
        The norm before clipping, equal on every rank.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    counted = [each.grad for each in with_gradient if each not in borrowed and each.grad is not None]
    norm = total_norm(counted, group, norm_type)
    torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return norm


def install_clipping(plugin: Any, group: Group, borrowed: Collection[nn.Parameter]) -> Callable[[], None]:
    """Makes this plugin's clipping by norm global; by value it is right as it is.

    Returns:
        What takes the change back.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        clip_grad_norm(plugin.main_params(optimizer), clip_val, group, borrowed)

    plugin.clip_grad_by_norm = clip_grad_by_norm
    return lambda: plugin.__dict__.pop("clip_grad_by_norm", None)


def warn_of_own_clipping(module: nn.Module) -> None:
    """Warns of what cannot be seen: whether the hook calls torch's clipping, which sees one rank's part."""
    hook = "configure_gradient_clipping"
    owner = next((each for each in type(module).__mro__ if hook in vars(each)), None)
    if owner is not None and owner.__name__ != "LightningModule":
        log.warning(
            "%s overrides configure_gradient_clipping. Each rank holds a part of the gradient: clip by "
            "self.clip_gradients(optimizer, ...), which takes the norm over all ranks; "
            "torch.nn.utils.clip_grad_norm_ would take each rank's own.",
            type(module).__name__,
        )
