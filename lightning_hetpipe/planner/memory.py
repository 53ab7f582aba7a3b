"""What a stage holds at its fullest moment.

The memory of a rank is what training allocates on it: parameters, gradients, optimizer state, activations,
messages, what kernels need in passing, the batch; not the interpreter, nor what an allocator keeps for later.
`profiling.memory` measures the same.

    1F1B       w g o + k h     + what layer l needs           gradients stand from the first backward on
    GPipe      w   o + M h     + what layer l needs           in the last forward
               w   o + M h     + that, gradients behind l     in the first backward, all messages taken
               w g o + (M-1) h + what layer l needs           in the second backward
    optimizer  w g o           + what it needs

``w`` parameters, ``g`` gradients, ``o`` optimizer state, ``h`` what one micro-batch leaves behind. While
layer ``l`` works, the last micro-batch holds what the layers up to ``l`` keep.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lightning_hetpipe.graph import READER, LayerGraph, Value
from lightning_hetpipe.profiles import DeviceProfile

Array = npt.NDArray[np.float64]
Figures = TypeVar("Figures", float, Array)


@dataclass(frozen=True)
class Share:
    """How much of a stage one device has.

    Attributes:
        samples: Of the activations.
        weights: Of the parameters.
    """

    samples: float = 1.0
    weights: float = 1.0


WHOLE = Share()


@dataclass(frozen=True)
class Passing:
    """What each layer needs on top of what is kept, ``[layers]`` each, and the optimizer's part.

    Attributes:
        forward, backward: Bytes that grow with the samples.
        forward_fixed, backward_fixed: Bytes that do not: weights in another order, their gradients.
        optimizer: In a step of the optimizer: times the largest layer, and times all parameters.
    """

    forward: Array
    backward: Array
    forward_fixed: Array
    backward_fixed: Array
    optimizer: tuple[float, float]


class Activations:
    """What one micro-batch of a graph keeps and sends.

    A tensor between layers is held once by a run of layers, by the first of them that keeps it for its
    backward, or, if none does, by the run that made it and sends it on.

    Args:
        graph: The layers.
        micro_batch: Samples.
    """

    def __init__(self, graph: LayerGraph, micro_batch: int) -> None:
        self.graph, self.micro_batch = graph, micro_batch
        n = self.n_layers = len(graph)
        kept: list[tuple[int, int, float]] = []  # the keeper before, the keeper, bytes
        made: list[tuple[int, int, int, float]] = []  # producer, last use, first keeper, bytes
        self.waiting = np.zeros(n + 1)  # what enters a layer or passes it, and nobody keeps yet
        self.produced = np.zeros(n)
        for index, layer in enumerate(graph.layers):
            kept.append((READER, index, layer.saved_bytes_per_sample * micro_batch))
        for value in graph.values:
            size, before = value.size_bytes(micro_batch), READER
            for keeper in value.kept_by:
                kept.append((before, keeper, size))
                before = keeper
            first = value.kept_by[0] if value.kept_by else n
            made.append((value.producer, last_use(value, n), first, size))
            self.waiting[value.producer + 1 : min(last_use(value, n - 1), first) + 1] += size
            if value.producer != READER:
                self.produced[value.producer] += size
        self._before, self._keeper, self._kept = map(np.asarray, zip(*kept))
        self._producer, self._last, self._first, self._made = map(np.asarray, zip(*made))

    @cached_property
    def new(self) -> Array:
        """Bytes that each layer is the first to keep, ``[layers]``."""
        first = self._before == READER
        return np.bincount(self._keeper[first], self._kept[first], self.n_layers).astype(float)

    @cached_property
    def sums(self) -> Array:
        """Prefix sums of `new`, ``[layers + 1]``."""
        return np.concatenate([[0.0], np.cumsum(self.new)])

    def held_bytes(self, start: int, stop: int, copied: bool) -> float:
        """What a run holds between a micro-batch's forward and backward.

        Args:
            copied: Messages are sent from a copy of their own.
        """
        kept = self._kept[(start <= self._keeper) & (self._keeper < stop) & (self._before < start)].sum()
        leaving = (start <= self._producer) & (self._producer < stop) & (stop <= self._last)
        out = self._made[leaving & (stop <= self._first)].sum()
        sent = self._made[leaving].sum() if copied and stop < self.n_layers else 0.0
        return float(kept + out + sent)

    def held_table(self, copied: bool) -> Array:
        """`held_bytes` of every run, ``[start, stop]``."""
        n = self.n_layers
        table = np.zeros((n + 1, n + 1))
        for before, keeper, size in zip(self._before, self._keeper, self._kept):
            table[before + 1 : keeper + 1, keeper + 1 :] += size
        for producer, last, first, size in zip(self._producer, self._last, self._first, self._made):
            if producer != READER:
                table[: producer + 1, producer + 1 : min(last, first) + 1] += size
                if copied:
                    table[: producer + 1, producer + 1 : min(last, n - 1) + 1] += size
        return table


@dataclass(frozen=True)
class Memory:
    """Peak bytes of the runs of a graph on one device.

    Attributes:
        activations: Of one micro-batch.
        parameter_bytes: Prefix sums, ``[layers + 1]``.
        entering, returning: Forward bytes and gradient bytes that pass each cut, ``[layers + 1]``.
        passing: What the device's kernels need.
        optimizer_copies: State values per parameter.
    """

    activations: Activations
    parameter_bytes: Array
    entering: Array
    returning: Array
    passing: Passing
    optimizer_copies: float

    def peak_bytes(
        self, start: int, stop: int, in_flight: int, n: int | None, *, copied: bool, share: Share = WHOLE
    ) -> float:
        """The peak of one stage.

        Args:
            start, stop: Its layers.
            in_flight: Micro-batches between forward and backward.
            n: Micro-batches of a step; None for more than are in flight.
            copied: Messages are sent from a copy of their own.
            share: The device's part of the stage.
        """
        run = slice(start, stop)
        kept = self.activations
        held, unsent = (
            in_flight * kept.held_bytes(start, stop, each) * share.samples for each in (copied, False)
        )
        there = (kept.sums[start + 1 : stop + 1] - kept.sums[stop]) * share.samples
        behind = (self.parameter_bytes[stop] - self.parameter_bytes[start + 1 : stop + 1]) * share.weights
        ahead, back = self._needs(share)
        forward, backward = float((ahead[run] + there).max()), float((back[run] + there).max())
        weights = float(self.parameter_bytes[stop] - self.parameter_bytes[start]) * share.weights
        waiting = float(self.returning[stop]) * share.samples
        if n is not None and in_flight >= n:
            first = float((back[run] + there + behind).max())
            second = weights + backward - unsent / in_flight if n > 1 else 0.0
            step = max(held + forward, unsent + waiting + max(first, second))
        else:
            step = weights + held + waiting + float(self.entering[start]) * share.samples
            step += max(forward, backward)
        largest = float(np.diff(self.parameter_bytes)[run].max()) * share.weights
        return max(
            weights * (1 + self.optimizer_copies) + step,
            self._optimizer(weights, largest),
        )

    def tables(self, n: int, *, copied: bool) -> tuple[Array, Array, Array]:
        """The same for all runs, ``[start, stop]`` each.

        Returns:
            The peak with all ``n`` micro-batches in flight; with fewer, without what they hold; and the
            optimizer's.
        """
        kept = self.activations
        held, unsent = kept.held_table(copied), kept.held_table(False)
        ahead, back = self._needs(WHOLE)
        sums, parameters = kept.sums, self.parameter_bytes
        forward = _running_max(ahead + sums[1:]) - sums
        backward = _running_max(back + sums[1:]) - sums
        first = _running_max(back + sums[1:] - parameters[1:]) - sums + parameters
        weights = parameters[None, :] - parameters[:, None]
        largest = _running_max(np.diff(parameters))
        state = weights * (1 + self.optimizer_copies)
        waiting = self.returning[None, :]
        second = weights + backward - unsent if n > 1 else np.zeros_like(held)
        every = np.maximum(n * held + forward, n * unsent + waiting + np.maximum(first, second)) + state
        fewer = weights + waiting + self.entering[:, None] + np.maximum(forward, backward) + state
        optimizer = self._optimizer(weights, largest)
        return np.maximum(every, optimizer), fewer, optimizer

    def _needs(self, share: Share) -> tuple[Array, Array]:
        """Bytes beyond what the micro-batches hold, in the forward and in the backward of each layer."""
        kept, passing = self.activations, self.passing
        forward = kept.waiting[:-1] + passing.forward - kept.new
        backward = self.returning[1:] + passing.backward
        return (
            forward * share.samples + passing.forward_fixed * share.weights,
            backward * share.samples + passing.backward_fixed * share.weights,
        )

    def _optimizer(self, weights: Figures, largest: Figures) -> Figures:
        of_largest, of_all = self.passing.optimizer
        return weights * (2 + self.optimizer_copies + of_all) + largest * of_largest


def passing_needs(device: DeviceProfile, activations: Activations, parameters: Array, back: Array) -> Passing:
    """What was measured; where nothing was, a layer's own results, and the gradients that it makes.

    Args:
        device: The measurements.
        activations: Of one micro-batch.
        parameters: Bytes of each layer's parameters.
        back: Gradient bytes that pass each cut, ``[layers + 1]``.
    """
    if not device.forward_peak_bytes:
        own = np.array([layer.saved_bytes_per_sample for layer in activations.graph.layers])
        forward = activations.produced + own * activations.micro_batch
        return Passing(forward, back[:-1], np.zeros_like(parameters), parameters, device.optimizer_peak)
    (forward_fixed, forward), (backward_fixed, backward) = (
        np.asarray(table, dtype=float).T for table in (device.forward_peak_bytes, device.backward_peak_bytes)
    )
    size = activations.micro_batch
    return Passing(forward * size, backward * size, forward_fixed, backward_fixed, device.optimizer_peak)


def last_use(value: Value, end: int) -> int:
    """The last layer that uses a value, or ``end`` for one that the model returns."""
    return end if value.output else max(value.consumers, default=READER)


def _running_max(figures: Sequence[float] | Array) -> Array:
    """``[start, stop]``: the maximum of ``figures[start:stop]``; 0 for runs without layers."""
    n = len(figures)
    table = np.zeros((n + 1, n + 1))
    for start in range(n):
        table[start, start + 1 :] = np.maximum.accumulate(figures[start:])
    return table
