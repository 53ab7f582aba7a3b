"""A loss whose backward puts gradients in place that were computed before.

Lightning calls ``training_step``, then ``zero_grad``, then ``backward``. The schedule has already run
forward and backward of every micro-batch inside ``training_step``; what it leaves in ``.grad`` would be
wiped. So the gradients are taken out, and the returned loss carries them past ``zero_grad``:

    training_step: take .grad out ── run schedule ── stash .grad ── put .grad back ── return loss
    backward:      .grad (+)= stash · g / g_expected
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Stash:
    """Gradients of one step between their computation and the loss's backward."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad and not p.is_meta]
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []

    @contextmanager
    def collect(self, *, free_previous: bool) -> Iterator[None]:
        """Gradients made inside are kept here; those from before stand in ``.grad`` again afterwards.

        Args:
            free_previous: Drop the earlier gradients now instead of holding both
                (right when ``zero_grad`` follows and nobody looks in between).
        """
        before = [] if free_previous else [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield
            self._gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        finally:
            for parameter in self._parameters:
                parameter.grad = None
            for parameter, gradient in before:
                parameter.grad = gradient

    def install(self, factor: float) -> None:
        """Adds ``factor`` times the kept gradients to ``.grad``."""
        for parameter, gradient in self._gradients:
            if factor != 1.0:
                gradient = gradient * factor
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._gradients = []

    def as_loss(self, value: Tensor, expected: float) -> Tensor:
        """A loss of this value whose ``backward`` installs the kept gradients.

        Args:
            value: The loss, a scalar without graph.
            expected: The gradient that will arrive at the loss if nobody scales it further; the
                kept gradients already contain this factor.
        """
        anchor = torch.ones((), device=value.device, requires_grad=True)
        loss: Tensor = _Install.apply(anchor, value, self, expected)
        return loss


class _Install(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, stash: Stash, expected: float) -> Tensor:
        ctx.stash, ctx.expected = stash, expected
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        factor = float(gradient) / ctx.expected
        ctx.stash.install(1.0 if abs(factor - 1.0) < 1e-6 else factor)
        return None, None, None, None
