import types

import pytest

from lightning_hetpipe.callbacks import PipelineStatsMonitor
from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.plans import Plan, Prediction, Stage
from lightning_hetpipe.timeline import Span, Timeline


def plan(step_s):
    cluster = Cluster.from_mapping({"name": "pair", "devices": [{"name": "fast"}, {"name": "old"}]})
    return Plan(
        cluster=cluster,
        layer_names=("conv", "fc"),
        stages=(Stage(0, 1, ("old",)), Stage(1, 2, ("fast",))),
        batch_size=8,
        micro_batch=4,
        schedule="1f1b",
        in_flight=(2, 1),
        prediction=Prediction(step_s=step_s, images_per_s=8 / step_s),
    )


class Module:
    def __init__(self):
        self.logged = {}

    def log_dict(self, figures, *, on_step, on_epoch, rank_zero_only):
        assert on_step
        assert not on_epoch
        assert rank_zero_only
        self.logged |= figures


def epoch(monitor, strategy, monkeypatch, step_s):
    clock = iter([0.0, step_s, 2 * step_s])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    trainer, module = types.SimpleNamespace(strategy=strategy, is_global_zero=True), Module()
    monitor.on_train_epoch_start(trainer, module)
    for index in range(3):
        monitor.on_train_batch_start(trainer, module, None, index)
        monitor.on_train_batch_end(trainer, module, None, None, index)
    monitor.on_train_epoch_end(trainer, module)
    return module.logged


def test_the_monitor_logs_each_stage_under_hetpipe(monkeypatch):
    timeline = Timeline((Span(0, "1F0", 0.0, 0.5), Span(1, "0F0", 0.0, 1.0)), 2, "measured", (10, 20))
    strategy = types.SimpleNamespace(plan=plan(1.0), timeline=timeline)
    assert epoch(PipelineStatsMonitor(), strategy, monkeypatch, 1.0) == {
        "hetpipe/step_s": 1.0,
        "hetpipe/images_per_s": 8.0,
        "hetpipe/predicted_step_s": 1.0,
        "hetpipe/stage0/busy": 1.0,
        "hetpipe/stage0/peak_memory_bytes": 20.0,
        "hetpipe/stage1/busy": 0.5,
        "hetpipe/stage1/peak_memory_bytes": 10.0,
    }


def test_the_monitor_warns_once_when_the_prediction_is_off_by_more_than_a_quarter(monkeypatch, recwarn):
    strategy, monitor = types.SimpleNamespace(plan=plan(1.0), timeline=None), PipelineStatsMonitor()
    epoch(monitor, strategy, monkeypatch, 1.2)
    with pytest.warns(UserWarning, match=r"takes 1.4 s, \+40% from the predicted 1 s"):
        epoch(monitor, strategy, monkeypatch, 1.4)
    epoch(monitor, strategy, monkeypatch, 1.4)
    assert len(recwarn) == 0


def test_the_monitor_is_silent_under_other_strategies(monkeypatch):
    assert epoch(PipelineStatsMonitor(), types.SimpleNamespace(), monkeypatch, 1.0) == {}


def test_the_steps_before_a_plan_was_refined_do_not_count(monkeypatch):
    strategy = types.SimpleNamespace(plan=plan(1.0), timeline=None)
    monitor = PipelineStatsMonitor()
    assert epoch(monitor, strategy, monkeypatch, 1.0)["hetpipe/step_s"] == 1.0
    clock = iter([0.0, 7.0, 14.0, 16.0, 18.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    trainer, module = types.SimpleNamespace(strategy=strategy, is_global_zero=True), Module()
    monitor.on_train_epoch_start(trainer, module)
    for index in range(5):
        monitor.on_train_batch_start(trainer, module, None, index)
        if index == 1:
            strategy.plan = plan(2.0)
        monitor.on_train_batch_end(trainer, module, None, None, index)
    assert module.logged["hetpipe/step_s"] == 2.0
