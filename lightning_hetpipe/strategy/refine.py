"""The measured refinement of a plan: its rivals take turns in the first full batches of a run.

batch    0    1    2    3    4    5    6    7    8
plan     p    a    b    p    a    b    p    a    b     then the fastest, to the end
         first round: warm-up; the others are timed, from rank 0's first action to every rank's last

Every batch trains as it would have: the order of work does not enter the gradients, and the micro-batch size
does not where samples are independent. Where the first batch shows that they are not, the size stays.
"""

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetpipe.plans import Plan
from lightning_hetpipe.stage.batchnorm import FrozenBatchNorm
from lightning_hetpipe.text import format_seconds

_ROUNDS = 3  # the first one is a warm-up
SEES = "BatchNorm normalises each micro-batch, so the size was kept"
_GAIN = 0.03  # what a rival must save, as a fraction of the step; less is noise


@dataclass(frozen=True)
class Trial:
    """What a rank noticed in a step.

    Attributes:
        statistics: Buffers of its layers changed: they keep something of every micro-batch.
        draws: Random numbers were drawn.
        reader_draws: They were drawn before the pipelined module was called (rank 0).
    """

    statistics: bool
    draws: bool
    reader_draws: bool = False


@dataclass(frozen=True)
class Verdict:
    """The plan that goes on, by its place among the plans, and why."""

    index: int
    reason: str


def sees_micro_batches(module: nn.Module) -> bool:
    """Whether a BatchNorm of the module normalises by the samples of a micro-batch."""
    return any(
        isinstance(layer, _BatchNorm)
        and not isinstance(layer, FrozenBatchNorm)
        and (layer.training or layer.running_mean is None)
        for layer in module.modules()
    )


class Watch:
    """Notices what a step does to the buffers and random numbers of this rank."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers, self._generators = self._look()

    def drew(self) -> bool:
        """Whether random numbers were drawn since."""
        return _generators() != self._generators

    def trial(self, *, reader_draws: bool = False) -> Trial:
        """What happened since."""
        buffers, generators = self._look()
        return Trial(buffers != self._buffers, generators != self._generators, reader_draws)

    def _look(self) -> tuple[list[tuple[int, int]], bytes]:
        buffers = [  # inference tensors count no versions
            (id(each), 0 if each.is_inference() else each._version) for each in self._module.buffers()
        ]
        return buffers, _generators()


def _generators() -> bytes:
    """The states of the random-number generators, comparable."""
    _, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    states: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate(), keys.tobytes(), rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return pickle.dumps(states)


class Refinement:
    """Whose turn it is, and who was fastest. On rank 0; the others do as its headers say.

    Args:
        plans: The planned one, and its rivals.
        kept: Why no rival has another micro-batch size, where that is known already.
    """

    def __init__(self, plans: Sequence[Plan], kept: str = "") -> None:
        self.plans = tuple(plans)
        self._open = list(range(len(plans))) if len(plans) > 1 else []
        self._turns = [index for _ in range(_ROUNDS) for index in self._open]
        self._seconds: dict[int, list[float]] = {index: [] for index in self._open}
        self._kept = kept

    def turn(self, n_samples: int) -> int | None:
        """The plan whose turn it is; None when the trials are over, or the batch is not a full one."""
        if not self._turns or n_samples != self.plans[0].batch_size:
            return None
        return self._turns[0]

    def note(self, seconds: float, trials: Sequence[Trial]) -> Verdict | None:
        """Takes what the step of `turn` took, and what all ranks noticed; the last one brings the verdict."""
        index = self._turns.pop(0)
        self._seconds[index].append(seconds)
        self._exclude(trials)
        return None if self._turns else self._verdict()

    def _exclude(self, trials: Sequence[Trial]) -> None:
        """Leaves out the rivals that would train something else."""
        planned = self.plans[0]
        if any(trial.reader_draws for trial in trials):
            self._kept = (
                "the step draws random numbers before it calls the module, in an order that would move"
            )
            self._open = [0]
        elif any(trial.statistics or trial.draws for trial in trials):
            what = "keep statistics" if any(trial.statistics for trial in trials) else "draw random numbers"
            self._kept = f"its layers {what} by micro-batch, so the size was kept"
            same = [i for i in self._open if self.plans[i].micro_batch == planned.micro_batch]
            self._open = same
        self._turns = [index for index in self._turns if index in self._open]
        if self._open == [0]:
            self._turns = []

    def _verdict(self) -> Verdict:
        # The first one warmed up; where the plan's own first step left all rivals out there is no other.
        best = {index: min(self._seconds[index][1:], default=float("inf")) for index in self._open}
        if len(best) == 1:
            return Verdict(0, f"not refined: {self._kept}")
        index = min(best, key=lambda each: best[each])
        if best[index] > (1 - _GAIN) * best[0]:
            index = 0
        steps = sum(map(len, self._seconds.values()))
        rows = ", ".join(
            f"{_describe(self.plans[each])}{' (planned)' if each == 0 else ''} {format_seconds(seconds)}"
            for each, seconds in sorted(best.items(), key=lambda item: item[1])
        )
        text = f"measured in the first {steps} steps: {rows}; goes on with {_describe(self.plans[index])}"
        return Verdict(index, f"{text}; {self._kept}" if self._kept else text)


def _describe(plan: Plan) -> str:
    flight = f" k={','.join(map(str, plan.in_flight))}" if plan.schedule == "1f1b" else ""
    return f"micro-batch {plan.micro_batch} {plan.schedule}{flight}"


def settled(plans: Sequence[Plan], verdict: Verdict) -> Plan:
    """The plan in force after a verdict, with the reason for it."""
    plan = plans[verdict.index]
    reason = f"{plans[0].reason}; {verdict.reason}" if plans[0].reason else verdict.reason
    return replace(plan, reason=reason, alternatives=plans[0].alternatives)
