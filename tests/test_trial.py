"""How ``hetpipe train`` starts its ranks."""

import pickle
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_hetpipe as hp
from lightning_hetpipe import trial
from tests.helpers.pipelines import QUIET, hand_plan

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]


@pytest.mark.parametrize(("sees_gpu", "method"), [(False, "fork"), (True, "spawn")])
def test_ranks_are_not_forked_from_a_process_that_may_have_used_a_gpu(
    monkeypatch: pytest.MonkeyPatch, sees_gpu: bool, method: str
) -> None:
    started: list[Any] = []

    def fit(trainer: L.Trainer, module: Any, data: Any) -> None:
        started.append(trainer.strategy.options.start_method)
        pickle.dumps((trainer, module, data))  # what spawn hands to its processes
        trainer.strategy._timeline = hp.Timeline((), 2, "measured")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(L.Trainer, "fit", fit)
    monkeypatch.setattr(L.Trainer, "callback_metrics", {"hetpipe/step_s": 1.0})
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    plan = hand_plan(network, (torch.zeros(16, 8),), 2)
    trial.train_on_random_samples(network, [(8,)], 4, plan, 3)
    assert started == [method]


def test_a_trial_trains_the_plan_and_returns_the_measured_step() -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    plan = hand_plan(network, (torch.zeros(16, 8),), 2)
    tried = trial.train_on_random_samples(network, [(8,)], 4, plan, 3)
    assert tried.timeline.source == "measured"
    assert tried.step_s > 0
    assert {"0F0", "1F0", "1B3"} <= {span.action for span in tried.timeline.spans}


def test_one_step_alone_has_no_duration() -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(ValueError, match="steps=1: give at least 2"):
        trial.train_on_random_samples(network, [(8,)], 4, hand_plan(network, (torch.zeros(16, 8),), 2), 1)
