"""What the recipes make of plans that ran in turn."""

import json
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import lightning_hetpipe as hp
from lightning_hetpipe.trial import Trial
from tests.helpers.pipelines import hand_plan


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.syspath_prepend(str(request.config.rootpath / "recipes"))


@pytest.fixture
def bench(recipes: None) -> ModuleType:
    import bench

    return bench


def plans(n: int) -> list[hp.Plan]:
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    plan = hand_plan(network, (torch.zeros(32, 8),), 2)
    return [replace(plan, micro_batch=size) for size in range(1, n + 1)]


def test_equal_plans_run_once_and_every_batch_of_plans_has_the_first_one(bench, monkeypatch) -> None:
    ran: list[list[int]] = []

    def take_turns(_: Any, __: Any, ___: Any, batch: list[hp.Plan], rounds: int, steps: int) -> list[Trial]:
        ran.append([plan.micro_batch for plan in batch])
        slowed = len(ran)  # the machine is slower in the second batch
        empty = hp.Timeline((), 0, "measured")
        return [Trial(1.0, empty, (float(slowed * plan.micro_batch),) * rounds) for plan in batch]

    monkeypatch.setattr(bench, "take_turns", take_turns)
    monkeypatch.setattr(bench, "AT_ONCE", 8)
    asked = [*plans(10), *plans(3)]
    measured = bench.run_in_turn(nn.Identity(), [(8,)], 4, asked, rounds=2, steps=2)
    assert ran == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 9, 10]]
    assert [each.ratio for each in measured] == [*range(1, 11), 1, 2, 3]


def test_few_plans_of_a_large_network_run_at_once(bench, monkeypatch) -> None:
    network = nn.Linear(10, 9)  # 99 weights
    monkeypatch.setattr(bench, "WEIGHTS_AT_ONCE", 300)
    ran: list[int] = []
    trial = Trial(1.0, hp.Timeline((), 0, "measured"), (1.0,))
    monkeypatch.setattr(
        bench, "take_turns", lambda *args: (ran.append(len(args[3])), [trial] * len(args[3]))[1]
    )
    bench.run_in_turn(network, [(8,)], 4, plans(6), rounds=1, steps=1)
    assert ran == [3, 3, 2]


def test_one_plan_alone_is_run(bench, monkeypatch) -> None:
    trial = Trial(1.0, hp.Timeline((), 0, "measured"), (1.0,))
    monkeypatch.setattr(bench, "take_turns", lambda *_: [trial])
    assert bench.run_in_turn(nn.Identity(), [(8,)], 4, plans(1), rounds=1, steps=1)[0].trial is trial


def row(asked: str, predicted_s: float, *ratios: float) -> Any:
    import sweep

    stages = (("a",),)
    return sweep.Row(asked, asked[0].isdigit(), 4, "1f1b", stages, predicted_s, predicted_s, ratios, ratios)


def test_predictions_of_the_sweep_are_summed_up(recipes) -> None:
    import sweep

    said = sweep.predictions("all", [row("4", 0.96, 1.0), row("8", 1.10, 1.0), row("16", 1.3, 1.0)])
    assert said.splitlines() == [
        "all: 3 plans",
        "  difference median 10.0%, worst 30.0%, 1 within 5%, 2 within 15%",
        "  relative   median 10.0%, worst 30.0%, 1 within 5%, 2 within 15%",
    ]


def test_auto_is_compared_round_by_round_and_a_kept_cell_is_read_back(recipes) -> None:
    import sweep

    rows = (
        row("reference", 1.0, 1.0, 1.0, 1.0),
        row("auto", 0.5, 0.5, 0.4, 0.6),
        row("M = stages", 0.6, 1.0, 0.8, 1.2),
        row("4 1f1b", 0.5, 0.45, 0.36, 0.54),
        row("8 1f1b", 0.7, 0.7, 0.7, 0.7),
    )
    cell = sweep.Cell("m", "c", 32, "keep", rows)
    assert cell.beside_best() == pytest.approx(0.9)
    assert cell.beside_as_stages() == pytest.approx(2.0)
    assert sweep.Cell.from_mapping(json.loads(json.dumps(asdict(cell)))) == cell
