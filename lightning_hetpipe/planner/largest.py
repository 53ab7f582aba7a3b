"""The largest batch that a cluster can train, and what allows it.

Under 1F1B as few micro-batches as one per stage are in flight; so only what the reader holds, the inputs of
the whole batch, grows with the batch:

    B = max over last stages of  floor( (limit - need with one in flight) / input bytes per sample )

over those last stages whose other layers fit on the other devices. Under GPipe all micro-batches are in
flight, so every stage's need grows with the batch.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.errors import InfeasibleError, PlanError
from lightning_hetpipe.planner.baselines import Alone
from lightning_hetpipe.planner.candidates import (
    Setting,
    draft,
    finish,
    formula_s,
    n_actions,
    with_schedule,
)
from lightning_hetpipe.planner.cost import ADAM, Array, batch_bytes, is_copied
from lightning_hetpipe.planner.plan_cost import PlanCost
from lightning_hetpipe.planner.reason import infeasible
from lightning_hetpipe.planner.search import make_plan
from lightning_hetpipe.planner.split import even_stages
from lightning_hetpipe.plans import Plan, Prediction, Stage, micro_batch_sizes
from lightning_hetpipe.profiles import Profile

_SEARCHED = 20_000  # actions of a step up to which the fastest plan is searched for
_SIMULATED = 300_000  # and up to which one is simulated


@dataclass(frozen=True)
class Largest:
    """What `largest_batch` found.

    Attributes:
        plan: For the largest batch.
        even: The largest batch of GPipe with as many layers on each device, in the cluster's order; None if
            not even one sample fits so.
    """

    plan: Plan
    even: Plan | None

    @property
    def gain(self) -> float | None:
        """How much larger than that of the even split, as a fraction of it."""
        return None if self.even is None else self.plan.batch_size / self.even.batch_size - 1


def largest_batch(
    profile: Profile,
    cluster: Cluster,
    *,
    micro_batch: int | str = "auto",
    schedule: str = "auto",
    pinned_last: str | None = None,
    optimizer_copies: float = ADAM,
) -> Largest:
    """The plan of the largest batch that fits in the memory of a cluster.

    No plan of another placement, micro-batch size or in-flight counts trains a larger one, as far as the
    memory model goes. Of the placements that do, it is the fastest that `make_plan` finds, where a step is
    small enough to search.

    Args:
        micro_batch: Samples per micro-batch; ``auto`` takes the measured size that allows the largest batch,
            and of equals the largest size.
        schedule: ``gpipe``, ``1f1b`` or ``auto``, which is 1F1B: it needs no more than GPipe.
        profile, cluster, pinned_last, optimizer_copies: As for `make_plan`.

    Raises:
        InfeasibleError: Not even one sample fits.
        PlanError: A device has no memory limit, so that there is no largest batch.
    """
    unlimited = [device.name for device in cluster.devices if device.memory_bytes is None]
    if unlimited:
        raise PlanError(
            f"the largest batch for cluster {cluster.name!r} was asked for, but {', '.join(unlimited)} "
            f"{'has' if len(unlimited) == 1 else 'have'} no memory limit: give every device its memory"
        )
    leanest = "1f1b" if schedule == "auto" else schedule

    def at(batch_size: int) -> Setting:
        return Setting(profile, cluster, batch_size, (leanest,), optimizer_copies)

    smallest = at(1).smallest
    measured = {size for device in cluster.devices for size in profile.device(device.name).micro_batches}
    if micro_batch != "auto":
        sizes = [int(micro_batch)]
    else:
        sizes = sorted(size for size in measured | {smallest} if size >= smallest)
    plans = list(filter(None, (_largest_of(at, size, pinned_last) for size in sizes)))
    if not plans and micro_batch == "auto":  # a batch below the smallest measured size is one micro-batch
        plans = list(
            filter(None, (_largest_of(at, size, pinned_last) for size in range(smallest - 1, 0, -1)))
        )
    if not plans:
        fewest = 1 if micro_batch == "auto" else sizes[0]
        raise infeasible(at(fewest), (fewest,), stages=None, device_order=None)
    plan = max(plans, key=lambda plan: (plan.batch_size, plan.micro_batch))
    fastest = _searched(at(plan.batch_size), plan, schedule, pinned_last)
    return Largest(fastest, _largest_even(at, sizes))


def _largest_of(at: Callable[[int], Setting], size: int, pinned_last: str | None) -> Plan | None:
    """The largest batch in micro-batches of ``size``, or the whole batch of fewer samples."""
    needs = cache(partial(_needs, at(size)))

    def fit(batch_size: int) -> Plan | None:
        setting = at(batch_size)
        (schedule,) = setting.schedules
        slices = micro_batch_sizes(batch_size, size)
        n = len(slices)
        k, n = (1, min(n, 2)) if schedule == "1f1b" else (n, n)  # more than in flight is all that counts
        stages = _fitting_stages(setting, size, partial(needs, max(slices), k, n), pinned_last)
        return None if stages is None else with_schedule(setting, draft(setting, stages, size), schedule)

    return _greatest(fit, start=size)


def _greatest(fit: Callable[[int], Plan | None], start: int) -> Plan | None:
    """The plan of the largest batch, from ``start`` on, for which there is one; all smaller ones fit too."""
    best = fit(start)
    if best is None:
        return None
    step = start
    while (plan := fit(best.batch_size + step)) is not None:
        best, step = plan, 2 * step
    while step > 1:
        step = -(-step // 2)
        while (plan := fit(best.batch_size + step)) is not None:
            best = plan
    return best


def _fitting_stages(
    setting: Setting, size: int, needs: Callable[[str], Array], pinned_last: str | None
) -> tuple[Stage, ...] | None:
    """Stages that fit; None if none do.

    ``reach[used][cut]``: whether the layers before a cut fit on so many devices of each kind.
    """
    n_layers = len(setting.profile.graph)
    batch = batch_bytes(setting.costs(size), setting.batch_size)
    kinds = _kinds(setting, pinned_last)
    tables = []
    for names in kinds:
        limit = setting.cluster.device(names[0]).memory_bytes
        assert limit is not None
        fits = needs(names[0]) <= limit
        fits[:, n_layers] = needs(names[0])[:, n_layers] + batch <= limit
        if pinned_last is not None:
            fits[:, slice(n_layers) if pinned_last in names else n_layers] = False
        tables.append(fits)
    reach: dict[tuple[int, ...], npt.NDArray[np.bool_]] = {}
    for used in itertools.product(*(range(len(names) + 1) for names in kinds)):
        row = np.arange(n_layers + 1) == (0 if not any(used) else -1)
        for kind, fits in enumerate(tables):
            if used[kind]:
                row = row | (reach[_without(used, kind)][:, None] & fits).any(0)
        reach[used] = row
        if row[n_layers]:
            return _traced(tables, kinds, reach, used)
    return None


def _traced(
    tables: Sequence[npt.NDArray[np.bool_]],
    kinds: Sequence[tuple[str, ...]],
    reach: Mapping[tuple[int, ...], npt.NDArray[np.bool_]],
    used: tuple[int, ...],
) -> tuple[Stage, ...]:
    """The stages that reach the end with the devices that are used, from the last one back."""
    stop, stages = len(next(iter(reach.values()))) - 1, []
    while stop:
        kind, start = next(
            (kind, int(starts[0]))
            for kind, fits in enumerate(tables)
            if used[kind] and (starts := np.flatnonzero(reach[_without(used, kind)] & fits[:, stop])).size
        )
        used = _without(used, kind)
        stages.append(Stage(start, stop, (kinds[kind][used[kind]],)))
        stop = start
    return tuple(reversed(stages))


def _kinds(setting: Setting, pinned_last: str | None) -> list[tuple[str, ...]]:
    """Devices that need and have the same memory, together."""
    found: dict[object, list[str]] = {}
    for device in setting.cluster.devices:
        own = device.name if device.name == pinned_last else ""
        measured = setting.profile.device(device.name)
        peaks = measured.forward_peak_bytes, measured.backward_peak_bytes, measured.optimizer_peak
        key = device.memory_bytes, peaks, own
        found.setdefault(key, []).append(device.name)
    return [tuple(names) for names in found.values()]


def _needs(setting: Setting, size: int, k: int, n: int, name: str) -> Array:
    """Bytes of a run ``start..stop`` on a device, ``[layers + 1, layers + 1]``; infinite for none.

    ``k`` of ``n`` micro-batches are in flight.
    """
    moments = setting.costs(size).memory(name).tables(copied=is_copied(setting.cluster))
    need = moments.peak(k, n)
    return np.where(np.triu(np.ones_like(need, dtype=bool), k=1), need, np.inf)


def _without(used: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*used[:kind], used[kind] - 1, *used[kind + 1 :])


def _searched(setting: Setting, plan: Plan, schedule: str, pinned_last: str | None) -> Plan:
    """The fastest plan for the same batch, where a search is a matter of seconds and finds one."""
    if n_actions(plan) <= _SEARCHED:
        with suppress(InfeasibleError):
            return make_plan(
                setting.profile,
                setting.cluster,
                setting.batch_size,
                micro_batch=plan.micro_batch,
                schedule=schedule,
                pinned_last=pinned_last,
                optimizer_copies=setting.optimizer_copies,
            )
    why = f"the largest batch, {plan.batch_size}; its stages were chosen to fit, not to be fast"
    return replace(_predicted(setting, plan), reason=why, profile_hash=setting.profile.content_hash)


def _predicted(setting: Setting, plan: Plan) -> Plan:
    """With its prediction: simulated, or by the closed form where a step has very many actions."""
    bound = Alone(setting).bound_images_per_s()
    if n_actions(plan) <= _SIMULATED:
        return finish(setting, plan, bound)
    cost = PlanCost(plan, setting.profile, optimizer_copies=setting.optimizer_copies)
    step_s = formula_s(setting, plan.stages, plan.micro_batch) + cost.optimizer_s()
    prediction = Prediction(
        step_s, plan.batch_size / step_s, memory_bytes=cost.memory_bytes(), images_per_s_bound=bound
    )
    return replace(plan, prediction=prediction)


def _largest_even(at: Callable[[int], Setting], sizes: Sequence[int]) -> Plan | None:
    """The largest batch of GPipe on an even split, at the size that allows the largest."""

    def plans(size: int) -> Plan | None:
        def fit(batch_size: int) -> Plan | None:
            setting = at(batch_size)
            names = [device.name for device in setting.cluster.devices]
            stages = even_stages(setting.costs(size), names, "layers")
            return with_schedule(setting, draft(setting, stages, size), "gpipe")

        return _greatest(fit, start=size)

    if len(at(1).cluster.devices) > len(at(1).profile.graph):
        return None
    best = max(filter(None, map(plans, sizes)), key=lambda plan: plan.batch_size, default=None)
    return None if best is None else _predicted(at(best.batch_size), best)
