"""Trials of several plans that run in turn, so that a machine whose speed drifts treats them alike.

              ┌───── round 0 ─────┐┌──── round 1 ────┐
    plan 0    set-up ██                 ▒██                       ▒ a step that warms up; ██ some steps, until
    plan 1              set-up ██          ▒██                    the last rank has ended them; all other
    plan 2                        set-up ██   ▒██                 trials wait

All trials are there at the same time, each with its ranks. The caller's process hands the baton on: a trial
runs while it has it, and is stopped in between, because a rank that only waits still watches over the others.
The first turn of each is a warm-up, and so is the first step of each turn: ranks that were stopped have cold
caches.
"""

import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import lightning as L
from torch import nn
from typing_extensions import override

from lightning_hetpipe.errors import RankFailedError
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
from lightning_hetpipe.timeline import Timeline
from lightning_hetpipe.trial import Trial, fit, random_batches, start_method

WARM_UP_STEPS = 3  # of the first turn: memory is counted in two of them, which makes them slower
_TURN_S = 900.0  # the longest turn; the first one sets up
_WAITS_S = 24 * 3600.0  # how long the ranks of a trial may wait for its turn
_SETTLE_S = 0.1  # for ranks that were stopped to look after each other, before they are timed
_GRACE_S = 30.0  # for trials to end by themselves


def take_turns(
    network: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    n_classes: int,
    plans: Sequence[Plan],
    rounds: int = 5,
    steps: int = 2,
) -> list[Trial]:
    """Trains a classification on random samples under each plan, a few steps at a time, all plans in turn.

    Args:
        network: Takes one argument per shape, returns logits of shape ``[batch, n_classes]``.
        shapes: One sample of each argument, without the batch dimension.
        plans: All of them have their ranks' memory at the same time.
        rounds: Turns of each plan that count.
        steps: Optimizer steps of a turn that count.

    Returns:
        One trial per plan, in their order. The same index of ``turns_s`` is the same round.

    Raises:
        ValueError: No round, no step or no plan.
        RankFailedError: A trial failed, or its turn took longer than 15 minutes; names the plan. All trials
            have ended then.
    """
    if min(rounds, steps, len(plans)) < 1:
        raise ValueError(f"{len(plans)} plans, rounds={rounds}, steps={steps}: give at least one of each")
    lengths = (WARM_UP_STEPS, *[1 + steps] * rounds)
    trials: list[_Running] = []
    try:
        for index, plan in enumerate(plans):
            name = f"plan {index} of {len(plans)} ({_describe(plan)})"
            trials.append(_start(name, trials, network, shapes, n_classes, plan, lengths))
        turns = [[_turn(trials, each) for each in trials] for _ in lengths]
        for each in trials:  # one at a time as well: ranks that end get whole weights
            _finish(each)
    finally:
        _end(trials)
    return [_trial(own, steps) for own in zip(*turns)]


def step_ratios(trial: Trial, reference: Trial) -> tuple[float, ...]:
    """How long a step takes, in steps of a trial that ran in turn with it; one for each round."""
    return tuple(own / other for own, other in zip(trial.turns_s, reference.turns_s, strict=True))


@dataclass(frozen=True)
class _Turn:
    """What a trial says at the end of a turn; the timeline comes with the last one."""

    seconds: float
    timeline: Timeline | None


@dataclass(frozen=True)
class _Running:
    """A trial in a process of its own, which leads a process group with all its ranks."""

    name: str
    process: ForkProcess
    baton: Connection

    @cached_property
    def ended(self) -> int:
        """A file that can be read once the process has ended, whether its ranks live on or not.

        The process's sentinel is inherited by its ranks, so that it waits for them as well.
        """
        return os.pidfd_open(self.process.pid or 0) if hasattr(os, "pidfd_open") else self.process.sentinel

    def go_on(self) -> None:
        """Hands the baton over."""
        self.signal(signal.SIGCONT)
        time.sleep(_SETTLE_S)
        with suppress(OSError):  # it may have ended, which is seen when it is waited for
            self.baton.send(True)

    def signal(self, signum: signal.Signals) -> None:
        """To all processes of the trial that there are."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signum)


class _Gate(L.Callback):
    """Runs the steps of a turn, then hands the baton back and waits for it; on all ranks of a trial."""

    def __init__(self, baton: Connection, lengths: Sequence[int]) -> None:
        self._baton, self._begin_s = baton, 0.0
        self._ends = {sum(lengths[: turn + 1]) for turn in range(len(lengths))}
        self._warm = {1 + end for end in (0, *self._ends)}  # where the first step of a turn has ended

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 not in self._ends | self._warm:
            return
        trainer.strategy.barrier()  # the step has ended when the slowest rank's optimizer has
        if batch_idx + 1 in self._warm:
            self._begin_s = time.monotonic()
        elif trainer.is_global_zero:
            timeline = trainer.strategy.timeline  # type: ignore[attr-defined]
            self._baton.send(_Turn(time.monotonic() - self._begin_s, timeline))
            self._baton.recv()


def _start(name: str, others: Sequence[_Running], *work: Any) -> _Running:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    # A trial that holds no other end of a baton notices when this process is gone.
    foreign = [ours, *(other.baton for other in others)]
    process = context.Process(target=_run, args=(theirs, foreign, *work))
    process.start()
    theirs.close()
    with suppress(OSError):
        os.setpgid(process.pid or 0, process.pid or 0)  # as the process does itself; whoever is first
    return _Running(name, process, ours)


def _run(
    baton: Connection,
    foreign: Sequence[Connection],
    network: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    n_classes: int,
    plan: Plan,
    lengths: Sequence[int],
) -> None:
    """The process of one trial."""
    with suppress(OSError):
        os.setpgid(0, 0)
    for connection in foreign:
        connection.close()
    os.environ.pop("MASTER_PORT", None)  # of an earlier fit in the caller's process; each trial finds its own
    try:
        baton.recv()
        strategy = HetPipeStrategy(
            cluster=plan.cluster, plan=plan, start_method=start_method(), timeout_s=_WAITS_S
        )
        batches = random_batches(shapes, n_classes, plan.batch_size, sum(lengths))
        fit(network, strategy, batches, [_Gate(baton, lengths)])
    except BaseException:
        with suppress(OSError):  # nobody listens to a trial that ends because another one failed
            baton.send(traceback.format_exc())


def _turn(trials: Sequence[_Running], mine: _Running) -> _Turn:
    """Gives the baton to a trial and waits until it comes back."""
    mine.go_on()
    speakers: dict[Any, _Running] = {each.baton: each for each in trials}
    speakers |= {each.ended: each for each in trials}
    ready = wait(list(speakers), _TURN_S)
    if not ready:
        raise RankFailedError(f"the trial of {mine.name} took longer than {_TURN_S:g} s for its turn")
    said = _said(speakers[ready[0]])  # by any other than the one whose turn it is: that it has failed
    if said is None:
        raise _failure(speakers[ready[0]], "its process was killed")
    mine.signal(signal.SIGSTOP)
    return said


def _finish(trial: _Running) -> None:
    """Lets a trial end after its last turn."""
    trial.go_on()
    if not wait([trial.ended], _TURN_S):
        raise RankFailedError(f"the trial of {trial.name} took longer than {_TURN_S:g} s to end")
    _said(trial)


def _said(trial: _Running) -> _Turn | None:
    """The turn that a trial reports; None if it has nothing to say.

    Raises:
        RankFailedError: It reports a failure.
    """
    try:
        said: _Turn | str | None = trial.baton.recv() if trial.baton.poll() else None
    except (EOFError, OSError):  # all its processes have ended
        return None
    if isinstance(said, str):
        raise _failure(trial, said)
    return said


def _failure(trial: _Running, said: str) -> RankFailedError:
    error = RankFailedError(f"the trial of {trial.name} failed: {said.strip().splitlines()[-1]}")
    error.add_note(said)
    return error


def _end(trials: Sequence[_Running]) -> None:
    """Ends all trials: those that run by themselves, once nobody holds the other end of their baton."""
    for each in trials:
        each.baton.close()
        each.signal(signal.SIGCONT)
    deadline_s = time.monotonic() + _GRACE_S
    for each in trials:
        each.process.join(max(0.0, deadline_s - time.monotonic()))
        each.signal(signal.SIGKILL)
        each.process.join()
        if each.ended != each.process.sentinel:
            os.close(each.ended)
        each.process.close()


def _trial(turns: Sequence[_Turn], steps: int) -> Trial:
    turns_s = tuple(turn.seconds / steps for turn in turns[1:])
    timeline = turns[-1].timeline
    assert timeline is not None
    return Trial(statistics.median(turns_s), timeline, turns_s)


def _describe(plan: Plan) -> str:
    devices = " | ".join("+".join(stage.devices) for stage in plan.stages)
    return f"{devices}, {plan.schedule}, micro-batch {plan.micro_batch}"
