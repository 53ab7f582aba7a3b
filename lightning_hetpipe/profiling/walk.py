"""One forward and one backward through stages that are kept apart, whatever is noted of each.

x ──►[ stage 0 ]──a──► a' ──►[ stage 1 ]──b──►        a' is a without its history,
◄────[    0    ]◄─────────◄──[    1    ]◄── b         so each backward is a call of its own
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_hetpipe.tracing import StageModule

Noted = TypeVar("Noted")


def walk(
    stages: Sequence[StageModule],
    inputs: Mapping[str, Tensor],
    context: Callable[[], AbstractContextManager[object]],
    note: Callable[[Callable[[], Any]], tuple[Noted, Any]],
    nothing: Noted,
) -> tuple[list[Noted], list[Noted]]:
    """Runs stages forward in order, then backward.

    Args:
        stages: Of one chain.
        inputs: Of the whole chain, by name.
        context: Entered around each forward, such as autocast.
        note: Calls what it is given; returns what it noted meanwhile, and the result.
        nothing: Stands for the backward of a stage that has none.

    Returns:
        What was noted of each stage's forward, and of each stage's backward, in the order of the stages.
    """
    made = dict(inputs)
    entered: list[dict[str, Tensor]] = []
    left: list[dict[str, Tensor]] = []
    forward: list[Noted] = []
    for stage in stages:
        values = {
            name: made[name].detach().requires_grad_(made[name].requires_grad) for name in stage.input_names
        }
        with context():
            noted, outputs = note(partial(stage, values))
        forward.append(noted)
        entered.append(values)
        left.append(outputs)
        made.update({name: tensor for name, tensor in outputs.items() if name not in values})
    gradients = {
        name: torch.full_like(tensor, 1 / max(tensor.numel(), 1)) for name, tensor in left[-1].items()
    }
    made.clear()
    backward: list[Noted] = []
    while left:
        values, outputs = entered.pop(), left.pop()
        pairs = [
            (tensor, gradients[name])
            for name, tensor in outputs.items()
            if tensor.requires_grad and name in gradients
        ]
        noted = nothing
        if pairs:
            tensors, incoming = zip(*pairs)
            noted, _ = note(partial(torch.autograd.backward, tensors, incoming))
        backward.append(noted)
        for name, tensor in values.items():
            if tensor.grad is not None:
                gradients[name] = tensor.grad + gradients[name] if name in gradients else tensor.grad
    return forward, backward[::-1]
