"""Captures ``self.log`` where the user's code runs (rank 0), and replays it on every rank.

rank 0:  step(m=0) log("loss", 0.7) ┐
step(m=1) log("loss", 0.5) ┴ merge by weight ── broadcast ──► every rank: log("loss", 0.6)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.strategy.mirror import Mirrors


@dataclass(frozen=True)
class LogCall:
    """One ``self.log`` call, ready to be replayed on any rank.

    Attributes:
        name: The key.
        value: A detached CPU tensor or a number; for a metric, its latest step value.
        options: The other arguments.
        metric: Attribute name of the ``torchmetrics.Metric`` that was logged, if it was one.
    """

    name: str
    value: Any
    options: dict[str, Any] = field(default_factory=dict)
    metric: str | None = None


class LogRecorder:
    """Stands in for ``module.log`` while user code runs on rank 0."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._calls: list[LogCall] = []

    @contextmanager
    def active(self) -> Iterator["LogRecorder"]:
        """``self.log`` calls inside are recorded instead of executed."""
        shadowed = self._module.__dict__.get("log")
        self._module.__dict__["log"] = self._record
        try:
            yield self
        finally:
            del self._module.__dict__["log"]
            if shadowed is not None:
                self._module.__dict__["log"] = shadowed

    def take(self) -> list[LogCall]:
        """The calls recorded since the last time, in order."""
        calls, self._calls = self._calls, []
        return calls

    def _record(self, name: str, value: Any, *positional: Any, **options: Any) -> None:
        options |= zip(_OPTION_ORDER, positional)
        metric = None
        if _is_metric(value):
            metric = options.get("metric_attribute") or metric_name(self._module, value)
            value = value._forward_cache
        if isinstance(value, Tensor):
            value = value.detach().cpu()
        self._calls.append(LogCall(name, value, options, metric))


# The parameters of LightningModule.log after (name, value), for callers that pass them by position.
_OPTION_ORDER = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")


def merge(calls_of_micro_batch: Sequence[Sequence[LogCall]], sizes: Sequence[int]) -> list[LogCall]:
    """One call per key and position from those of all micro-batches.

    Means are weighted by samples (or by the ``batch_size`` that the user passed); ``min``, ``max``
    and ``sum`` are themselves. The merged call has the whole batch's size.
    """
    groups: dict[tuple[str, int], list[tuple[LogCall, int]]] = {}
    for calls, size in zip(calls_of_micro_batch, sizes):
        seen: dict[str, int] = {}
        for call in calls:
            nth = seen[call.name] = seen.get(call.name, -1) + 1
            weight = call.options.get("batch_size")
            groups.setdefault((call.name, nth), []).append((call, size if weight is None else int(weight)))
    return [_merge_group(group) for group in groups.values()]


def replay(module: Any, calls: Sequence[LogCall], mirrors: Mirrors) -> None:
    """Executes the calls on this rank, in the hook that Lightning is running now."""
    for call in calls:
        value = call.value
        options = dict(call.options)
        if call.metric is not None:
            value = mirrors.of(call.metric, call.value)
            options["metric_attribute"] = call.metric
        # Lightning asks for sync_dist where several ranks log; here `reduce` is the identity.
        module.log(call.name, value, **(options | {"sync_dist": True}))


def metric_name(module: nn.Module, metric: Any) -> str:
    """The attribute path of a metric in the module; the metric's own class name where it has none."""
    for name, candidate in module.named_modules():
        if candidate is metric:
            return str(name)
    return type(metric).__name__


def _merge_group(group: list[tuple[LogCall, int]]) -> LogCall:
    last, _ = group[-1]
    weights = [weight for _, weight in group]
    options = dict(last.options, batch_size=sum(weights))
    values = [call.value for call, _ in group]
    if any(value is None for value in values):
        return LogCall(last.name, None, options, last.metric)
    how = "mean" if last.metric else _reduction(options.get("reduce_fx", "mean"))
    return LogCall(last.name, _reduce(values, weights, how), options, last.metric)


def _reduce(values: list[Any], weights: list[int], how: str) -> Any:
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], dict):
        return {key: _reduce([value[key] for value in values], weights, how) for key in values[0]}
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    if how == "sum":
        return stacked.sum(0)
    if how in ("min", "max"):
        return stacked.amin(0) if how == "min" else stacked.amax(0)
    if not stacked.is_floating_point():
        stacked = stacked.to(torch.get_default_dtype())
    shape = (-1, *([1] * (stacked.ndim - 1)))
    fractions = torch.tensor(weights, dtype=stacked.dtype, device=stacked.device) / max(sum(weights), 1)
    return (stacked * fractions.reshape(shape)).sum(0)


def _reduction(reduce_fx: Any) -> str:
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    return str(name).lower()


def _is_metric(value: Any) -> bool:
    return hasattr(value, "_forward_cache") and hasattr(value, "compute") and isinstance(value, nn.Module)
