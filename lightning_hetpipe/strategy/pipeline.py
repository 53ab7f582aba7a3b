"""The pipeline of one run, as the strategy uses it: a training step, an evaluation step, a led hook.

rank 0                                   other ranks
user code ── module call ──► TRAIN  ──►  their stages' actions
user code ── module call ──► FORWARD ─►  their stages' actions       as often as it is called
user code ends ────────────► END    ──►  logs, outputs               or the error, on every rank
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_hetpipe.engine.control import Message
from lightning_hetpipe.engine.runtime import Context
from lightning_hetpipe.engine.session import Engine, MakeSchedule, sample_weights
from lightning_hetpipe.errors import RankFailedError, StepError
from lightning_hetpipe.plans import Plan, micro_batch_sizes
from lightning_hetpipe.profiles import Profile
from lightning_hetpipe.strategy.batch import count_samples, cut, join
from lightning_hetpipe.strategy.data import AbsentBatch
from lightning_hetpipe.strategy.exchange import Exchange, describe, unwrap
from lightning_hetpipe.strategy.gradients import Stash
from lightning_hetpipe.strategy.logs import LogCall, LogRecorder, merge, replay
from lightning_hetpipe.strategy.mirror import Mirrors, uncached
from lightning_hetpipe.strategy.partition import OwnerMap
from lightning_hetpipe.strategy.readers import ForwardReader, TrainingReader
from lightning_hetpipe.strategy.refine import Refinement, Verdict, Watch, settled
from lightning_hetpipe.strategy.steps import ModuleCall, StandIn
from lightning_hetpipe.timeline import Timeline
from lightning_hetpipe.tracing import Signature, TensorSpec, Traced, signature_of

Specs = dict[str, TensorSpec]

log = logging.getLogger(__name__)


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
        refinement: Of the plan, which is its first; without rivals where nothing is tried.
        lists: Makes the action lists of a plan.
        engine: With the plan installed.
        loss_reduction: ``mean`` or ``sum``.
        context: Entered around every forward (autocast).
        commit: Ends a batch for BatchNorm whose running statistics are updated once per batch.
        owners: Which rank holds what of the module.
        at_close: Undoes the set-up; told whether weights are to be whole again.
        profile: What the plan was made from, if that was in this run.
    """

    def __init__(
        self,
        module: Any,
        stand_in: StandIn,
        traced: Traced,
        refinement: Refinement,
        lists: Callable[[Plan], MakeSchedule],
        engine: Engine,
        exchange: Exchange,
        *,
        loss_reduction: str,
        context: Context,
        commit: Callable[[], None],
        owners: OwnerMap,
        at_close: Callable[[bool], None],
        profile: Profile | None,
    ) -> None:
        self.module, self.plan, self.engine, self.owners = module, refinement.plans[0], engine, owners
        self._refinement = refinement
        self._lists = [lists(plan) for plan in refinement.plans]
        self._in_force = 0  # among the plans of the refinement
        self.profile = profile
        self._stand_in, self._traced, self._exchange = stand_in, traced, exchange
        self._loss_reduction, self._context = loss_reduction, context
        self._commit, self._at_close = commit, at_close
        self._recorder = LogRecorder(module)
        self._mirrors = Mirrors(module, self.lead)
        self._signatures: list[tuple[tuple[int, Signature], ...]] = []
        self._depth = 0

    @property
    def leading(self) -> bool:
        """Whether rank 0 runs user code now, while the other ranks serve it."""
        return self._depth > 0

    # Training

    def train(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], factor: float, *, free_previous: bool
    ) -> Any:
        """One training step on all ranks.

        Args:
            args, kwargs: Of ``training_step``; the batch comes first.
            factor: What the gradient that arrives at the returned loss will be.
            free_previous: Whether gradients from before may be dropped at once.

        Returns:
            The loss, or a dict with it; its backward installs the gradients.
        """
        batch = _batch_of(args, kwargs)
        stash = Stash(self.module.parameters())
        with stash.collect(free_previous=free_previous):
            if self._exchange.leads:
                outcome = self._lead(lambda: self._run_training(args, kwargs, factor), batch)
            else:
                outcome = self._follow(batch)
        self._commit()
        loss, extra, logs, verdict = outcome
        if verdict is not None:
            self._settle(verdict)
        replay(self.module, logs, self._mirrors)
        installing = stash.as_loss(loss.to(self.engine.device), factor)
        return installing if extra is None else {"loss": installing, **extra}

    def _run_training(self, args: tuple[Any, ...], kwargs: dict[str, Any], factor: float) -> Any:
        batch = _batch_of(args, kwargs)
        n_samples = count_samples(batch)
        turn = self._refinement.turn(n_samples)
        index = self._in_force if turn is None else turn
        sizes = self._refinement.plans[index].slices(n_samples)

        def step(part: Any) -> Any:
            if args:
                return self.module.training_step(part, *args[1:], **kwargs)
            return self.module.training_step(
                **{key: part if value is batch else value for key, value in kwargs.items()}
            )

        reader = TrainingReader(
            self._stand_in, self._traced.bind, self._recorder, step, "training_step", batch, sizes, factor
        )
        watch, start_s = None if turn is None else Watch(self.module), time.monotonic()
        verdict = None
        try:
            with self._context():
                firsts = {size: reader.start(sizes.index(size)) for size in dict.fromkeys(sizes)}
            draws = watch is not None and watch.drew()
            specs = self._announce(Operation.TRAIN, sizes, firsts, index=index, tried=turn is not None)
            self.engine.train_step(specs, weights=self._weights(sizes), reader=reader)
            if watch is not None:
                trials = self.engine.control.gather(watch.trial(reader_draws=draws))
                assert trials is not None
                verdict = self._refinement.note(time.monotonic() - start_s, trials)
        finally:
            reader.abandon()
        return *reader.outcome(self._weights(sizes)), verdict

    def _settle(self, verdict: Verdict) -> None:
        """Ends the trials: one of the plans goes on."""
        self.plan, self._in_force = settled(self._refinement.plans, verdict), verdict.index
        rank_zero_info(verdict.reason)

    def _weights(self, sizes: Sequence[int]) -> tuple[float, ...]:
        return sample_weights(sizes) if self._loss_reduction == "mean" else (1.0,) * len(sizes)

    # Evaluation steps and led hooks

    def evaluate(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an evaluation step on rank 0, its module calls on all ranks; gives its result to all."""
        return self.lead(lambda: step(*args, **kwargs), _batch_of(args, kwargs))

    def lead(self, work: Callable[[], Any], batch: Any = None) -> Any:
        """Runs user code on rank 0; what it logs, returns or raises is the same on every rank.

        Args:
            batch: The one that the code is about, if it is.
        """
        if self.leading:
            return work()
        if not self._exchange.leads:
            result, logs = self._follow(batch)
        else:
            result, logs = self._lead(lambda: self._run_alone(work, batch), batch)
        replay(self.module, logs, self._mirrors)
        return result

    def _run_alone(self, work: Callable[[], Any], batch: Any) -> tuple[Any, list[LogCall]]:
        n_samples = None if batch is None else _size_of(batch)
        with self._recorder.active(), self._stand_in.answered_by(partial(self._forward, n_samples)):
            try:
                result = work()
            finally:
                calls = self._recorder.take()
        return result, merge([calls], [_size_of(batch)])

    def _lead(self, work: Callable[[], Any], batch: Any) -> Any:
        """Runs what only rank 0 runs, and tells the others how it ended."""
        self._depth += 1
        try:
            with uncached(self.module.trainer):
                outcome = work()
        except RankFailedError:
            raise
        except Exception as error:
            if not self.engine.control.failed:  # else an action failed, and all ranks know of it
                self._end(("error", describe(error)), batch)
            raise
        finally:
            self._depth -= 1
        self._end(("value", outcome), batch)
        return outcome

    def lead_hook(self, work: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """`lead` for a hook of the LightningModule."""
        return self.lead(work, next((each for each in args if isinstance(each, AbsentBatch)), None))

    def _forward(self, n_samples: int | None, call: ModuleCall) -> Any:
        """Answers a module call of rank 0: forward only, by all ranks, in slices where rows are samples."""
        n_rows = count_samples((call.args, call.kwargs))
        sizes = self.plan.slices(n_rows)
        inputs = self._sliced(call, sizes)
        if len(sizes) > 1 and (n_samples not in (None, n_rows) or not self._has_rows(call, inputs[0], sizes)):
            log.info("a call at %s runs in one piece: its rows are not the batch's samples", call.site)
            sizes = (n_rows,)
            inputs = self._sliced(call, sizes)
        firsts = {size: inputs[sizes.index(size)] for size in dict.fromkeys(sizes)}
        reader = ForwardReader(inputs)
        specs = self._announce(Operation.FORWARD, sizes, firsts, index=self._in_force)
        self.engine.forward(specs, reader=reader)
        return join(reader.outputs, sizes)

    def _sliced(self, call: ModuleCall, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
        arguments, bounds = (call.args, call.kwargs), [sum(sizes[:m]) for m in range(len(sizes) + 1)]
        return [
            self._traced.bind(*cut(arguments, bounds[-1], start, stop)) for start, stop in pairwise(bounds)
        ]

    def _has_rows(self, call: ModuleCall, first: Mapping[str, Tensor], sizes: Sequence[int]) -> bool:
        """Whether every output of the module has one row per row of its input, and nothing else grows."""
        whole, part = (
            self._shapes(signature_of(inputs), ())
            for inputs in (self._traced.bind(call.args, call.kwargs), first)
        )
        shapes = [(whole[v.name].shape, part[v.name].shape) for v in self._traced.graph.values if v.output]
        return all(
            len(full) > 0 and full[1:] == slice_[1:] and full[0] * sizes[0] == slice_[0] * sum(sizes)
            for full, slice_ in shapes
        )

    # What is said between ranks

    def _announce(
        self,
        operation: Operation,
        sizes: Sequence[int],
        firsts: Mapping[int, Mapping[str, Tensor]],
        *,
        index: int,
        tried: bool = False,
    ) -> list[Specs]:
        """Tells all ranks which plan to run on how many samples of which shapes (in full the first time)."""
        signature = tuple((size, signature_of(inputs)) for size, inputs in firsts.items())
        known = signature in self._signatures
        if not known:
            self._signatures.append(signature)
        numbers = (sum(sizes), self._signatures.index(signature), sizes[0], index, int(tried))
        self.engine.control.share(Message(operation, numbers, object=None if known else signature))
        self.engine.follow(self._lists[index])
        return self._specs(operation, sizes, signature)

    def _specs(
        self, operation: int, sizes: Sequence[int], signature: tuple[tuple[int, Signature], ...]
    ) -> list[Specs]:
        trainable = None if operation == Operation.TRAIN else ()
        by_size = {size: self._shapes(inputs, trainable) for size, inputs in signature}
        return [by_size[size] for size in sizes]

    def _shapes(self, inputs: Signature, trainable: tuple[str, ...] | None) -> Specs:
        return self._traced.shapes(
            dict(inputs), trainable, context=self._context(), device=self.engine.device
        )

    def _follow(self, batch: Any) -> Any:
        """Takes part in what rank 0 announces until its user code ends."""
        while True:
            message = self.engine.control.share()
            if message.operation == Operation.END:
                outcome, should_stop, n_samples = message.object
                if isinstance(batch, AbsentBatch):
                    batch.n_samples = n_samples
                self.module.trainer.should_stop |= should_stop
                return unwrap(outcome)
            n_samples, number, micro_batch, index, tried = message.integers
            if message.object is not None:
                self._signatures.append(message.object)
            sizes = micro_batch_sizes(n_samples, micro_batch)
            specs = self._specs(message.operation, sizes, self._signatures[number])
            self.engine.follow(self._lists[index])
            if message.operation == Operation.TRAIN:
                watch = Watch(self.module) if tried else None
                self.engine.train_step(specs, weights=self._weights(sizes))
                if watch is not None:
                    self.engine.control.gather(watch.trial())
            else:
                self.engine.forward(specs)

    def _end(self, outcome: Any, batch: Any) -> None:
        if self._exchange.world_size > 1:
            stop = bool(self.module.trainer.should_stop)
            try:
                ended = (_to_cpu(outcome), stop, _size_of(batch))
                self.engine.control.share(Message(Operation.END, object=ended))
            except StepError as error:  # it does not pickle
                ended = (("error", describe(error)), stop, _size_of(batch))
                self.engine.control.share(Message(Operation.END, object=ended))
                raise

    def gather_timeline(self) -> Timeline | None:
        """The last training step on all ranks, on every rank."""
        timeline: Timeline | None = self._exchange.broadcast(self.engine.gather_timeline())
        return timeline

    def close(self, *, whole: bool) -> None:
        """Ends the run: the module is as it was, with whole weights unless the run was interrupted."""
        self._stand_in.remove()
        self._at_close(whole)


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The batch is a step's first argument."""
    return args[0] if args else next(iter(kwargs.values()))


def _size_of(batch: Any) -> int:
    try:
        return count_samples(batch)
    except StepError:
        return 1


def _to_cpu(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, value)
