"""TensorBoard shows the plan and the step, planned and measured."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_hetpipe as hp
from tests.helpers.pipelines import QUIET, Classifier, loader, pipeline, trainer

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]
TWO = {"name": "pair", "devices": [{"name": "left", "speed": 0.5}, {"name": "right", "speed": 0.5}]}


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0})
    found.Reload()
    return found


def texts(found: EventAccumulator) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in found.Tensors("hetpipe/plan/text_summary")]


def fit(strategy: Any, loggers: list[Any]) -> Any:
    monitor = hp.PipelineStatsMonitor(tolerance=1e9)
    run = trainer(strategy, 2, logger=loggers, callbacks=[monitor], log_every_n_steps=1)
    run.fit(Classifier(), loader())
    return run.strategy


def test_plan_and_step_are_written_as_planned_and_at_the_end_as_measured_too(tmp_path: Path) -> None:
    board, table = TensorBoardLogger(tmp_path / "board", version=0), CSVLogger(tmp_path / "table")
    strategy = fit(hp.HetPipeStrategy(TWO, start_method="fork", timeout_s=30), [board, table])
    found = events(Path(board.log_dir))
    planned, measured = texts(found)
    assert strategy.plan.table() in planned
    assert strategy.plan.why() in planned
    assert "simulated:" in planned
    assert "measured:" not in planned
    assert "simulated:" in measured
    assert "measured:" in measured
    first, last = found.Images("hetpipe/step")
    assert last.height > first.height  # one more picture below the first
    assert "hetpipe/step_s" in found.Tags()["scalars"]


def test_a_plan_without_a_profile_is_shown_and_its_step_once_it_was_measured(
    tmp_path: Path,
) -> None:
    board = TensorBoardLogger(tmp_path, version=0)
    fit(pipeline(Classifier(), 2), [board])
    found = events(Path(board.log_dir))
    planned, measured = texts(found)
    assert "why: written by hand" in planned
    assert "per step" not in planned
    assert "measured:" in measured
    assert len(found.Images("hetpipe/step")) == 1
