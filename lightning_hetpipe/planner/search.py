"""Makes a plan: places layers at each promising micro-batch size, simulates the best, explains the winner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.errors import InfeasibleError, PlanError
from lightning_hetpipe.planner.arguments import check_arguments
from lightning_hetpipe.planner.baselines import Alone, Baseline, data_parallel, even_split, fastest_single
from lightning_hetpipe.planner.candidates import (
    Candidate,
    Setting,
    finish,
    make_candidates,
    n_actions,
    schedules_of,
    stages_of,
)
from lightning_hetpipe.planner.chain import Chain, Depth
from lightning_hetpipe.planner.coarsen import coarsen
from lightning_hetpipe.planner.cost import ADAM
from lightning_hetpipe.planner.interleave import WINS, interleave
from lightning_hetpipe.planner.merging import Look, Merges, forced_merges, search_merges
from lightning_hetpipe.planner.microbatch import best_size, neighbours
from lightning_hetpipe.planner.placement import Budget, Placements, lower_bound_s, place_thinly
from lightning_hetpipe.planner.plan_cost import PlanCost
from lightning_hetpipe.planner.polish import polish
from lightning_hetpipe.planner.pools import Pools, in_order, make_chain, make_pools
from lightning_hetpipe.planner.reason import explain, infeasible
from lightning_hetpipe.planner.request import Request, check_request, teams_of
from lightning_hetpipe.planner.split import Even, even_stages, named_stages
from lightning_hetpipe.plans import Alternative, Merge, Plan, Stage
from lightning_hetpipe.profiles import Profile

_MARGIN = 1.1  # the closed form is off by as much, so placements up to here are worth a simulation
_CLIMBS = 1.15  # what moving cuts can save, as a ratio: slower plans than that are not polished
_COARSE = 0.004  # cuts nearer to each other than this fraction of a period count as one
_KEEP = 20  # placements that are simulated per micro-batch size
_KEEP_MERGED = 4  # likewise, of a first look at some groups
_CUTS = 96  # cuts that the search over orders sees, or ...
_CUTS_PER_DEVICE = 4  # ... as many as this for each device
_ACTIONS = 40_000  # actions that re-ranking may simulate per micro-batch size


def make_plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int | Literal["max"],
    *,
    micro_batch: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    stages: int | None = None,
    even: Even | bool = False,
    cuts: Sequence[str] | None = None,
    device_order: Sequence[str] | None = None,
    pinned_last: str | None = None,
    optimizer_copies: float = ADAM,
    merge: Merge | Sequence[Sequence[str]] = "auto",
    baselines: bool = True,
) -> Plan:
    """The fastest plan that the search finds, with its prediction, its reason and what it was compared with.

    Args:
        profile: Measured or analytic; it must have every device of the cluster.
        cluster: Its devices may be left out and reordered; rank 0 of the plan holds the last stage.
        batch_size: Samples per optimizer step; ``max`` for as many as memory allows (`largest_batch`).
        micro_batch: Samples per micro-batch, or ``auto``.
        schedule: ``gpipe``, ``1f1b``, ``interleaved`` (devices hold several stages), or ``auto``.
        stages: Exactly so many stages; as many as pay by default.
        even: Split without a search: ``layers``, or ``time`` (also True) on the first device.
        cuts: Split by hand: the name of the first layer of every stage but the first.
        device_order: Uses exactly these devices, in this order of stages.
        pinned_last: The device that must read the data and hold the last stage; any by default.
        optimizer_copies: State values that the optimizer keeps per parameter (Adam 2, momentum 1, SGD 0).
        merge: ``auto`` lets devices share a stage where that saves more than 10 % of the step, ``never`` does
            not; or the groups of devices that must share one each. ``cuts`` and ``device_order`` name a group
            ``a+b``.
        baselines: False leaves the comparison out.

    Raises:
        InfeasibleError: Nothing fits; the message lists remedies.
        PlanError: The options contradict each other or the model.
        ProfileError: A device was not profiled.
    """
    if batch_size == "max":
        return _of_largest_batch(
            profile,
            cluster,
            {
                "stages": stages,
                "even": even or None,
                "cuts": cuts,
                "device_order": device_order,
                "merge": teams_of(merge, schedule) or None,
            },
            micro_batch=micro_batch,
            schedule=schedule,
            pinned_last=pinned_last,
            optimizer_copies=optimizer_copies,
        )
    names = {"cuts": cuts, "device_order": device_order}
    check_arguments(profile, cluster, batch_size, micro_batch, stages, optimizer_copies, names)
    setting = Setting(profile, cluster, batch_size, schedules_of(schedule), optimizer_copies)
    request = Request(
        setting,
        micro_batch,
        schedule,
        len(cuts) + 1 if cuts is not None and stages is None else stages,
        "time" if even is True else even or None,
        tuple(cuts) if cuts is not None else None,
        tuple(device_order) if device_order is not None else None,
        pinned_last,
    )
    teams = teams_of(merge, schedule)
    check_request(replace(request, device_order=None) if teams else request)
    alone = Alone(setting)
    bound = alone.bound_images_per_s()
    single = fastest_single(setting, alone, pinned_last)
    search = _Found()
    if teams:
        merges = forced_merges(setting, teams, _look(request), first=pinned_last, sizes=request.sizes)
        setting = replace(setting, exact=merges.exact)
    else:
        search = _fixed(request) if request.is_fixed else _searched(request, single)
        if search.found and not request.is_fixed:
            search.found.append(_polished(request, setting, search.found))
        merges = Merges()
        if merge == "auto" and not request.is_fixed and request.device_order is None:
            best = min(search.found, key=lambda candidate: candidate.order, default=None)
            merges = search_merges(
                setting,
                best,
                _look(request),
                first=pinned_last,
                sizes=request.sizes,
                baselines=baselines,
            )
    search.found += merges.found
    if not search.found:
        raise infeasible(setting, request.sizes, stages=stages, device_order=request.device_order)
    winner = min(search.found, key=lambda candidate: candidate.order)
    if not request.is_fixed:
        if winner in merges.found:
            winner = _polished(request, setting, merges.found)
        winner = _in_rounds(request, search, winner)
    plan = finish(setting, winner.plan, bound)
    rows = [single]
    if baselines:
        rows += all_baselines(setting, alone, plan)
        if pinned_last is not None and not (teams and request.device_order):
            rows += _unpinned(request, single)
    return replace(
        plan,
        profile_hash=profile.content_hash,
        reason=explain(setting, plan, search.found, rows, gap=search.gap, merging=merges.verdict),
        alternatives=tuple(
            Alternative(row.name, batch_size / row.step_s, row.step_s, row.memory_bytes, row.note)
            for row in (*rows, *merges.rows)
            if np.isfinite(row.step_s)
        ),
    )


def _of_largest_batch(profile: Profile, cluster: Cluster, placement: dict[str, Any], **options: Any) -> Plan:
    from lightning_hetpipe.planner.largest import largest_batch  # which makes plans itself

    given = [name for name, value in placement.items() if value is not None]
    if given:
        raise PlanError(f"the largest batch is one of any placement: leave {', '.join(given)} out")
    return largest_batch(profile, cluster, **options).plan


def _look(request: Request) -> Look:
    """Places layers as the request says, in a setting with composites or with fewer devices."""

    def look(
        setting: Setting, sizes: tuple[int, ...] | None, order: tuple[str, ...] | None = None
    ) -> list[Candidate]:
        here = replace(
            request,
            setting=setting,
            pinned_last=setting.holder(request.pinned_last),
            device_order=order or request.device_order,
        )
        names = {device.name for device in setting.cluster.devices}
        if here.pinned_last not in (None, *names):
            return []
        check_request(here)
        if here.is_fixed:
            return _fixed(here).found
        if sizes is None:
            return _searched(here, Baseline("nobody", np.inf, 0, "")).found
        pools = make_pools(setting.profile, setting.cluster, pinned_last=here.pinned_last)
        return [each for size in sizes for each in _placed(here, pools, size, np.inf, _KEEP_MERGED)[0]]

    return look


def all_baselines(setting: Setting, alone: Alone, plan: Plan) -> list[Baseline]:
    """Even splits and data-parallel training, each at its best micro-batch size."""
    sizes = neighbours(setting.sizes, plan.micro_batch, 5)
    return [
        even_split(setting, "layers", sizes),
        even_split(setting, "time", sizes),
        data_parallel(setting, alone, uneven=False),
        data_parallel(setting, alone, uneven=True),
    ]


@dataclass
class _Found:
    """Candidates of a search, and how far the best placement can be from the optimum."""

    found: list[Candidate] = field(default_factory=list)
    gap: float = 0.0


def _fixed(request: Request) -> _Found:
    """An even split, or one by hand, at every micro-batch size on offer."""
    order = request.device_order or _given_order(request)
    if request.device_order is None:
        order = order[-(request.stages or len(order)) :] if request.pinned_last else order[: request.stages]
    result = _Found()
    for size in request.sizes:
        if request.cuts is not None:
            stages = named_stages(request.setting.profile.graph, request.cuts, order)
        else:
            assert request.even is not None
            stages = even_stages(request.setting.costs(size), order, request.even)
        result.found += make_candidates(request.setting, stages, size)
    return result


def _given_order(request: Request) -> tuple[str, ...]:
    names = [device.name for device in request.setting.cluster.devices if device.name != request.pinned_last]
    return (*names, request.pinned_last) if request.pinned_last else tuple(names)


def _searched(request: Request, single: Baseline) -> _Found:
    """Climbs over micro-batch sizes, from the square-root rule's choice, and places layers at each."""
    setting = request.setting
    if request.device_order is not None:
        pools = in_order(setting.profile, setting.cluster, request.device_order)
    else:
        pools = make_pools(setting.profile, setting.cluster, pinned_last=request.pinned_last)
    result = _Found()
    best: dict[int, float] = {}
    alone = single.candidate
    may_be_alone = request.stages in (None, 1) and request.device_order is None
    if alone and may_be_alone and request.micro_batch in ("auto", alone.plan.micro_batch):
        result.found.append(alone)

    beat_s = np.inf
    gaps: list[Callable[[], float]] = []

    def visit(size: int) -> float:
        nonlocal beat_s
        if size not in best:
            candidates, gap, objective_s = _placed(request, pools, size, _MARGIN * beat_s)
            result.found += candidates
            beat_s = min(beat_s, objective_s)
            best[size] = min((candidate.step_s for candidate in candidates), default=np.inf)
            if best[size] <= min(best.values()):
                gaps.append(gap)
        return best[size]

    sizes = request.sizes
    members = (len(group.devices) for group in setting.groups if group.split == "batch")
    index = int(np.searchsorted(sizes, max(1, setting.batch_size // 8, *members)))  # a sample for each
    index = min(index, len(sizes) - 1)
    while not np.isfinite(visit(sizes[index])) and index > 0:
        index -= 1
    if not np.isfinite(best[sizes[index]]):
        return result
    first = min(result.found, key=lambda candidate: (len(candidate.plan.stages) == 1, candidate.order))
    for size in neighbours(sizes, _square_root_size(setting, first.plan), 2):
        visit(size)
    while True:
        centre = sizes.index(min(best, key=lambda size: best[size]))
        around = [i for i in (centre - 1, centre + 1) if 0 <= i < len(sizes) and sizes[i] not in best]
        if not around:
            result.gap = gaps[-1]()
            return result
        for i in around:
            visit(sizes[i])


def _square_root_size(setting: Setting, plan: Plan) -> float:
    """``mu*`` for the stages of a plan."""

    def figures(size: int) -> tuple[int, list[float], float]:
        cost = PlanCost(replace(plan, micro_batch=size), setting.profile)
        seconds = [sum(cost.stage_seconds(stage, size)) for stage in range(len(plan.stages))]
        return size, seconds, sum(map(sum, cost.hops(size)))

    small = max(1, min(plan.micro_batch, plan.batch_size // 2))
    if small == plan.batch_size:
        return float(small)
    return best_size(plan.batch_size, figures(small), figures(min(2 * small, plan.batch_size)))


def _placed(
    request: Request, pools: Pools, size: int, upper_s: float, keep: int = _KEEP
) -> tuple[list[Candidate], Callable[[], float], float]:
    """The best placements at one micro-batch size, as simulated plans; the gap and the best objective.

    The gap is a question: where cuts were left out, answering it takes a while.
    """
    setting = request.setting
    chain = make_chain(
        setting.costs(size),
        setting.cluster,
        pools,
        batch_size=setting.batch_size,
        pinned_last=request.pinned_last,
        n_stages=request.stages,
    )
    chain, cuts = coarsen(chain, _COARSE)
    candidates: list[Candidate] = []
    seen: set[tuple[Stage, ...]] = set()
    gap, objective_s, thinned = 0.0, np.inf, False
    for depth in _depths(request, chain):
        if depth == "serial" and candidates:
            break
        placements, bounded = _place(chain.with_depth(depth), upper_s)
        gap, thinned = max(gap, placements.gap), thinned or not bounded
        if placements.found:
            objective_s = min(objective_s, placements.found[0].objective_s)
            upper_s = min(upper_s, objective_s)
        for placement in placements.found[: min(keep, _most(placements, chain.n_micro_batches))]:
            stages = stages_of(placement, pools, setting.cluster, cuts.tolist())
            if stages not in seen:
                seen.add(stages)
                candidates += make_candidates(setting, stages, size)

    def loss() -> float:
        if not thinned or not np.isfinite(objective_s):
            return gap
        return 1 - lower_bound_s(chain.with_depth("serial"), objective_s) / objective_s

    return candidates, loss, objective_s


def _in_rounds(request: Request, search: _Found, winner: Candidate) -> Candidate:
    """The best pipeline cut into rounds, where asked for or faster by more than a trifle; else the winner.

    Raises:
        InfeasibleError: Rounds were asked for and cannot be made.
    """
    forced = request.schedule == "interleaved"
    several = [candidate for candidate in (winner, *search.found) if len(candidate.plan.stages) > 1]
    start = min(several, key=lambda candidate: candidate.order, default=None)
    allowed = request.schedule == "auto" and request.stages is None
    if start is None or not (forced or (allowed and 4 * n_actions(start.plan) < _ACTIONS)):
        found = None
    else:
        found = interleave(request.setting, start, actions=_ACTIONS)
    if found is None and forced:
        raise InfeasibleError(
            "the interleaved schedule was asked for, but no pipeline of at least 2 devices that fits can be "
            "cut into rounds: take schedule auto, more layers per device, or more memory"
        )
    if found is not None and (forced or found.step_s < WINS * winner.step_s):
        search.found.append(winner)
        return found
    return winner


def _polished(request: Request, setting: Setting, found: Sequence[Candidate]) -> Candidate:
    """The best plan that can be reached from the best of every size and schedule, of those that may win."""
    ranked = sorted(found, key=lambda candidate: candidate.order)
    starts: dict[object, Candidate] = {}
    for candidate in ranked:
        if candidate.step_s <= _CLIMBS * ranked[0].step_s:
            starts.setdefault((candidate.plan.micro_batch, candidate.plan.schedule), candidate)
    climbed = []
    for start in starts.values():
        fixed = len(start.plan.stages) if request.device_order else int(request.pinned_last is not None)
        climbed.append(polish(setting, start, fixed=fixed, actions=_ACTIONS))
    return min(climbed, key=lambda candidate: candidate.order)


def _depths(request: Request, chain: Chain) -> tuple[Depth, ...]:
    """What memory must have room for, the most first; one search where it always has."""
    if "1f1b" not in request.setting.schedules:
        return ("all",)
    return ("safe",) if chain.memory is None else ("safe", "shallow", "serial")


def _place(chain: Chain, upper_s: float) -> tuple[Placements, bool]:
    """A search as hard as the size of the problem allows; whether its bound holds."""
    states = float(np.prod(chain.available + 1.0)) * chain.n_choices * chain.n_layers
    budget = (
        Budget(searches=30, rounds=6)
        if states <= 1e5
        else Budget(labels=150, searches=4, rounds=10, slack=0.01)
    )
    most = max(_CUTS, _CUTS_PER_DEVICE * int(chain.available[: chain.n_choices].sum()))
    return place_thinly(chain, most, tolerance=0.01, upper_s=upper_s, budget=budget)


def _most(placements: Placements, n_micro_batches: int) -> int:
    """How many placements can be simulated within `_ACTIONS`, one at least."""
    if not placements.found:
        return 0
    actions = 2 * 6 * n_micro_batches * len(placements.found[0].starts)
    return max(1, min(len(placements.found), _ACTIONS // actions))


def _unpinned(request: Request, single: Baseline) -> list[Baseline]:
    """What the plan could reach if any device might hold the last stage."""
    free = _searched(replace(request, pinned_last=None), single)
    best = min(free.found, key=lambda candidate: candidate.order)
    cost = PlanCost(best.plan, request.setting.profile, optimizer_copies=request.setting.optimizer_copies)
    note = f"last stage on {best.plan.stages[-1].devices[0]} instead of {request.pinned_last}"
    return [Baseline("last stage anywhere", best.step_s, max(cost.memory_bytes()), note, best)]
