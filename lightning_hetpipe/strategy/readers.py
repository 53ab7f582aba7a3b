"""The reader of a training step: rank 0's user steps, one suspended per micro-batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.strategy.batch import cut, join
from lightning_hetpipe.strategy.logs import LogCall, LogRecorder, merge
from lightning_hetpipe.strategy.steps import StandIn, StepResult, SuspendedStep, read_result

Bind = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Tensor]]


class TrainingReader:
    """Runs ``training_step`` on each slice of a batch, around the pipelined module.

    Args:
        step: Takes a slice of the batch, runs the user's step.
        name: What to call the step in errors.
        batch: The whole batch.
        sizes: Samples of each micro-batch.
        factor: Multiplies every loss before its backward (gradient scaling, accumulation).
    """

    def __init__(
        self,
        stand_in: StandIn,
        bind: Bind,
        recorder: LogRecorder,
        step: Callable[[Any], Any],
        name: str,
        batch: Any,
        sizes: Sequence[int],
        factor: float,
    ) -> None:
        self._stand_in, self._bind, self._recorder = stand_in, bind, recorder
        self._step, self._name, self._batch = step, name, batch
        self.sizes = tuple(sizes)
        self._factor = factor
        self._suspended: dict[int, SuspendedStep] = {}
        self._inputs: dict[int, dict[str, Tensor]] = {}
        self._results: dict[int, StepResult] = {}
        self._calls: list[list[LogCall]] = [[] for _ in sizes]

    def start(self, m: int) -> Mapping[str, Tensor]:
        """Runs micro-batch ``m`` up to the module call; gives the graph's input values."""
        if m in self._inputs:  # the first one runs early: its shapes are announced to all ranks
            return self._inputs[m]
        begin = sum(self.sizes[:m])
        part = cut(self._batch, sum(self.sizes), begin, begin + self.sizes[m])
        suspended = SuspendedStep(self._stand_in, lambda: self._step(part), self._name)
        with self._recorder.active():
            call = suspended.start()
        self._calls[m] += self._recorder.take()
        self._suspended[m] = suspended
        self._inputs[m] = self._bind(call.args, call.kwargs)
        return self._inputs[m]

    def finish(self, m: int, output: Any) -> Tensor:
        """Resumes micro-batch ``m`` with the module's output; gives its loss, unweighted."""
        with self._recorder.active():
            result = read_result(self._suspended.pop(m).finish(output), self._name)
        self._calls[m] += self._recorder.take()
        self._results[m] = StepResult(result.loss.detach(), _detached(result.extra))
        return result.loss if self._factor == 1.0 else result.loss * self._factor

    def backward(self, m: int, grads: Mapping[str, Tensor]) -> None:
        """Continues the backward of micro-batch ``m`` into what the step did before the call."""
        inputs = self._inputs.pop(m)
        pairs = [(inputs[name], grad) for name, grad in grads.items() if inputs[name].requires_grad]
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])

    def outcome(self, weights: Sequence[float]) -> tuple[Tensor, Any, list[LogCall]]:
        """The batch's loss, what else the steps returned, and what they logged."""
        results = [self._results[m] for m in range(len(self.sizes))]
        loss = torch.stack([result.loss * weight for result, weight in zip(results, weights)]).sum()
        if any(result.extra is None for result in results):
            extra = None
        else:
            extra = join([result.extra for result in results], self.sizes)
        return loss, extra, merge(self._calls, self.sizes)

    def abandon(self) -> None:
        """Ends the steps that are still suspended, after a failure."""
        for suspended in self._suspended.values():
            suspended.abandon()
        self._suspended.clear()


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_detached, value))
    return value


class ForwardReader:
    """Gives the slices of one module call to the pipeline and collects its outputs.

    Attributes:
        outputs: What the module returns for each slice.
    """

    def __init__(self, inputs: Sequence[Mapping[str, Tensor]]) -> None:
        self._inputs = inputs
        self.outputs: list[Any] = [None] * len(inputs)

    def start(self, m: int) -> Mapping[str, Tensor]:
        return self._inputs[m]

    def finish(self, m: int, output: Any) -> Tensor:
        self.outputs[m] = output
        return torch.empty(0)

    def backward(self, m: int, grads: Mapping[str, Tensor]) -> None:
        raise AssertionError("a forward-only run has no backward")
