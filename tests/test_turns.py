"""Trials of several plans take turns, and end together when one of them fails."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_hetpipe as hp
from lightning_hetpipe import trial, turns
from lightning_hetpipe.errors import RankFailedError
from tests.helpers.pipelines import QUIET, hand_plan

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]
BATCHES = (16, 12)  # tell the two plans apart


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def plans() -> list[hp.Plan]:
    return [hand_plan(network(), (torch.zeros(batch, 8),), 2) for batch in BATCHES]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[tuple[int, int]]]:
    """Process group and samples of every step that any trial begins."""
    path = tmp_path / "steps"

    def note(module: Any, batch: Any, batch_idx: int) -> None:
        if module.trainer.is_global_zero:
            with path.open("a") as file:
                file.write(f"{os.getpgrp()} {len(batch[0])}\n")

    def noted() -> list[tuple[int, int]]:
        return [(int(a), int(b)) for a, b in map(str.split, path.read_text().splitlines())]

    monkeypatch.setattr(trial._Classifier, "on_train_batch_start", note)
    return noted


def living(groups: set[int]) -> list[str]:
    """Processes of these groups that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            found += [path.parent.name] if int(group) in groups and state not in "ZX" else []
    return found


def assert_gone(groups: set[int]) -> None:
    assert groups
    deadline_s = time.monotonic() + 5
    while living(groups) and time.monotonic() < deadline_s:  # who was killed takes a moment
        time.sleep(0.05)
    assert living(groups) == []


def test_trials_run_one_at_a_time_and_in_turn(
    steps: Callable[[], list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29534")  # as an earlier fit in this process leaves it
    tried = turns.take_turns(network(), [(8,)], 4, plans(), rounds=2, steps=2)
    blocks = [(batch, len(list(block))) for batch, block in groupby(batch for _, batch in steps())]
    assert blocks == 3 * [(16, 3), (12, 3)]  # the first step of a turn warms up
    assert_gone({group for group, _ in steps()})
    for each, batch in zip(tried, BATCHES):
        assert len(each.turns_s) == 2
        assert min(each.turns_s) <= each.step_s <= max(each.turns_s)
        assert {f"0F{m}" for m in range(batch // 4)} <= {span.action for span in each.timeline.spans}
        assert len(each.timeline.peak_memory_bytes) == 2


def test_a_turn_lasts_until_the_slowest_rank_s_optimizer_has_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            if int(os.environ["LOCAL_RANK"]) == 1:
                time.sleep(0.2)
            return super().step(*args, **kwargs)

    monkeypatch.setattr(
        trial._Classifier, "configure_optimizers", lambda module: Slow(module.parameters(), lr=0.1)
    )
    (tried,) = turns.take_turns(network(), [(8,)], 4, plans()[:1], rounds=1, steps=1)
    assert tried.step_s >= 0.2


def breaks(_: Any) -> None:
    raise ValueError("this network is broken")


def kills_its_rank(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kills_all_but_the_ranks(_: Any) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (breaks, "ValueError: this network is broken"),
        (kills_its_rank, "rank 0 was lost .SIGKILL."),
        (kills_all_but_the_ranks, "its process was killed"),
    ],
)
def test_a_trial_that_fails_ends_all_and_its_plan_is_named(
    steps: Callable[[], list[tuple[int, int]]],
    monkeypatch: pytest.MonkeyPatch,
    does: Callable[[Any], None],
    message: str,
) -> None:
    as_it_was = trial._Classifier.training_step

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and module.trainer.strategy.plan.batch_size == 12:
            does(module)
        return as_it_was(module, batch, batch_idx)

    monkeypatch.setattr(trial._Classifier, "training_step", step)
    name = r"plan 1 of 2 \(d1 \| d0, 1f1b, micro-batch 4\)"
    with pytest.raises(RankFailedError, match=f"trial of {name} failed: .*{message}"):
        turns.take_turns(network(), [(8,)], 4, plans(), rounds=2)
    assert {batch for _, batch in steps()} == {16, 12}
    assert_gone({group for group, _ in steps()})


def test_a_turn_that_does_not_end_ends_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hang(*_: Any) -> None:
        (tmp_path / str(os.getpgrp())).touch()
        time.sleep(60)

    monkeypatch.setattr(turns, "fit", hang)
    monkeypatch.setattr(turns, "_TURN_S", 2.0)
    monkeypatch.setattr(turns, "_GRACE_S", 0.5)
    with pytest.raises(RankFailedError, match=r"plan 0 of 2 .* took longer than 2 s for its turn"):
        turns.take_turns(network(), [(8,)], 4, plans(), rounds=2)
    assert_gone({int(path.name) for path in tmp_path.iterdir()})


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"steps": 0}, {"plans": []}])
def test_nothing_to_run_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give at least one of each"):
        turns.take_turns(network(), [(8,)], 4, **({"plans": plans()} | wrong))


def test_ratios_are_formed_round_by_round() -> None:
    def took(*turns_s: float) -> trial.Trial:
        return trial.Trial(0.0, hp.Timeline((), 0, "measured"), turns_s)

    drifting, twice_as_slow = took(1.0, 5.0, 2.0), took(2.0, 10.0, 4.0)
    assert turns.step_ratios(twice_as_slow, drifting) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        turns.step_ratios(took(1.0), drifting)
