"""The placement problem as numbers: a chain of layers, and choices of who may hold a run of them.

A choice is one device of a pool (devices that are interchangeable), or anything else that takes devices
from pools and holds a stage: it has its own times, memory limit and links. ``uses[c]`` says how many
devices of each pool it takes.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

# How many micro-batches more than its successor a stage holds: what its transfers hide behind (safe), one
# (shallow), or none (serial); GPipe holds all.
Depth = Literal["all", "safe", "shallow", "serial"]


@dataclass(frozen=True)
class MemoryTables:
    """Bytes of a run ``start..stop`` with ``k`` of ``n`` micro-batches in flight.

    ``every`` if ``k >= n``, else the largest of ``steady + k kept``, ``fill + k (kept + sent)`` and
    ``optimizer``; see `planner.memory`.

    Attributes:
        every, steady, fill, optimizer: ``[choices, layers + 1, layers + 1]``; what only the last stage
            holds is part of them.
        kept, sent: ``[layers + 1, layers + 1]``.
        n_micro_batches: ``n``.
        limit: Per choice; infinite where unknown.
        grows: ``[layers + 1]``: about how the need of a run grows with its layers, as prefix sums.
        crosses: ``[3, layers + 1]``: what a cut adds to the stages at its sides.
    """

    every: Array
    steady: Array
    fill: Array
    optimizer: Array
    kept: Array
    sent: Array
    n_micro_batches: int
    limit: Array
    grows: Array
    crosses: Array

    def fits(self, choice: Ints, start: Ints, stop: Ints, k: Ints | int) -> Bools:
        """Whether each run fits; the arguments are broadcast together."""
        run = choice, start, stop
        kept = k * self.kept[start, stop]
        fewer = np.maximum(self.steady[run] + kept, self.fill[run] + kept + k * self.sent[start, stop])
        fewer = np.maximum(fewer, self.optimizer[run])
        need = np.where(np.asarray(k) >= self.n_micro_batches, self.every[run], fewer)
        return np.asarray(need <= self.limit[choice])

    def at(self, cuts: Ints) -> "MemoryTables":
        """The tables of a chain that has these cuts only."""
        pairs = np.ix_(cuts, cuts)
        runs = np.ix_(np.arange(len(self.limit)), cuts, cuts)
        return replace(
            self,
            every=self.every[runs],
            steady=self.steady[runs],
            fill=self.fill[runs],
            optimizer=self.optimizer[runs],
            kept=self.kept[pairs],
            sent=self.sent[pairs],
            grows=self.grows[cuts],
            crosses=self.crosses[:, cuts],
        )


@dataclass(frozen=True)
class Chain:
    """What the placement search needs.

    Attributes:
        seconds: ``[choices, layers + 1]``, prefix sums of forward plus backward.
        hop_s: ``[from, to, layers + 1]``, both directions of a transfer across each cut.
        occupied_s: The same shape: the longer time that one direction of the link is taken.
        uses: ``[choices, pools]`` devices taken.
        available: ``[pools]``.
        n_micro_batches: Slices of the batch.
        last_s: Per choice, seconds that the last stage takes besides; infinite where it may not be last.
        inner: Per choice, whether it may hold a stage other than the last.
        memory: None where no limit can bind.
        n_stages: The number of stages asked for, or None.
        depth: In-flight counts that memory must have room for.
    """

    seconds: Array
    hop_s: Array
    occupied_s: Array
    uses: Ints
    available: Ints
    n_micro_batches: int
    last_s: Array
    inner: Bools
    memory: MemoryTables | None = None
    n_stages: int | None = None
    depth: Depth = "safe"

    @property
    def n_layers(self) -> int:
        return int(self.seconds.shape[1]) - 1

    @property
    def n_choices(self) -> int:
        return len(self.seconds)

    @cached_property
    def first_k(self) -> int:
        """In-flight count of the last stage: the least any stage has."""
        return self.n_micro_batches if self.depth == "all" else 1

    @cached_property
    def allowed(self) -> Bools | None:
        """``[choices, start, stop]``: runs that fit with the fewest micro-batches in flight."""
        if self.memory is None:
            return None
        n = self.n_layers
        table = np.zeros((self.n_choices, n + 1, n + 1), dtype=bool)
        choices = np.arange(self.n_choices)[:, None]
        for stop in range(1, n + 1):
            starts = np.arange(stop)[None, :]
            table[:, :stop, stop] = self.memory.fits(choices, starts, np.asarray(stop), self.first_k)
        return table

    def run_s(self, choice: int, start: int, stop: int) -> float:
        """Forward plus backward of one micro-batch."""
        seconds = float(self.seconds[choice, stop] - self.seconds[choice, start])
        return seconds + float(self.last_s[choice]) if stop == self.n_layers else seconds

    def with_depth(self, depth: Depth) -> "Chain":
        return replace(self, depth=depth)


@dataclass(frozen=True)
class Placement:
    """One solution: stages in order.

    Attributes:
        starts: First layer of each stage.
        choices: Who holds each stage.
        objective_s: ``Σt + Σhop + (M-1) T``.
        period_s: ``T``: the longest stage or link time (more where only fewer in flight fit).
    """

    starts: tuple[int, ...]
    choices: tuple[int, ...]
    objective_s: float = field(compare=False)
    period_s: float = field(compare=False)


def longest(chain: Chain, starts: tuple[int, ...], choices: tuple[int, ...]) -> float:
    """The longest stage or link occupation of a placement."""
    stops = (*starts[1:], chain.n_layers)
    runs = [chain.run_s(*run) for run in zip(choices, starts, stops)]
    links = [chain.occupied_s[u, v, cut] for u, v, cut in zip(choices, choices[1:], starts[1:])]
    return max([*runs, *map(float, links)])


def fill_s(chain: Chain, starts: tuple[int, ...], choices: tuple[int, ...]) -> float:
    """``Σt + Σhop``: one micro-batch alone."""
    stops = (*starts[1:], chain.n_layers)
    runs = sum(chain.run_s(*run) for run in zip(choices, starts, stops))
    return runs + sum(float(chain.hop_s[u, v, cut]) for u, v, cut in zip(choices, choices[1:], starts[1:]))
