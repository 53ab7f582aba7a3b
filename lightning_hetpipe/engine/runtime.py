"""Executes this rank's action list.

    rank 0   rF0  rSEND_F0  rF1  rSEND_F1  2RECV_F0  2F0  2B0  2SEND_B0 ...      reader and last stage
    rank 1   0RECV_F0  0F0  0SEND_F0 ...  0RECV_B0  0B0 ...  0REDUCE_GRAD

Every stage computes on its own autograd graph: values are cut from the producer's where they enter,
and the gradients found there are what the backward hands on.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from lightning_hetpipe.engine.control import Control
from lightning_hetpipe.engine.emulate import Emulator
from lightning_hetpipe.engine.message import Specs
from lightning_hetpipe.engine.order import taken_sends
from lightning_hetpipe.engine.transport import Transport
from lightning_hetpipe.errors import MemoryLimitError, RankFailedError, UnsupportedError
from lightning_hetpipe.graph import READER
from lightning_hetpipe.profiling.measure import settle
from lightning_hetpipe.schedule.action import Action, Kind, Schedule
from lightning_hetpipe.timeline import Span

Values = dict[str, Tensor]
Where = tuple[int, int]  # stage and micro-batch
Context = Callable[[], AbstractContextManager[Any]]


class Stage(Protocol):
    """A run of layers: named values in, named values out.

    One whose rows are empty may make nothing.
    """

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class LastStage(Stage, Protocol):
    """The stage that also makes what the pipelined module returns."""

    def output(self, values: Mapping[str, Tensor]) -> Any: ...


class Reader(Protocol):
    """Rank 0's user step, suspended where it calls the pipelined module."""

    def start(self, m: int) -> Mapping[str, Tensor]:
        """Runs the step of a micro-batch up to the call; returns the graph's inputs by name."""

    def finish(self, m: int, output: Any) -> Tensor:
        """Hands the module's output to the step; returns its loss, unweighted.

        In a forward-only run the return value is ignored.
        """

    def backward(self, m: int, grads: Mapping[str, Tensor]) -> None:
        """Takes the gradients of those inputs that require one; not called if none does."""


@dataclass(frozen=True)
class SharedGradients:
    """Parameters that several ranks hold, whose gradients they sum after a stage's last backward.

    Attributes:
        stage: This rank's stage that uses them.
        ranks: All holders.
        parameters: In one order on all holders.
        counts: False where this rank has the same gradient as another holder, and adds nothing.
    """

    stage: int
    ranks: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    counts: bool = True


@dataclass
class _Step:
    """What is under way in one step."""

    schedule: Schedule
    specs: Sequence[Specs]
    reader: Reader | None
    weights: Sequence[float]
    arrived: dict[Where, Values] = field(default_factory=dict)  # inputs of a stage
    leaving: dict[tuple[int, int, int], Values] = field(default_factory=dict)  # source, target, micro-batch
    saved: dict[Where, tuple[Values, Values]] = field(default_factory=dict)  # outputs, input gradients
    gradients: dict[Where, Values] = field(default_factory=dict)  # of a stage's outputs
    losses: dict[int, Tensor] = field(default_factory=dict)
    weighted: dict[int, Tensor] = field(default_factory=dict)


class Runtime:
    """Runs schedules on this rank's stages.

    Args:
        stages: This rank's, by index.
        n_stages: Of the whole pipeline.
        context: Entered around the forward of every stage and of the reader (autocast).
        shared: Parameters whose gradients are summed over ranks.
        reductions: What else the groups of these stages do after their last backward.
    """

    def __init__(
        self,
        control: Control,
        transport: Transport,
        emulator: Emulator,
        stages: Mapping[int, Stage],
        *,
        n_stages: int,
        context: Context = nullcontext,
        shared: Sequence[SharedGradients] = (),
        reductions: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        self._reductions = reductions or {}
        self._control, self._transport, self._emulator = control, transport, emulator
        self._stages, self._last, self._context, self._shared = stages, n_stages - 1, context, shared
        self._taken: dict[Any, tuple[Schedule, list[tuple[Action, ...]]]] = {}
        self.spans: list[Span] = []  # of the last step, in this host's monotonic clock
        self._run: dict[Kind, Callable[[_Step, Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive_values,
            Kind.RECV_B: self._receive_gradients,
            Kind.REDUCE_GRAD: self._reduce,
        }

    def run(
        self,
        schedule: Schedule,
        specs: Sequence[Specs],
        *,
        reader: Reader | None = None,
        weights: Sequence[float] = (),
    ) -> tuple[Tensor, ...]:
        """Executes a schedule; gradients are added to ``.grad`` of this rank's parameters.

        Args:
            specs: Per micro-batch, every value that travels.
            reader: On rank 0.
            weights: Per micro-batch, what its loss is multiplied by before the backward.

        Returns:
            On rank 0 in training the unweighted, detached losses by micro-batch; else nothing.

        Raises:
            RankFailedError: Another rank failed, was lost or did not answer in time.
            Exception: What an action of this rank raised, with a note that names the action.
        """
        step = _Step(schedule, specs, reader, weights)
        actions, taken = schedule.actions[self._control.rank], self._proofs(schedule, specs)
        self.spans = []
        self._transport.begin(actions, specs)
        with torch.enable_grad() if schedule.training else torch.no_grad():
            for action, sends in zip(actions, taken, strict=True):
                with self._reported(action):
                    self._run[action.kind](step, action)
                    self._transport.release(sends)
        self._control.doing = "the end of the step"
        self._transport.end()
        return tuple(loss for _, loss in sorted(step.losses.items()))

    @contextmanager
    def _reported(self, action: Action) -> Any:
        """Names the action in the profile, the timeline, and any error."""
        self._control.check()
        self._control.doing = str(action)
        start_s = time.monotonic()
        try:
            with torch.profiler.record_function(str(action)), self._control.blaming():
                yield
                settle(self._transport.device)
        except RankFailedError:
            raise
        except BaseException as error:
            cause = self._emulator.out_of_memory(error)
            self._emulator.lift_memory_limit()
            where = f"rank {self._control.rank} in {action}"
            if cause is not None:
                shortage = MemoryLimitError(f"{where}: {cause}")
                self._control.fail(shortage, str(action))
                raise shortage from error
            self._control.fail(error, str(action))
            error.add_note(f"raised by {where}" + _of_micro_batch(action))
            raise
        span = Span(self._control.rank, str(action), start_s, time.monotonic(), action.kind.is_compute)
        self.spans.append(span)

    def _forward(self, step: _Step, action: Action) -> None:
        stage, m = _where(action)
        with self._emulator.section(), self._context():
            if stage == READER:
                assert step.reader is not None
                made = dict(step.reader.start(m))
            else:
                made = self._forward_stage(step, stage, m)
        for (source, target), route in self._transport.routes.items():
            if source == stage:
                values = {
                    name: made[name].detach()
                    if name in made
                    else self._transport.empty(name, stage, step.specs[m])
                    for name in route.values
                }
                if self._transport.is_local(source, target):
                    step.arrived.setdefault((target, m), {}).update(values)
                else:
                    step.leaving[source, target, m] = values

    def _forward_stage(self, step: _Step, stage: int, m: int) -> Values:
        inputs = step.arrived.pop((stage, m), {})
        gradients: Values = {}
        if step.schedule.training:
            inputs = {
                name: _Enter.apply(_anchor(), gradients, name, value)
                if step.specs[m][name].requires_grad
                else value
                for name, value in inputs.items()
            }
        made = dict(self._stages[stage](inputs))
        if stage == self._last:
            assert step.reader is not None
            last = cast(LastStage, self._stages[stage])
            loss = step.reader.finish(m, last.output(inputs | made))
            if step.schedule.training:
                step.losses[m], step.weighted[m] = loss.detach(), loss * step.weights[m]
        if step.schedule.training:
            step.saved[stage, m] = made, gradients
        return made

    def _backward(self, step: _Step, action: Action) -> None:
        stage, m = _where(action)
        arrived = step.gradients.pop((stage, m), {})
        if stage == READER:
            assert step.reader is not None
            if arrived:
                with self._emulator.section():
                    step.reader.backward(m, arrived)
            return
        made, found = step.saved.pop((stage, m))
        with self._emulator.section():
            if stage == self._last:
                # The step behind the module may share its graph with the step before it.
                torch.autograd.backward([step.weighted.pop(m)], retain_graph=self._reader_learns(step, m))
            else:
                pairs = [
                    (made[name], grad)
                    for name, grad in arrived.items()
                    if name in made and made[name].requires_grad
                ]
                if pairs:
                    torch.autograd.backward([made for made, _ in pairs], [grad for _, grad in pairs])
        del made
        for (source, target), route in self._transport.routes.items():
            if target == stage:
                wanted = [name for name in route.gradients if step.specs[m][name].requires_grad]
                grads = {name: self._gradient(found, name, stage, step.specs[m]) for name in wanted}
                if self._transport.is_local(source, target):
                    _add(step.gradients.setdefault((source, m), {}), grads)
                else:
                    step.leaving[target, source, m] = grads

    def _send(self, step: _Step, action: Action) -> None:
        stage, m = _where(action)
        assert action.peer is not None
        self._transport.send(action, step.leaving.pop((stage, action.peer, m)), step.specs)

    def _receive_values(self, step: _Step, action: Action) -> None:
        values = self._transport.receive(action, step.specs)
        step.arrived.setdefault(_where(action), {}).update(values)

    def _receive_gradients(self, step: _Step, action: Action) -> None:
        grads = self._transport.receive(action, step.specs)
        _add(step.gradients.setdefault(_where(action), {}), grads)

    def _reduce(self, step: _Step, action: Action) -> None:
        for shared in self._shared:
            if shared.stage == action.stage:
                with torch.no_grad():
                    grads = [
                        torch.zeros_like(parameter)
                        if parameter.grad is None or not shared.counts
                        else parameter.grad
                        for parameter in shared.parameters
                    ]
                    sums = self._transport.sum_over(shared.ranks, grads, str(action.kind))
                for parameter, total in zip(shared.parameters, sums, strict=True):
                    parameter.grad = total
        if action.stage in self._reductions:
            self._reductions[action.stage]()

    def _gradient(self, found: Values, name: str, stage: int, specs: Specs) -> Tensor:
        if name in found:
            return found[name]
        return self._transport.empty(name, stage, specs).zero_()  # nothing that was computed depends on it

    def _reader_learns(self, step: _Step, m: int) -> bool:
        return any(
            step.specs[m][name].requires_grad
            for (source, _), route in self._transport.routes.items()
            if source == READER
            for name in route.gradients
        )

    def _proofs(self, schedule: Schedule, specs: Sequence[Specs]) -> list[tuple[Action, ...]]:
        # by identity, and by what is sent at all: which rows there are, which gradients return
        key = (
            id(schedule),
            tuple(tuple((spec.requires_grad, spec.shape[:1]) for spec in known.values()) for known in specs),
        )
        if key not in self._taken:
            for row in schedule.actions:
                for action in row:
                    if action.kind not in self._run:
                        raise UnsupportedError(
                            f"the runtime runs whole backwards (B); {action} is a part of one"
                        )
            self._taken[key] = (
                schedule,
                taken_sends(
                    schedule,
                    self._control.rank,
                    lambda send, sender, receiver: self._transport.carries(send, sender, receiver, specs),
                ),
            )
        return self._taken[key][1]


class _Enter(torch.autograd.Function):
    """Lets a value into a stage: a new tensor over the same memory, whose gradient is kept aside.

    It is no leaf, so the stage's first layer may work in place.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradients: Values, name: str, value: Tensor) -> Tensor:
        ctx.gradients, ctx.name = gradients, name
        return value.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.gradients[ctx.name] = grad
        return None, None, None, None


def _anchor() -> Tensor:
    return torch.empty(0, requires_grad=True)


def _add(total: Values, grads: Values) -> None:
    for name, grad in grads.items():
        total[name] = total[name] + grad if name in total else grad


def _where(action: Action) -> Where:
    assert action.micro_batch is not None
    return action.stage, action.micro_batch


def _of_micro_batch(action: Action) -> str:
    return "" if action.micro_batch is None else f" (micro-batch {action.micro_batch})"
