"""The engine of one rank: set up once per process, given a plan's stages, then stepped.

engine = Engine(store, rank, world_size, device=..., timeout_s=...)     all ranks together
engine.install(make, routes, holdings, {1: stage})                     all ranks together, per plan
engine.control.share(...)                                              header
losses = engine.train_step(specs, reader=reader, weights=weights)      every rank, every step
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_hetpipe.cluster import Cluster, Device, Link, slowest_link
from lightning_hetpipe.engine.c10d import Store
from lightning_hetpipe.engine.control import Control
from lightning_hetpipe.engine.emulate import Emulator
from lightning_hetpipe.engine.membership import Membership
from lightning_hetpipe.engine.message import Specs
from lightning_hetpipe.engine.pieces import Holding
from lightning_hetpipe.engine.probe import measure_links
from lightning_hetpipe.engine.runtime import Context, Reader, Runtime, SharedGradients, Stage
from lightning_hetpipe.engine.software import measure_software
from lightning_hetpipe.engine.transport import connect, emulated_link
from lightning_hetpipe.graph import Route
from lightning_hetpipe.profiles import Software
from lightning_hetpipe.profiling.memory import (
    memory_bytes,
    peak_memory_bytes,
    reset_peak,
    return_freed_memory,
    tune_allocator,
)
from lightning_hetpipe.schedule.action import Schedule
from lightning_hetpipe.timeline import Span, Timeline

_COUNTED_STEPS = 2  # of which the first makes the optimizer's state

MakeSchedule = Callable[[int, bool], Schedule]  # micro-batches, training


class Engine:
    """Runs one rank's part of a pipeline.

    Args:
        store: Reached by all ranks; None in a world of one.
        rank, world_size: This rank, and how many there are.
        timeout_s: Bounds every wait for another rank.
        cluster: Rank ``i`` is device ``i``: speeds, memory limits and links to keep to. None: as it is.
        device: Where this rank computes.
        store_rank: The rank whose process serves the store; None if none does.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        cluster: Cluster | None = None,
        device: torch.device | None = None,
        store_rank: int | None = 0,
    ) -> None:
        self.rank, self.world_size, self.cluster = rank, world_size, cluster
        self.device = device or torch.device("cpu")
        own = Device(f"rank{rank}") if cluster is None else cluster.devices[rank]
        self.emulator = Emulator(own)
        self.control = Control(store, rank, world_size, timeout_s=timeout_s, store_rank=store_rank)
        if self.device.type == "cpu":
            tune_allocator()
            if cluster is not None:
                torch.set_num_threads(own.threads)
        self._base_bytes = self._steps = 0
        self._peak_bytes: int | None = None
        self._runtime: Runtime | None = None
        self._schedules: dict[tuple[MakeSchedule, int, bool], Schedule] = {}
        self._plans = itertools.count()
        self._groups = itertools.count()

    def measure_links(self, cluster: Cluster | None = None) -> tuple[Link, ...]:
        """Measures the links between all ranks, which call this together; see `probe.measure_links`.

        Args:
            cluster: Rank ``i`` is its device ``i``; by default the engine's own.
        """
        cluster = cluster or self.cluster
        if cluster is None:
            cluster = Cluster("found", tuple(Device(f"rank{rank}") for rank in range(self.world_size)))
        return measure_links(self.control, f"links{next(self._plans)}", cluster, self.device)

    def measure_software(self, cluster: Cluster) -> Software:
        """Measures what messages and collectives cost; all ranks call it, see `software.measure_software`."""
        return measure_software(self.control, f"software{next(self._plans)}", cluster)

    def join(self, ranks: tuple[int, ...]) -> Membership | None:
        """Connects the members of a group, which all ranks do together; None on the others."""
        name = f"group{next(self._groups)}"
        if self.rank not in ranks:
            return None
        pairs = itertools.permutations(ranks, 2)
        links = [link for pair in pairs if (link := emulated_link(self.cluster, pair)) is not None]
        return Membership(self.control, name, ranks, self.emulator, slowest_link(links) if links else None)

    def install(
        self,
        make_schedule: MakeSchedule,
        routes: Iterable[Route],
        holdings: Sequence[Holding | Sequence[int]],
        stages: Mapping[int, Stage],
        *,
        context: Context = nullcontext,
        shared: Sequence[SharedGradients] = (),
        owners: Iterable[Sequence[int]] = (),
        axes: Mapping[str, int] | None = None,
        reductions: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        """Takes up a plan; opens its connections together with all other ranks, and closes the former ones.

        Args:
            make_schedule: Gives the schedule of so many micro-batches, for training or not.
            routes: What the stages send to each other.
            holdings: Who holds which stage; the rank alone where it is one.
            stages: Those of this rank; empty on an idle one.
            context: Entered around each forward (autocast).
            shared: This rank's parameters whose gradients are summed over ranks.
            owners: The sets of ranks in all ranks' ``shared``, equal on every rank.
            axes: Where a group shares a stage: the dimension of each value that counts the samples.
            reductions: By stage of this rank: called after its last backward.
        """
        held = [each if isinstance(each, Holding) else Holding(tuple(each)) for each in holdings]
        self._runtime = None
        self._schedules = {}
        self._make = make_schedule
        self.control.close_device_groups()
        transport = connect(
            self.control,
            f"plan{next(self._plans)}",
            routes,
            held,
            axes=axes,
            device=self.device,
            cluster=self.cluster,
            owners=owners,
        )
        self._runtime = Runtime(
            self.control,
            transport,
            self.emulator,
            stages,
            n_stages=len(held),
            context=context,
            shared=shared,
            reductions=reductions,
        )

    def limit_memory(self, held_bytes: int) -> None:
        """From here on counts this rank's memory, and enforces the emulated limit if there is one.

        On a CPU without such a limit it is counted in the first steps only (`profiling.memory` says why).

        Args:
            held_bytes: What counts of what the process has already: its stage's parameters.
        """
        self._steps, self._peak_bytes = 0, None
        if self.device.type == "cpu":
            if self.emulator.memory_bytes is not None:
                tune_allocator(mapped=True)
            return_freed_memory()
            self._base_bytes = memory_bytes(self.device) - held_bytes
            self.emulator.limit_memory(held_bytes)
        reset_peak(self.device)

    def follow(self, make_schedule: MakeSchedule) -> None:
        """From the next step on executes other action lists of the installed stages; on all ranks alike."""
        self._make = make_schedule

    def _count_step(self) -> None:
        """Follows memory from step to step: once optimizer state is there, all steps are alike."""
        if self.device.type == "cpu" and not self.emulator.is_limited:
            if self._steps == 0:
                tune_allocator(mapped=True)
                reset_peak(self.device)
            elif self._steps == _COUNTED_STEPS:
                self._peak_bytes = peak_memory_bytes(self.device)
                tune_allocator()
        self._steps += 1

    def schedule(self, n_micro_batches: int, training: bool) -> Schedule:
        """The installed plan's action lists for so many micro-batches."""
        key = (self._make, n_micro_batches, training)
        if key not in self._schedules:
            self._schedules[key] = self._make(n_micro_batches, training)
        return self._schedules[key]

    def train_step(
        self, specs: Sequence[Specs], *, weights: Sequence[float], reader: Reader | None = None
    ) -> tuple[Tensor, ...]:
        """Forward and backward of all micro-batches; see `Runtime.run`.

        Args:
            specs: One mapping per micro-batch: every value that travels between stages.
            weights: Per micro-batch; `sample_weights` for a loss that is a mean.
            reader: On rank 0.
        """
        self._count_step()
        return self._installed.run(self.schedule(len(specs), True), specs, reader=reader, weights=weights)

    def forward(self, specs: Sequence[Specs], *, reader: Reader | None = None) -> None:
        """The forward of all micro-batches; the reader collects the outputs."""
        self._installed.run(self.schedule(len(specs), False), specs, reader=reader)

    def gather_timeline(self) -> Timeline | None:
        """The spans of the last step and peak memory of all ranks, on rank 0; None on the others.

        Every rank calls it. Times are comparable between ranks of one host. Memory is what was used on
        top of what the process had at `limit_memory`, its stage's parameters included.
        """
        spans = self._installed.spans if self._runtime else []
        peak = peak_memory_bytes(self.device) if self._peak_bytes is None else self._peak_bytes
        parts = self.control.gather((spans, peak - self._base_bytes))
        if parts is None:
            return None
        every = [span for spans, _ in parts for span in spans]
        start_s = min((span.start_s for span in every), default=0.0)
        moved = [
            Span(span.rank, span.action, span.start_s - start_s, span.end_s - start_s, span.compute)
            for span in every
        ]
        return Timeline(tuple(moved), self.world_size, "measured", tuple(peak for _, peak in parts))

    def fail(self, error: BaseException) -> None:
        """Tells all ranks that this one failed outside an action; for whoever catches its exceptions."""
        self.control.fail(error)

    def close(self) -> None:
        """Closes all connections of this rank."""
        self._runtime = None
        self.emulator.lift_memory_limit()
        self.control.close()

    @property
    def _installed(self) -> Runtime:
        if self._runtime is None:
            raise RuntimeError("no plan is installed: call install() first")
        return self._runtime


def sample_weights(sizes: Sequence[int]) -> tuple[float, ...]:
    """What each micro-batch's mean loss counts for: ``n_i / N``."""
    total = sum(sizes)
    return tuple(size / total for size in sizes)
