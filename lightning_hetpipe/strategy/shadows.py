"""Attributes of Lightning's objects that a run replaces on this rank, and puts back.

A shadow is an instance attribute over the class's method or over a value.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger(__name__)

_ABSENT = object()


class Shadows:
    """Remembers what stood where."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def cast(self, target: Any, name: str, value: Any) -> None:
        """Sets an instance attribute until `lift`."""
        self._before.append((target, name, vars(target).get(name, _ABSENT)))
        vars(target)[name] = value

    def lift(self) -> None:
        """Puts everything back."""
        while self._before:
            target, name, value = self._before.pop()
            if value is _ABSENT:
                vars(target).pop(name, None)
            else:
                vars(target)[name] = value


def adapt(shadows: Shadows, trainer: Any, leads: bool) -> None:
    """Adapts a Trainer's parts to a rank of a pipeline.

    Other ranks than 0 have no batch for the module's transfer hooks, and write no predictions: rank 0 has
    them all. A model summary with example inputs runs the whole module, so it is made now.
    """
    module = trainer.lightning_module
    if not leads:
        shadows.cast(module, "_on_before_batch_transfer", _same_batch)
        for callback in _of_kind(trainer.callbacks, "BasePredictionWriter"):
            shadows.cast(callback, "write_on_batch_end", _nothing)
            shadows.cast(callback, "write_on_epoch_end", _nothing)
    if trainer.state.fn == "fit" and module.example_input_array is not None:
        for callback in _of_kind(trainer.callbacks, "ModelSummary"):
            summary = callback._summary(trainer, module)
            shadows.cast(callback, "_summary", _constant(summary))
    for logger in trainer.loggers:
        if getattr(logger, "_log_graph", False):
            log.warning("%s cannot log the graph: no rank holds the whole model", type(logger).__name__)
            shadows.cast(logger, "_log_graph", False)


def _of_kind(callbacks: Iterable[Any], name: str) -> list[Any]:
    return [each for each in callbacks if any(kind.__name__ == name for kind in type(each).__mro__)]


def _same_batch(batch: Any, dataloader_idx: int = 0) -> Any:
    return batch


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value
