"""The pipeline of one run, as the strategy uses it: a training step, an evaluation step, a led hook.

    rank 0                                   other ranks
    user code ── module call ──► TRAIN  ──►  their stages' actions
    user code ── module call ──► FORWARD ─►  their stages' actions       as often as it is called
    user code ends ────────────► END    ──►  logs, outputs               or the error, on every rank
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.engine.control import Message
from lightning_hetpipe.engine.runtime import Context
from lightning_hetpipe.engine.session import Engine, sample_weights
from lightning_hetpipe.errors import RankFailedError
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.strategy.batch import count_samples, cut, join
from lightning_hetpipe.strategy.data import AbsentBatch
from lightning_hetpipe.strategy.exchange import Exchange, describe, unwrap
from lightning_hetpipe.strategy.gradients import Stash
from lightning_hetpipe.strategy.logs import LogCall, LogRecorder, merge, replay
from lightning_hetpipe.strategy.mirror import Mirrors
from lightning_hetpipe.strategy.readers import ForwardReader, TrainingReader
from lightning_hetpipe.strategy.steps import ModuleCall, StandIn
from lightning_hetpipe.timeline import Timeline
from lightning_hetpipe.tracing import Signature, TensorSpec, Traced, signature_of

Specs = dict[str, TensorSpec]


class Operation(IntEnum):
    """What rank 0's next message is about."""

    TRAIN = 1
    FORWARD = 2
    END = 3


class Pipeline:
    """Runs user code on rank 0 and the stages on all ranks.

    Args:
        module: The LightningModule, partitioned.
        stand_in: In place of the pipelined submodule.
        engine: With the plan installed.
        loss_reduction: ``mean`` or ``sum``.
        context: Entered around every forward (autocast).
        at_close: Undoes the set-up; told whether weights are to be whole again.
    """

    def __init__(
        self,
        module: Any,
        stand_in: StandIn,
        traced: Traced,
        plan: Plan,
        engine: Engine,
        exchange: Exchange,
        *,
        loss_reduction: str,
        context: Context,
        at_close: Callable[[bool], None],
    ) -> None:
        self.module, self.plan, self.engine = module, plan, engine
        self._stand_in, self._traced, self._exchange = stand_in, traced, exchange
        self._loss_reduction, self._context, self._at_close = loss_reduction, context, at_close
        self._recorder = LogRecorder(module)
        self._mirrors = Mirrors(module, lambda work: self.lead(work, "a metric's compute"))
        self._signatures: list[tuple[tuple[int, Signature], ...]] = []
        self._depth = 0

    @property
    def leading(self) -> bool:
        """Whether rank 0 runs user code now, while the other ranks serve it."""
        return self._depth > 0

    # Training

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], factor: float, *, free_previous: bool) -> Any:
        """One training step on all ranks.

        Args:
            args, kwargs: Of ``training_step``; the batch comes first.
            factor: What the gradient that arrives at the returned loss will be.
            free_previous: Whether gradients from before may be dropped at once.

        Returns:
            The loss, or a dict with it; its backward installs the gradients.
        """
        stash = Stash(self.module.parameters())
        with stash.collect(free_previous=free_previous):
            outcome = self._lead_training(args, kwargs, factor) if self._exchange.leads else self._follow(args)
        loss, extra, logs = outcome
        replay(self.module, logs, self._mirrors)
        installing = stash.as_loss(loss.to(self.engine.device), factor)
        return installing if extra is None else {"loss": installing, **extra}

    def _lead_training(self, args: tuple[Any, ...], kwargs: dict[str, Any], factor: float) -> Any:
        self._depth += 1
        try:
            outcome = self._run_training(args, kwargs, factor)
        except RankFailedError:
            raise
        except Exception as error:
            self._end(("error", describe(error)))
            raise
        finally:
            self._depth -= 1
        self._end(("value", outcome))
        return outcome

    def _run_training(self, args: tuple[Any, ...], kwargs: dict[str, Any], factor: float) -> Any:
        (name, batch), rest = _split(args, kwargs)
        n_samples = count_samples(batch)
        sizes = self.plan.slices(n_samples)

        def step(part: Any) -> Any:
            if name is None:
                return self.module.training_step(part, *rest, **kwargs)
            return self.module.training_step(**(kwargs | {name: part}))

        reader = TrainingReader(
            self._stand_in, self._traced.bind, self._recorder, step, "training_step", batch, sizes, factor
        )
        try:
            with self._context():
                firsts = {size: reader.start(sizes.index(size)) for size in dict.fromkeys(sizes)}
            specs = self._announce(Operation.TRAIN, sizes, firsts)
            self.engine.train_step(specs, weights=self._weights(sizes), reader=reader)
        finally:
            reader.abandon()
        return reader.outcome(self._weights(sizes))

    def _weights(self, sizes: Sequence[int]) -> tuple[float, ...]:
        return sample_weights(sizes) if self._loss_reduction == "mean" else (1.0,) * len(sizes)

    # Evaluation steps and led hooks

    def evaluate(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        """Runs an evaluation step on rank 0, its module calls on all ranks; gives its result to all."""
        if not self._exchange.leads:
            return self.lead(lambda: None, name, _split(args, kwargs)[0][1])
        batch = _split(args, kwargs)[0][1]
        return self.lead(lambda: step(*args, **kwargs), name, batch)

    def lead(self, work: Callable[[], Any], name: str, batch: Any = None) -> Any:
        """Runs user code on rank 0; what it logs, returns or raises is the same on every rank."""
        if self.leading:
            return work()
        if not self._exchange.leads:
            result, logs = self._follow((batch,))
        else:
            self._depth += 1
            try:
                with self._recorder.active(), self._stand_in.answered_by(self._forward):
                    result = work()
            except RankFailedError:
                raise
            except Exception as error:
                self._end(("error", describe(error)))
                raise
            finally:
                self._depth -= 1
                calls = self._recorder.take()
            logs = merge([calls], [_size_of(batch)])
            self._end(("value", (result, logs)))
        replay(self.module, logs, self._mirrors)
        return result

    def _forward(self, call: ModuleCall) -> Any:
        """Answers a module call of rank 0: in slices, forward only, by all ranks."""
        arguments = (call.args, call.kwargs)
        n_rows = count_samples(arguments)
        sizes = self.plan.slices(n_rows)
        bounds = [sum(sizes[:m]) for m in range(len(sizes) + 1)]
        inputs = [
            self._traced.bind(*cut(arguments, n_rows, start, stop)) for start, stop in zip(bounds, bounds[1:])
        ]
        firsts = {size: inputs[sizes.index(size)] for size in dict.fromkeys(sizes)}
        reader = ForwardReader(inputs)
        self.engine.forward(self._announce(Operation.FORWARD, sizes, firsts), reader=reader)
        return join(reader.outputs, sizes)

    # What is said between ranks

    def _announce(
        self, operation: Operation, sizes: Sequence[int], firsts: Mapping[int, Mapping[str, Tensor]]
    ) -> list[Specs]:
        """Tells all ranks what to run: how many samples, and which shapes (in full the first time only)."""
        signature = tuple((size, signature_of(inputs)) for size, inputs in firsts.items())
        known = signature in self._signatures
        if not known:
            self._signatures.append(signature)
        numbers = (sum(sizes), self._signatures.index(signature))
        self.engine.control.share(Message(operation, numbers, object=None if known else signature))
        return self._specs(sizes, signature)

    def _specs(self, sizes: Sequence[int], signature: tuple[tuple[int, Signature], ...]) -> list[Specs]:
        by_size = {size: self._traced.shapes(dict(inputs)) for size, inputs in signature}
        return [by_size[size] for size in sizes]

    def _follow(self, args: tuple[Any, ...]) -> Any:
        """Takes part in what rank 0 announces until its user code ends."""
        while True:
            message = self.engine.control.share()
            if message.operation == Operation.END:
                outcome, should_stop, n_samples = message.object
                for absent in args:
                    if isinstance(absent, AbsentBatch):
                        absent.n_samples = n_samples
                self.module.trainer.should_stop |= should_stop
                return unwrap(outcome)
            n_samples, number = message.integers
            if message.object is not None:
                self._signatures.append(message.object)
            sizes = self.plan.slices(n_samples)
            specs = self._specs(sizes, self._signatures[number])
            if message.operation == Operation.TRAIN:
                self.engine.train_step(specs, weights=self._weights(sizes))
            else:
                self.engine.forward(specs)

    def _end(self, outcome: Any, n_samples: int = 1) -> None:
        if self._exchange.world_size > 1:
            stop = bool(self.module.trainer.should_stop)
            self.engine.control.share(Message(Operation.END, object=(_to_cpu(outcome), stop, n_samples)))

    def gather_timeline(self) -> Timeline | None:
        """The last training step on all ranks, on every rank."""
        timeline: Timeline | None = self._exchange.broadcast(self.engine.gather_timeline())
        return timeline

    def close(self, *, whole: bool) -> None:
        """Ends the run: the module is as it was, with whole weights unless the run was interrupted."""
        self._stand_in.remove()
        self._at_close(whole)
