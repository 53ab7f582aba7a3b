"""A member of a group that fails or dies is named by everybody, with its action and micro-batch."""

import os
import re
import signal
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from lightning_hetpipe.engine.control import Message
from lightning_hetpipe.engine.membership import Membership
from lightning_hetpipe.engine.session import Engine, sample_weights
from tests.engine.test_groups import PLACES, batch_of, install
from tests.helpers.outcomes import Outcome, messages, outcomes
from tests.helpers.toy import Toy, ToyReader, specs

SIZES = (6, 6, 6)  # the smaller member of 5:1 has one sample of each
PATIENCE_S = 30.0  # less than the engine's own timeout
CHANNELS, SAMPLES = "channels first", "samples first"  # ranks 1 and 2 share stage 0, rank 0 has stage 1


class Trouble:
    """Ends the culprit at its second passage, which is micro-batch 1 of a step."""

    def __init__(self, how: str, at: int = 2) -> None:
        self.how, self.left = how, at

    def pass_by(self) -> None:
        self.left -= 1
        if self.left == 0:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("the user's fault")


class Doomed:
    """A stage that meets trouble before its forward or in its backward."""

    def __init__(self, stage: Any, where: str, trouble: Trouble) -> None:
        self._stage, self._where, self._trouble = stage, where, trouble

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._where == "F":
            self._trouble.pass_by()
        made: dict[str, Tensor] = self._stage(values)
        if self._where == "B":
            next(iter(made.values())).register_hook(lambda grad: self._trouble.pass_by())
        return made


def doom(engine: Engine, where: str, how: str) -> None:
    runtime = engine._installed
    if where in ("F", "B"):
        trouble = Trouble(how)
        runtime._stages = {index: Doomed(stage, where, trouble) for index, stage in runtime._stages.items()}
        return
    if where == "REDUCE_GRAD":
        trouble, reduce = Trouble(how, at=1), runtime._reduce

        def doomed(step: Any, action: Any) -> None:
            trouble.pass_by()
            reduce(step, action)

        runtime._run = {kind: doomed if str(kind) == where else run for kind, run in runtime._run.items()}
        return
    # In a collective that has begun: the others are, or will be, inside it.
    trouble, allreduce = Trouble(how, at=2 if where == "collective of F" else 1), Membership.allreduce

    def begun(self: Membership, tensors: list[Tensor]) -> Any:
        work = allreduce(self, tensors)
        trouble.pass_by()
        return work

    Membership.allreduce = begun  # type: ignore[method-assign]  # in this process alone


def run(rank: int, store: Store, place: str, culprit: int, where: str, how: str) -> None:
    torch.set_num_threads(1)
    engine, toy = Engine(store, rank, PLACES[place][0], timeout_s=60.0), Toy()
    install(engine, toy, place, "1f1b")
    if rank == culprit:
        doom(engine, where, how)
    known = [specs(size, head=True) for size in SIZES]
    try:
        for _ in range(2):  # who dies after its last word in a step is missed in the next one
            reader = ToyReader(toy, batch_of(sum(SIZES)), SIZES, True) if rank == 0 else None
            engine.control.share(Message(5) if rank == 0 else None)
            engine.train_step(known, weights=sample_weights(SIZES), reader=reader)
    except Exception as error:
        engine.fail(error)
        raise
    finally:
        engine.close()


def check(found: list[Outcome], culprit: int, how: str, action: str) -> None:
    for text in messages(found, culprit, how):
        if how == "raise":
            assert text == f"rank {culprit} failed in {action}: ZeroDivisionError: the user's fault"
        else:
            # Its last action is known where a wait for it broke, or where it had told in time.
            assert re.match(rf"rank {culprit} was lost( in |:)", text), text


CASES = [
    (CHANNELS, 1, "F", "0F1 (micro-batch 1)"),
    (CHANNELS, 2, "B", "0B1 (micro-batch 1)"),
    (CHANNELS, 2, "REDUCE_GRAD", "0REDUCE_GRAD"),
    (CHANNELS, 2, "collective of F", "0F1 (micro-batch 1)"),
    (SAMPLES, 2, "F", "0F1 (micro-batch 1)"),
    (SAMPLES, 1, "B", "0B1 (micro-batch 1)"),
    (SAMPLES, 1, "REDUCE_GRAD", "0REDUCE_GRAD"),
    (SAMPLES, 2, "collective of REDUCE_GRAD", "0REDUCE_GRAD"),
]


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize(("place", "culprit", "where", "action"), CASES)
def test_a_member_in_trouble_is_named_by_all_others(
    place: str, culprit: int, where: str, action: str, how: str
) -> None:
    found = outcomes(3, run, place, culprit, where, how, timeout_s=PATIENCE_S)
    check(found, culprit, how, action)
