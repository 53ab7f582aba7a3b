"""When a rank fails, dies or stops, all others say who it was, and none of them hangs."""

import os
import signal
from typing import Any

import pytest
from torch import Tensor
from torch.distributed import Store

from lightning_hetpipe.engine.control import Message
from tests.engine.test_runtime_parity import engine_of, step
from tests.helpers.outcomes import Outcome, messages, outcomes
from tests.helpers.toy import ToyStage

PLACE = "four ranks, one idle"  # ranks 2, 3, 0 hold stages 0, 1, 2; rank 1 is idle
STAGE_OF_RANK = {2: 0, 3: 1, 0: 2}
PATIENCE_S = 25.0  # less than the engine's own timeout where nothing has to wait for that


class Trouble:
    """Does something bad once, on one rank, at one place of the second step."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.armed = False

    def happen(self) -> None:
        if not self.armed:
            return
        self.armed = False
        if self.how == "raise":
            raise ZeroDivisionError("the user's fault")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.how])


class BadStage(ToyStage):
    """A stage whose forward or backward of micro-batch 1 makes trouble."""

    where = ""
    trouble = Trouble("")
    calls = 0

    def __call__(self, values: Any) -> dict[str, Tensor]:
        self.calls += 1
        second = self.calls % 3 == 2  # three micro-batches
        if self.where == "F" and second:
            self.trouble.happen()
        made = super().__call__(values)
        if self.where == "B" and second:
            next(iter(made.values())).register_hook(lambda grad: self.trouble.happen())
        return made


def run(rank: int, store: Store, culprit: int, where: str, how: str, timeout_s: float) -> None:
    engine, toy = engine_of(rank, store, PLACE, timeout_s=timeout_s)
    trouble = Trouble(how)
    for stage in engine._installed._stages.values():
        if rank == culprit:
            stage.__class__ = BadStage  # type: ignore[assignment]
            stage.where, stage.trouble = where, trouble  # type: ignore[attr-defined]
    try:
        for index in range(3):
            trouble.armed = index == 1
            if rank == culprit and where == "header":
                trouble.happen()
            header = engine.control.share(Message(5, (index,)) if rank == 0 else None)
            assert header == Message(5, (index,))
            step(engine, toy, (2, 2, 1), True)
            if rank == culprit and where == "footer":
                trouble.happen()
            footer = engine.control.share(
                Message(6, floats=(0.5,), object={"loss": 1}) if rank == 0 else None
            )
            assert footer.object == {"loss": 1}
    except Exception as error:
        engine.fail(error)
        raise
    finally:
        engine.close()


def check(found: list[Outcome], culprit: int, how: str, expected: str) -> None:
    for text in messages(found, culprit, how):
        assert f"rank {culprit} " in text, text
        assert expected in text


RAISED = [(2, "F"), (3, "B"), (0, "F"), (0, "B"), (0, "header"), (1, "footer")]
KILLED = [(3, "F"), (2, "B"), (0, "B"), (0, "header"), (0, "footer"), (1, "header"), (3, "footer")]
STOPPED = [(3, "B"), (0, "header"), (1, "footer")]


@pytest.mark.parametrize(("culprit", "where"), RAISED)
def test_a_rank_that_raises_is_named_by_all_others(culprit: int, where: str) -> None:
    found = outcomes(4, run, culprit, where, "raise", 60.0, timeout_s=PATIENCE_S)
    action = f"{STAGE_OF_RANK[culprit]}{where}1 (micro-batch 1): " if where in "FB" else ""
    check(found, culprit, "raise", f"{action}ZeroDivisionError: the user's fault")
    if where in "FB":
        assert f"raised by rank {culprit} in {STAGE_OF_RANK[culprit]}{where}1" in found[culprit].notes[0]


@pytest.mark.parametrize(("culprit", "where"), KILLED)
def test_a_killed_rank_is_named_by_all_others(culprit: int, where: str) -> None:
    found = outcomes(4, run, culprit, where, "kill", 60.0, timeout_s=PATIENCE_S)
    check(found, culprit, "kill", "was lost")


@pytest.mark.parametrize(("culprit", "where"), STOPPED)
def test_a_stopped_rank_is_named_by_all_others_after_the_timeout(culprit: int, where: str) -> None:
    found = outcomes(4, run, culprit, where, "stop", 4.0, timeout_s=PATIENCE_S)
    check(found, culprit, "stop", "was lost")
