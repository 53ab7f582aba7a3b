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
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_hetpipe.graph import READER, LayerGraph, Value
from lightning_hetpipe.profiles import DeviceProfile

Array = npt.NDArray[np.float64]
_AHEAD = 2  # receives that are posted before they are waited for (`engine.edge.AHEAD`)
Figures = TypeVar("Figures", bound=Any)  # bytes of one run, or a table of them


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

    def held(self, start: int, stop: int) -> "Held[float]":
        """What a run holds between a micro-batch's forward and backward."""
        kept = self._kept[(start <= self._keeper) & (self._keeper < stop) & (self._before < start)].sum()
        leaving = (start <= self._producer) & (self._producer < stop) & (stop <= self._last)
        out = self._made[leaving & (stop <= self._first)].sum()
        sent = self._made[leaving].sum() if stop < self.n_layers else 0.0
        return Held(float(kept + out + self._beside(start)[stop]), float(out), float(sent))

    def held_tables(self) -> "Held[Array]":
        """`held` of every run, ``[start, stop]``."""
        n = self.n_layers
        kept, out, sent = (np.zeros((n + 1, n + 1)) for _ in range(3))
        for before, keeper, size in zip(self._before, self._keeper, self._kept):
            kept[before + 1 : keeper + 1, keeper + 1 :] += size
        for producer, last, first, size in zip(self._producer, self._last, self._first, self._made):
            if producer != READER:
                out[: producer + 1, producer + 1 : min(last, first) + 1] += size
                sent[: producer + 1, producer + 1 : min(last, n - 1) + 1] += size
        kept[:n] += [self._beside(start) for start in range(n)]
        return Held(kept + out, out, sent)

    def _beside(self, start: int) -> Array:
        """What arrives in one message with something that is kept, and so lives as long, by ``stop``."""
        beside, any_kept = np.zeros(self.n_layers + 1), np.zeros(self.n_layers + 1, dtype=bool)
        for value in self.graph.crossing(start) if start else ():
            used = min((layer for layer in value.consumers if layer >= start), default=self.n_layers)
            keeper = min((layer for layer in value.kept_by if layer >= start), default=self.n_layers)
            beside[used + 1 : keeper + 1] += value.size_bytes(self.micro_batch)
            any_kept[keeper + 1 :] = True
        return np.where(any_kept, beside, 0.0)


@dataclass(frozen=True)
class Held(Generic[Figures]):
    """Bytes of one micro-batch between forward and backward.

    Attributes:
        kept: By autograd, or as what the backward begins with.
        out: The part of it that nobody but the next stages keeps.
        sent: Of the message to the next stages, while it is under way.
    """

    kept: Figures
    out: Figures
    sent: Figures


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
        held = self.activations.held(start, stop)
        sums = self.activations.sums
        there = (sums[start + 1 : stop + 1] - sums[stop]) * share.samples
        behind = (self.parameter_bytes[stop] - self.parameter_bytes[start + 1 : stop + 1]) * share.weights
        ahead, back = self._needs(share)
        moments = self._moments(
            held=Held(*(each * share.samples for each in (held.kept, held.out, held.sent * copied))),
            forward=float((ahead[run] + there).max()),
            backward=float((back[run] + there).max()),
            first=float((back[run] + there + behind).max()),
            weights=float(self.parameter_bytes[stop] - self.parameter_bytes[start]) * share.weights,
            largest=float(np.diff(self.parameter_bytes)[run].max()) * share.weights,
            messages=float(self._messages(copied)[start]) * share.samples,
            returning=float(self.returning[stop]) * share.samples,
        )
        return float(moments.peak(in_flight, n))

    def tables(self, *, copied: bool) -> "Moments[Array]":
        """The moments of all runs, ``[start, stop]`` each."""
        held = self.activations.held_tables()
        ahead, back = self._needs(WHOLE)
        sums, parameters = self.activations.sums, self.parameter_bytes
        return self._moments(
            held=Held(held.kept, held.out, held.sent * copied),
            forward=_running_max(ahead + sums[1:]) - sums,
            backward=_running_max(back + sums[1:]) - sums,
            first=_running_max(back + sums[1:] - parameters[1:]) - sums + parameters,
            weights=parameters[None, :] - parameters[:, None],
            largest=_running_max(np.diff(parameters)),
            messages=np.broadcast_to(self._messages(copied)[:, None], held.kept.shape),
            returning=np.broadcast_to(self.returning[None, :], held.kept.shape),
        )

    def _moments(
        self,
        held: Held[Figures],
        forward: Figures,
        backward: Figures,
        first: Figures,
        weights: Figures,
        largest: Figures,
        messages: Figures,
        returning: Figures,
    ) -> "Moments[Figures]":
        state = weights * (1 + self.optimizer_copies)
        of_largest, of_all = self.passing.optimizer
        full = state + weights
        return Moments(
            held=held,
            fill=state + np.maximum(forward - held.out - held.sent, 0.0),
            first=state + returning + first,
            second=full + returning + backward - held.kept,
            steady=full + messages + held.sent + np.maximum(forward - held.out, returning + backward),
            optimizer=full + weights * of_all + largest * of_largest,
        )

    def _messages(self, copied: bool) -> Array:
        """By first layer: inputs that come ahead of their turn, and the last gradient that was sent."""
        return _AHEAD * self.entering + copied * self.returning

    def _needs(self, share: Share) -> tuple[Array, Array]:
        """Bytes beyond what the micro-batches hold, in the forward and in the backward of each layer."""
        kept, passing = self.activations, self.passing
        forward = kept.waiting[:-1] + passing.forward - kept.new
        backward = self.returning[1:] + passing.backward
        return (
            forward * share.samples + passing.forward_fixed * share.weights,
            backward * share.samples + passing.backward_fixed * share.weights,
        )


@dataclass(frozen=True)
class Moments(Generic[Figures]):
    """Bytes at the moments that may be the fullest, without what the micro-batches in flight hold.

    Attributes:
        held: Per micro-batch in flight.
        fill: The last forward before the first backward; no message is known to be taken.
        first, second: The first backwards where all forwards come before them.
        steady: Where they do not, and one message is under way.
        optimizer: No micro-batch is in flight.
    """

    held: Held[Figures]
    fill: Figures
    first: Figures
    second: Figures
    steady: Figures
    optimizer: Figures

    def peak(self, in_flight: int, n: int | None) -> Figures:
        """The peak with so many of ``n`` micro-batches in flight; None for more than those."""
        kept = in_flight * self.held.kept
        fill = self.fill + kept + in_flight * self.held.sent
        if n is None or in_flight < n:
            running = self.steady + kept
        elif n > 1:
            running = np.maximum(self.first, self.second) + kept
        else:
            running = self.first + kept
        found: Figures = np.maximum(np.maximum(fill, running), self.optimizer)
        return found


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
