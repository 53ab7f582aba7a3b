"""What a plan is measured against: one device, even split, data-parallel, and the sum of all devices."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.planner.candidates import (
    Candidate,
    Setting,
    fastest,
    formula_s,
    make_candidates,
)
from lightning_hetpipe.planner.cost import batch_bytes
from lightning_hetpipe.planner.microbatch import offered
from lightning_hetpipe.planner.plan_cost import PlanCost, ring, ring_s
from lightning_hetpipe.planner.split import Even, even_stages
from lightning_hetpipe.plans import Stage
from lightning_hetpipe.shares import largest_remainder


@dataclass(frozen=True)
class Baseline:
    """One thing that could be done instead.

    Attributes:
        name: What it is.
        step_s: Predicted seconds of a step; infinite where it does not fit.
        memory_bytes: The fullest device.
        note: How, or why not.
        candidate: The plan, where it is a pipeline.
    """

    name: str
    step_s: float
    memory_bytes: int
    note: str
    candidate: Candidate | None = None


class Alone:
    """What each device reaches without the others, samples in slices of its best size."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        graph = setting.profile.graph
        self.parameter_bytes = float(sum(layer.parameter_bytes for layer in graph.layers))
        self.seconds = cache(self._seconds)
        self._kinds: dict[str, str] = {}
        known: dict[object, str] = {}
        for device in setting.cluster.devices:
            measured = setting.profile.device(device.name)
            key = (device.kind_key, measured.micro_batches, measured.forward_s, measured.backward_s)
            self._kinds[device.name] = known.setdefault(key, device.name)

    def best(self, name: str, samples: int, *, limited: bool = True) -> tuple[float, int, int]:
        """Seconds, slice size and peak bytes of a step of ``samples``; infinite where nothing fits."""
        return self.seconds(self._kinds[name], samples, limited)

    def _seconds(self, name: str, samples: int, limited: bool) -> tuple[float, int, int]:
        if samples == 0:
            return 0.0, 1, 0
        profile = self.setting.profile
        limit = self.setting.cluster.device(name).memory_bytes if limited else None
        best = (np.inf, 1, 0)
        for size in offered(samples, self.setting.smallest):
            full, rest = divmod(samples, size)
            costs = self.setting.costs(size)
            n_layers = len(costs.graph)
            m = -(-samples // size)
            held = 1 if "1f1b" in self.setting.schedules else m
            memory = costs.memory_bytes(name, 0, n_layers, held, n_micro_batches=m)
            memory += batch_bytes(costs, samples)
            if limit is not None and memory > limit:
                continue
            seconds = profile.device(name).optimizer_s_per_byte * self.parameter_bytes
            for slice_size, count in ((size, full), (rest, 1 if rest else 0)):
                if count:
                    tables = profile.device(name).layer_seconds(slice_size)
                    one = float(tables[0].sum() + tables[1].sum())
                    seconds += count * (one + profile.step_forward_s + profile.step_backward_s)
            best = min(best, (seconds, size, round(memory)))
        return best

    def bound_images_per_s(self) -> float:
        """``Σ_d B / T_d``: what all devices reach together if none ever waits, memory aside."""
        batch = self.setting.batch_size
        rates = (batch / self.best(d.name, batch, limited=False)[0] for d in self.setting.cluster.devices)
        return float(sum(rates))


def fastest_single(setting: Setting, alone: Alone, pinned_last: str | None) -> Baseline:
    """The whole model on the device that is fastest alone."""
    names = [d.name for d in setting.cluster.devices if pinned_last in (None, d.name)]
    title = "fastest single device"
    step_s, size, memory, name = min((*alone.best(name, setting.batch_size), name) for name in names)
    if not np.isfinite(step_s):
        return Baseline(title, np.inf, 0, "the model fits on no device alone")
    stage = Stage(0, len(setting.profile.graph), (name,))
    candidate = fastest(make_candidates(setting, [stage], size))
    return Baseline(title, candidate.step_s, memory, f"{name}, micro-batch {size}", candidate)


def even_split(setting: Setting, even: Even, sizes: tuple[int, ...]) -> Baseline:
    """All devices in their given order, split without looking at them, at its best micro-batch size."""
    devices = [device.name for device in setting.cluster.devices]
    title = f"even split by {even}"
    try:
        splits = {size: even_stages(setting.costs(size), devices, even) for size in sizes}
    except PlanError as error:
        return Baseline(title, np.inf, 0, str(error))
    ranked = sorted(sizes, key=lambda size: formula_s(setting, splits[size], size))
    found = next((fit for size in ranked if (fit := list(make_candidates(setting, splits[size], size)))), [])
    if not found:
        return Baseline(title, np.inf, 0, "does not fit in memory")
    best = min(found, key=lambda candidate: candidate.order)
    cost = PlanCost(best.plan, setting.profile, optimizer_copies=setting.optimizer_copies)
    note = f"micro-batch {best.plan.micro_batch}, {best.plan.schedule}"
    return Baseline(title, best.step_s, max(cost.memory_bytes()), note, best)


def data_parallel(setting: Setting, alone: Alone, *, uneven: bool) -> Baseline:
    """Every device holds the whole model and takes equal or speed-sized shares of the batch.

    The slowest share, then a ring all-reduce of all gradients. The uneven form may leave devices out.
    """
    title = "data-parallel, uneven" if uneven else "data-parallel, even"
    names = [device.name for device in setting.cluster.devices]
    ranked = sorted(names, key=lambda name: alone.best(name, setting.batch_size, limited=False)[0])
    counts = sorted({1, 2, 3, 4, 6, 8, 12, 16, 24, 32, len(names)}) if uneven else [len(names)]
    best = (np.inf, 0, "the model does not fit on every device")
    for count in (n for n in counts if n <= min(len(names), setting.batch_size)):
        team = ranked[:count]
        speeds = _speeds(setting, alone, team) if uneven else [1.0] * count
        shares = largest_remainder(setting.batch_size, speeds)
        results = [alone.best(name, share) for name, share in zip(team, shares)]
        step_s = max(result[0] for result in results) + _all_reduce_s(setting, alone, team)
        memory = max(result[2] for result in results)
        note = f"{count} device{'s' if count > 1 else ''}, shares {', '.join(map(str, shares[:8]))}"
        note += " ..." if count > 8 else ""
        best = min(best, (step_s, memory, note))
    return Baseline(title, *best)


def _speeds(setting: Setting, alone: Alone, team: list[str]) -> list[float]:
    batch = setting.batch_size
    return [batch / alone.best(name, batch, limited=False)[0] for name in team]


def _all_reduce_s(setting: Setting, alone: Alone, team: list[str]) -> float:
    links = [setting.profile.link(setting.cluster, team[a], team[b]) for a, b in ring(range(len(team)))]
    return ring_s(links, alone.parameter_bytes)
