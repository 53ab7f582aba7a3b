"""What stages, transfers and memory cost, and the closed forms of a step.

Notation: stage ``s`` runs one micro-batch forward in ``f`` and backward in ``b`` seconds, ``t = f + b``;
``hop`` is the transfer across the cut after it, forward plus backward; ``M`` micro-batches;
``k`` micro-batches in flight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.graph import READER, LayerGraph
from lightning_hetpipe.planner.memory import WHOLE, Activations, Memory, Share, last_use, passing_needs
from lightning_hetpipe.profiles import Profile

Array = npt.NDArray[np.float64]
# Of a sample beside its values: tensors, tuples and actions as Python keeps them while a batch is put
# together and run in slices (3 KiB in batches of 6,000 images of 48 KiB).
SAMPLE_BYTES = 4096
ADAM = 2.0  # state values that the optimizer keeps per parameter


def gpipe_step_s(forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], m: int) -> float:
    """Seconds of a GPipe step; exact when transfers overlap with work and are shorter than it."""
    return sum(forward) + sum(backward) + sum(hops) + (m - 1) * (max(forward) + max(backward))


def one_f_one_b_step_s(seconds: Sequence[float], hops: Sequence[float], m: int) -> float:
    """Seconds of a 1F1B step with `safe_k` in flight: ``Σt + Σhop + (M-1) max t``, about 3 % high."""
    return sum(seconds) + sum(hops) + (m - 1) * max(seconds)


def lower_bound_s(seconds: Sequence[float], hops: Sequence[float], m: int) -> float:
    """No order of the same forwards and backwards is faster.

    ``max( max_s [ Σ_{j<s} (t_j + hop_j) + M t_s ], Σt + Σhop )``
    """
    before, best = 0.0, sum(seconds) + sum(hops)
    for stage, t in enumerate(seconds):
        best = max(best, before + m * t)
        before += t + (hops[stage] if stage < len(hops) else 0.0)
    return best


def safe_k(seconds: Sequence[float], hops: Sequence[float], m: int) -> tuple[int, ...]:
    """In-flight counts that keep 1F1B from waiting for its transfers.

    ``k_{P-1} = 1``, ``k_s = min(M, k_{s+1} + ceil((t_s + hop_s) / max t))``; ``P - s`` for free links.
    """
    slowest = max(seconds)
    counts = [1]
    for t, hop in zip(reversed(seconds[:-1]), reversed(hops), strict=True):
        counts.append(min(m, counts[-1] + steps_ahead(t + hop, slowest)))
    return tuple(reversed(counts))


def steps_ahead(seconds: float, slowest: float) -> int:
    """How many periods of the bottleneck a stage and its hop take, at least one."""
    return max(1, math.ceil(seconds / slowest - 1e-9)) if slowest > 0 else 1


@dataclass(frozen=True)
class LayerCosts:
    """A profile at one micro-batch size, as prefix sums: ``x[stop] - x[start]`` is a run's cost.

    Attributes:
        profile: Where the figures are from.
        micro_batch: Samples per micro-batch.
        optimizer_copies: State values that the optimizer keeps per parameter.
    """

    profile: Profile
    micro_batch: int
    optimizer_copies: float = ADAM

    @property
    def graph(self) -> LayerGraph:
        return self.profile.graph

    def seconds(self, device: str) -> tuple[Array, Array]:
        """Prefix sums of forward and of backward seconds, each ``[layers + 1]``."""
        found = self._seconds.get(device)
        if found is None:
            forward, backward = self.profile.device(device).layer_seconds(self.micro_batch)
            found = self._seconds[device] = _prefix(forward), _prefix(backward)
        return found

    @cached_property
    def _seconds(self) -> dict[str, tuple[Array, Array]]:
        return {}

    @cached_property
    def parameter_bytes(self) -> Array:
        """Prefix sums; a parameter that several layers use counts in each."""
        return _prefix([layer.parameter_bytes for layer in self.graph.layers])

    @cached_property
    def activations(self) -> Activations:
        """What one micro-batch keeps for its backward."""
        return Activations(self.graph, self.micro_batch)

    @cached_property
    def forward_bytes(self) -> Array:
        """Bytes that pass each cut, ``[layers + 1]``; what the reader sends counts at cut 0 only."""
        return self._crossing(gradients=False)

    @cached_property
    def backward_bytes(self) -> Array:
        """Bytes of the gradients that come back across each cut, ``[layers + 1]``."""
        return self._crossing(gradients=True)

    @cached_property
    def input_bytes(self) -> float:
        """Bytes that the reader makes of one micro-batch."""
        values = [value for value in self.graph.values if value.producer == READER]
        return sum(value.size_bytes(self.micro_batch) for value in values)

    def _crossing(self, *, gradients: bool) -> Array:
        n_layers = len(self.graph)
        change = np.zeros(n_layers + 2)
        for value in self.graph.values:
            size = value.size_bytes(self.micro_batch) if value.gradient or not gradients else 0.0
            first, last = value.producer + 1, last_use(value, n_layers - 1)
            if value.producer == READER:
                first, last = 0, 0
            if last >= first:
                change[first] += size
                change[last + 1] -= size
        return np.maximum(np.cumsum(change)[: n_layers + 1], 0.0)

    def memory(self, device: str) -> Memory:
        """What runs of layers need on a device."""
        found = self._memory.get(device)
        if found is None:
            passing = passing_needs(
                self.profile.device(device),
                self.activations,
                np.diff(self.parameter_bytes),
                self.backward_bytes,
            )
            found = self._memory[device] = Memory(
                self.activations,
                self.parameter_bytes,
                self.forward_bytes,
                self.backward_bytes,
                passing,
                self.optimizer_copies,
            )
        return found

    @cached_property
    def _memory(self) -> dict[str, Memory]:
        return {}

    def memory_bytes(
        self,
        device: str,
        start: int,
        stop: int,
        in_flight: int,
        *,
        n_micro_batches: int | None = None,
        copied: bool = False,
        share: Share = WHOLE,
    ) -> float:
        """Peak of a stage; see `planner.memory`.

        Args:
            in_flight: Micro-batches between forward and backward.
            n_micro_batches: Of a step; None for more than are in flight.
            copied: Messages are sent from a copy of their own, as over an emulated link.
            share: The device's part of the stage.
        """
        return self.memory(device).peak_bytes(
            start, stop, in_flight, n_micro_batches, copied=copied, share=share
        )


def layer_costs(profile: Profile, micro_batch: int, optimizer_copies: float = ADAM) -> LayerCosts:
    """The `LayerCosts` of a profile, made once for each size."""
    key = "layer_costs", micro_batch, optimizer_copies
    found: LayerCosts | None = profile.derived.get(key)
    if found is None:
        found = profile.derived[key] = LayerCosts(profile, micro_batch, optimizer_copies)
    return found


def batch_bytes(costs: LayerCosts, batch_size: int) -> float:
    """What the reader's rank holds besides its stage: the inputs of the whole batch, sample by sample."""
    return (costs.input_bytes / costs.micro_batch + SAMPLE_BYTES) * batch_size


def is_copied(cluster: Cluster) -> bool:
    """Whether stages send copies: an emulated link adds its stamp to what it carries."""
    return any(link.emulated for link in cluster.links)


def _prefix(values: Sequence[float] | Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
