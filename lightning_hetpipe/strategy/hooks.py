"""Hooks of the LightningModule that see what only rank 0 has: batches, and what the steps collected.

They run on rank 0, with ``self.log`` captured and the pipelined module answered by all ranks; what they
logged and returned is then the same everywhere. All other hooks run on every rank, as Lightning calls them.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

STAGES = ("train", "validation", "test", "predict")
LED_HOOKS = tuple(
    f"on_{stage}_{moment}" for stage in STAGES for moment in ("batch_start", "batch_end", "epoch_end")
)
Lead = Callable[[Callable[[], Any], tuple[Any, ...]], Any]  # what to run, the hook's arguments


def install(module: Any, lead: Lead, is_overridden: Callable[[str, Any], bool]) -> None:
    """Lets rank 0 lead the hooks that the user wrote; the wrappers are attributes of the instance."""
    for name in LED_HOOKS:
        if is_overridden(name, module):
            module.__dict__[name] = _led(getattr(module, name), lead)


def remove(module: Any) -> None:
    """Takes the wrappers away."""
    for name in LED_HOOKS:
        module.__dict__.pop(name, None)


def _led(hook: Callable[..., Any], lead: Lead) -> Callable[..., Any]:
    @wraps(hook)
    def led(*args: Any, **kwargs: Any) -> Any:
        return lead(lambda: hook(*args, **kwargs), args)

    return led
