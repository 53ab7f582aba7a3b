"""Logs how the pipeline does while it trains."""

import logging
import statistics
import time
import warnings
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from lightning_hetpipe.planner.simulate import simulate
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.profiles import Profile
from lightning_hetpipe.report import draw_gantt
from lightning_hetpipe.timeline import Timeline, gantts

log = logging.getLogger(__name__)


class PipelineStatsMonitor(Callback):
    """Logs ``hetpipe/...`` at every training step from an epoch's second on.

    ``step_s`` is the median time from one step to the next, all included; ``images_per_s`` and
    ``predicted_step_s`` stand beside it. Each stage has ``stage<i>/busy`` (fraction of the step that its
    devices compute) and ``stage<i>/peak_memory_bytes``, as of the latest epoch's last step.

    A `TensorBoardLogger` also gets the plan as text and the step as a picture: when training begins as it was
    planned, and when it ends the planned and the measured one below each other.

    Args:
        tolerance: Warns once when measured and predicted step time differ by more than this fraction.
        warm_up_steps: The first steps of a fit, which do not count once there are others: memory is fresh
            and code is loaded then.
    """

    def __init__(self, tolerance: float = 0.25, *, warm_up_steps: int = 3) -> None:
        self.tolerance, self.warm_up_steps = tolerance, warm_up_steps
        self._warned = False
        self._begins_s: list[float] = []
        self._plan: Plan | None = None
        self._warm_up_left = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._warm_up_left = self.warm_up_steps
        _show_plan(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if getattr(trainer.strategy, "timeline", None) is not None:
            _show_plan(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._warm_up_left = max(0, self._warm_up_left - len(self._begins_s))
        self._begins_s = []

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begins_s.append(time.monotonic())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        plan: Plan | None = getattr(trainer.strategy, "plan", None)
        if plan is not self._plan:
            if self._plan is not None:  # refined: the steps so far were trials
                self._begins_s = []
            self._plan = plan
        if plan is None or len(self._begins_s) < 2:
            return
        figures = _figures(plan, getattr(trainer.strategy, "timeline", None), self._step_s())
        pl_module.log_dict(figures, on_step=True, on_epoch=False, rank_zero_only=True)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plan: Plan | None = getattr(trainer.strategy, "plan", None)
        if plan is None or plan.prediction is None or len(self._begins_s) < 2 or self._warned:
            return
        if trainer.is_global_zero:
            self._warn_about(self._step_s(), plan.prediction.step_s)

    def _step_s(self) -> float:
        # From start to start: rank 0 ends its own part of a step before the others end theirs.
        counted_s = self._begins_s[self._warm_up_left :]
        if len(counted_s) < 2:
            counted_s = self._begins_s
        return statistics.median(end_s - start_s for start_s, end_s in pairwise(counted_s))

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


def _show_plan(trainer: Trainer) -> None:
    """Writes the plan and the steps that are known to the TensorBoards of rank 0."""
    plan: Plan | None = getattr(trainer.strategy, "plan", None)
    boards = [each.experiment for each in trainer.loggers if isinstance(each, TensorBoardLogger)]
    if plan is None or not boards or not trainer.is_global_zero:
        return
    profile: Profile | None = getattr(trainer.strategy, "profile", None)
    measured: Timeline | None = getattr(trainer.strategy, "timeline", None)
    steps = [] if profile is None else [simulate(plan, profile)]
    steps += [] if measured is None else [measured]
    text = "\n\n".join([plan.table(), f"why: {plan.why()}", gantts(steps)])
    for board in boards:
        board.add_text("hetpipe/plan", f"```\n{text}\n```", trainer.global_step)
        if steps and find_spec("matplotlib") is None:
            log.info("TensorBoard gets no picture of the step: matplotlib is not installed")
        elif steps:
            names = [device.name for device in plan.cluster.devices]
            board.add_figure("hetpipe/step", draw_gantt(steps, names), trainer.global_step)


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
