"""Metrics whose state lives on rank 0, seen from every rank.

User code runs on rank 0 only, so a ``torchmetrics.Metric`` of the module is updated there and nowhere
else. What Lightning logs on every rank is a mirror of it: ``compute`` runs on rank 0 and its result is
shared. Lightning computes logged metrics on all ranks in the same order, which makes that safe.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric

# Runs a function on rank 0 and gives its result to every rank.
Share = Callable[[Callable[[], Any]], Any]


class MirroredMetric(Metric):
    """Reads as the metric of rank 0, on every rank."""

    full_state_update = False

    def __init__(self, target: Metric, share: Share) -> None:
        super().__init__(sync_on_compute=False, compute_with_cache=False)
        self._target = [target]  # in a list, so that the target does not become a submodule
        self._share = share
        self._update_count = 1  # the target counts; this keeps torchmetrics from warning about the mirror

    def update(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the target is updated by the user's step."""

    def compute(self) -> Any:
        return self._share(self._target[0].compute)

    def reset(self) -> None:
        self._target[0].reset()


class Mirrors:
    """The mirrors of a module's metrics, made when first logged."""

    def __init__(self, module: nn.Module, share: Share) -> None:
        self._module = module
        self._share = share
        self._mirrors: dict[str, MirroredMetric] = {}

    def of(self, name: str, step_value: Any) -> MirroredMetric:
        """The mirror of the metric at this attribute path, with the value of the step just run."""
        if name not in self._mirrors:
            target = self._module.get_submodule(name)
            assert isinstance(target, Metric)
            self._mirrors[name] = MirroredMetric(target, self._share)
        mirror = self._mirrors[name]
        mirror._forward_cache = step_value
        return mirror


@contextmanager
def uncached(trainer: Any) -> Iterator[None]:
    """Forgets what rank 0 alone computes of mirrored metrics inside, so that all ranks compute it later."""
    try:
        results = trainer._results
    except RuntimeError:  # no loop is active
        results = None
    open_results = [
        result
        for result in (results or {}).values()
        if isinstance(result.value, MirroredMetric) and result._computed is None
    ]
    try:
        yield
    finally:
        for result in open_results:
            result._computed = None


def keep_local(module: nn.Module) -> None:
    """Stops the module's metrics from gathering over all ranks: only rank 0 has anything to say."""
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.distributed_available_fn = _alone


def _alone() -> bool:
    return False
