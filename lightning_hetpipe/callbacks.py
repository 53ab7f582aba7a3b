"""Logs how the pipeline does while it trains."""

import statistics
import time
import warnings
from typing import Any

from lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_hetpipe.plans import Plan
from lightning_hetpipe.timeline import Timeline


class PipelineStatsMonitor(Callback):
    """Logs ``hetpipe/...`` at the end of every training epoch.

    ``step_s`` is the median of the epoch's steps, optimizer included; ``images_per_s`` and
    ``predicted_step_s`` stand beside it. Each stage has ``stage<i>/busy`` (fraction of the step that its
    devices compute) and ``stage<i>/peak_memory_bytes``.

    Args:
        tolerance: Warns once when measured and predicted step time differ by more than this fraction.
    """

    def __init__(self, tolerance: float = 0.25) -> None:
        self.tolerance = tolerance
        self._warned = False
        self._steps_s: list[float] = []
        self._begin_s = 0.0

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps_s = []

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begin_s = time.monotonic()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps_s.append(time.monotonic() - self._begin_s)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plan: Plan | None = getattr(trainer.strategy, "plan", None)
        if plan is None or not self._steps_s:
            return
        step_s = statistics.median(self._steps_s)
        figures = _figures(plan, getattr(trainer.strategy, "timeline", None), step_s)
        pl_module.log_dict(figures, rank_zero_only=True)
        predicted_s = figures.get("hetpipe/predicted_step_s", 0.0)
        if trainer.is_global_zero and predicted_s and not self._warned:
            self._warn_about(step_s, predicted_s)

    def _warn_about(self, step_s: float, predicted_s: float) -> None:
        difference = step_s / predicted_s - 1
        if abs(difference) > self.tolerance:
            self._warned = True
            warnings.warn(
                f"a step takes {step_s:.4g} s, {difference:+.0%} from the predicted {predicted_s:.4g} s: the "
                "devices are not as they were when they were profiled. Is something else running on them? "
                "Profile again for a better plan.",
                stacklevel=2,
            )


def _figures(plan: Plan, timeline: Timeline | None, step_s: float) -> dict[str, float]:
    figures = {"step_s": step_s, "images_per_s": plan.batch_size / step_s}
    if plan.prediction is not None:
        figures["predicted_step_s"] = plan.prediction.step_s
    if timeline is not None:
        for stage, ranks in enumerate(plan.ranks_of_stage):
            figures[f"stage{stage}/busy"] = statistics.fmean(timeline.busy[rank] for rank in ranks)
            if timeline.peak_memory_bytes:
                peak = max(timeline.peak_memory_bytes[rank] for rank in ranks)
                figures[f"stage{stage}/peak_memory_bytes"] = float(peak)
    return {f"hetpipe/{name}": value for name, value in figures.items()}
