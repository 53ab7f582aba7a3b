"""What hooks log about gradients, of which each rank sees its own.

    rank 0   on_before_optimizer_step ──► log("grad_2.0_norm/6.weight", ...)  ┐  every rank logs the union;
    rank 1   on_before_optimizer_step ──► log("grad_2.0_norm/0.weight", ...)  ┘  the totals are made anew

The names are those of Lightning's ``grad_norm``. Hooks of callbacks are not seen: they log their rank's part.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from lightning_hetpipe.strategy.exchange import Exchange
from lightning_hetpipe.strategy.logs import LogCall, LogRecorder

HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


def install(
    module: Any,
    exchange: Exchange,
    is_overridden: Callable[[str, Any], bool],
    shards: Collection[str] = (),
) -> None:
    """Lets the hooks that the user wrote log on every rank what they log on any.

    Args:
        module: The LightningModule.
        exchange: Of all ranks.
        is_overridden: Whether the user wrote a hook.
        shards: Parameters of which several ranks hold a part: their norm is that of the parts' norms.
    """
    for name in HOOKS:
        if is_overridden(name, module):
            module.__dict__[name] = _united(module, getattr(module, name), exchange, shards)


def remove(module: Any) -> None:
    """Takes the wrappers away."""
    for name in HOOKS:
        module.__dict__.pop(name, None)


def _united(
    module: Any, hook: Callable[..., Any], exchange: Exchange, shards: Collection[str]
) -> Callable[..., Any]:
    @wraps(hook)
    def united(*args: Any, **kwargs: Any) -> None:
        recorder = LogRecorder(module)

        def work() -> list[LogCall]:
            with recorder.active():
                hook(*args, **kwargs)
            return recorder.take()

        calls: dict[str, LogCall] = {}
        parts: dict[str, list[float]] = {}
        for each in reversed(exchange.agree(work)):
            calls |= {call.name: call for call in each}
            for call in each:
                parts.setdefault(call.name, []).append(call.value)
        norms = {name: call.value for name, call in calls.items()}
        every = [name for name, _ in module.named_parameters()]
        values = whole_totals(norms | whole_shards(parts, every, shards))
        for name, call in calls.items():
            call = replace(call, value=values[name])
            module.log(name, call.value, **(call.options | {"sync_dist": True}))

    return united


def whole_shards(
    parts: Mapping[str, Sequence[Any]], parameters: Sequence[str], shards: Collection[str]
) -> dict[str, Any]:
    """Each ``grad_P_norm/NAME`` of a parameter that is cut, from the norms of its parts.

    The name may be relative to a submodule; one that also fits a parameter that is not cut is left alone.
    """
    whole = {}
    for name, values in parts.items():
        match = re.fullmatch(r".*grad_([\d.]+|inf)_norm/(.*)", name)
        if match is None:
            continue
        meant = [each for each in parameters if f".{each}".endswith(f".{match[2]}")]
        if meant and all(each in shards for each in meant):
            whole[name] = torch.tensor([float(value) for value in values]).norm(float(match[1]))
    return whole


def whole_totals(norms: Mapping[str, Any]) -> dict[str, Any]:
    """The norms with each ``grad_P_norm_total`` made of all the ``grad_P_norm/...`` that are there."""
    whole = dict(norms)
    for name in norms:
        total = re.fullmatch(r"(.*grad_([\d.]+|inf)_norm)_total", name)
        if total:
            prefix, norm_type = total.groups()
            parts = [
                float(value)
                for key, value in norms.items()
                if key.startswith(prefix) and key != name and not key.startswith(f"{prefix}_total")
            ]
            whole[name] = torch.tensor(parts).norm(float(norm_type))
    return whole
