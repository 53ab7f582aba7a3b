"""The study of the largest batch runs plans and tells what they took."""

import argparse
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.helpers.pipelines import QUIET, hand_plan

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(request.config.rootpath / "recipes"))
    import largest_batch

    return largest_batch


def test_a_run_tells_its_seconds_and_its_fullest_device(study) -> None:
    options = argparse.Namespace(width=2, pixels=16, steps=2)
    plan = hand_plan(study.network(options.width), (torch.zeros(8, 3, 16, 16),), 2)
    cluster = study.cluster_of(["500MB", "500MB"])
    trains, told = study.run(replace(plan, cluster=cluster), options)
    assert trains
    assert "s per step, " in told
    assert "of 476.8 MiB on d" in told
