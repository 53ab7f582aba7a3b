"""From stages to complete plans: ranks, schedules, in-flight counts that fit, and the simulated step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.errors import InfeasibleError
from lightning_hetpipe.planner.chain import Placement
from lightning_hetpipe.planner.cost import (
    LayerCosts,
    batch_bytes,
    is_copied,
    layer_costs,
    one_f_one_b_step_s,
    safe_k,
    steps_ahead,
)
from lightning_hetpipe.planner.groups import composite_name, refusal
from lightning_hetpipe.planner.memory import Share
from lightning_hetpipe.planner.microbatch import offered
from lightning_hetpipe.planner.plan_cost import PlanCost, member_parts, schedule_of
from lightning_hetpipe.planner.pools import Pools
from lightning_hetpipe.planner.simulate import simulate_schedule, step_seconds
from lightning_hetpipe.plans import Plan, Prediction, Stage
from lightning_hetpipe.profiles import Profile

ONE_STAGE = ("gpipe", "1f1b")  # schedules under which a device holds one stage
MANY_ACTIONS = 30_000


@dataclass(frozen=True)
class Candidate:
    """A complete plan and its simulated step, optimizer included."""

    plan: Plan
    step_s: float

    @property
    def order(self) -> tuple[float, int, int]:
        """Faster first; of equals the one with fewer devices, then the one that holds less."""
        return (float(f"{self.step_s:.6g}"), len(self.plan.stages), sum(self.plan.in_flight))


@dataclass(frozen=True)
class Setting:
    """What all candidates of a search share.

    Attributes:
        groups: Where the cluster has composites: the groups that these stand for.
        members: Then the setting in which the members stand alone.
        exact: Whether every group must compute what one device would.
    """

    profile: Profile
    cluster: Cluster
    batch_size: int
    schedules: tuple[str, ...]
    optimizer_copies: float
    groups: tuple[Stage, ...] = ()
    members: "Setting | None" = None
    exact: bool = True

    @property
    def smallest(self) -> int:
        """The smallest measured micro-batch: smaller ones are guesses, and BatchNorm may refuse them."""
        tables = (self.profile.device(device.name).micro_batches for device in self.cluster.devices)
        return max(sizes[0] if len(sizes) > 1 else 1 for sizes in tables)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes to choose from."""
        return offered(self.batch_size, self.smallest)

    def holder(self, device: str | None) -> str | None:
        """The composite that stands for a device, or the device itself."""
        for group in self.groups:
            if device in group.devices:
                return composite_name(group.devices)
        return device

    def spread(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """The stages with the members in place of composites."""
        held = {composite_name(group.devices): group for group in self.groups}
        return tuple(
            replace(held[stage.devices[0]], start=stage.start, stop=stage.stop)
            if stage.devices[0] in held
            else stage
            for stage in stages
        )

    def costs(self, micro_batch: int) -> LayerCosts:
        return layer_costs(self.profile, micro_batch, self.optimizer_copies)


def schedules_of(schedule: str) -> tuple[str, ...]:
    """The schedules of one stage per device that an option allows; rounds are cut from the best plan."""
    return ONE_STAGE if schedule in ("auto", "interleaved") else (schedule,)


def stages_of(placement: Placement, pools: Pools, cluster: Cluster, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """Names layers and a device for every stage: of its pool, one on the host of the stage after it if any.

    Args:
        placement: In terms of a chain.
        pools: Whose devices its choices are.
        cluster: The hosts.
        cuts: The layer at each of the chain's cuts.
    """
    free = [list(reversed(names)) for names in pools.names]
    starts = [int(cuts[start]) for start in placement.starts]
    stops = (*starts[1:], int(cuts[-1]))
    stages: list[Stage] = []
    host = ""
    for start, stop, choice in reversed(list(zip(starts, stops, placement.choices))):
        names = free[choice]
        near = [name for name in names if cluster.device(name).host == host]
        name = near[-1] if near else names[-1]
        names.remove(name)
        host = cluster.device(name).host
        stages.append(Stage(start, stop, (name,)))
    return tuple(reversed(stages))


def make_candidates(setting: Setting, stages: Sequence[Stage], micro_batch: int) -> Iterator[Candidate]:
    """One candidate per allowed schedule that fits in memory.

    Where a step has so many actions that simulating it takes long, GPipe is left out if 1F1B is allowed:
    with enough in flight 1F1B is rarely slower. None where a group cannot hold its stage.
    """
    stages = setting.spread(stages)
    whole = setting.members or setting
    for stage in stages:
        if refusal(whole.profile, whole.cluster, stage, micro_batch, exact=setting.exact):
            return
    setting = whole
    base = draft(setting, stages, micro_batch)
    many = n_actions(base) > MANY_ACTIONS
    for schedule in ("1f1b",) if many and "1f1b" in setting.schedules else setting.schedules:
        plan = with_schedule(setting, base, schedule)
        if plan is not None:
            cost = PlanCost(plan, setting.profile, optimizer_copies=setting.optimizer_copies)
            lists = schedule_of(plan, setting.profile.graph, check=False)
            seconds = step_seconds(lists, cost.seconds, cost.transfer)
            yield Candidate(plan, seconds + cost.optimizer_s())


def n_actions(plan: Plan) -> int:
    """About how many actions a step of the plan has, over all ranks."""
    return 6 * len(plan.stages) * len(plan.slices(plan.batch_size))


def formula_s(setting: Setting, stages: Sequence[Stage], micro_batch: int) -> float:
    """The closed form of the step, memory aside: for choosing what to simulate."""
    plan = draft(setting, stages, micro_batch)
    cost = PlanCost(plan, setting.profile, optimizer_copies=setting.optimizer_copies)
    seconds = [sum(cost.stage_seconds(stage, micro_batch)) for stage in range(len(stages))]
    hops = [sum(hop) for hop in cost.hops(micro_batch)]
    return one_f_one_b_step_s(seconds, hops, len(cost.slices))


def draft(setting: Setting, stages: Sequence[Stage], micro_batch: int) -> Plan:
    """A plan with its ranks in order: the last stage first, then the others, then idle devices."""
    used = dict.fromkeys(name for stage in (stages[-1], *stages[:-1]) for name in stage.devices)
    devices = {device.name: device for device in setting.cluster.devices}
    ordered = [devices.pop(name) for name in used] + list(devices.values())
    return Plan(
        cluster=replace(setting.cluster, devices=tuple(ordered)),
        layer_names=tuple(layer.name for layer in setting.profile.graph.layers),
        stages=tuple(stages),
        batch_size=setting.batch_size,
        micro_batch=micro_batch,
        schedule="gpipe" if len(used) == sum(len(stage.devices) for stage in stages) else "interleaved",
        in_flight=(-(-setting.batch_size // micro_batch),) * len(stages),
        graph_fingerprint=setting.profile.graph.fingerprint,
    )


def with_schedule(setting: Setting, plan: Plan, schedule: str) -> Plan | None:
    """The plan under a schedule, in flight as much as pays and fits; None if not even the least fits."""
    m = len(plan.slices(plan.batch_size))
    if schedule == "interleaved":
        return _in_rounds(setting, plan, m)
    if schedule == "gpipe":
        wanted: Sequence[int] = (m,) * len(plan.stages)
    else:
        cost = PlanCost(plan, setting.profile, optimizer_copies=setting.optimizer_copies)
        seconds = [sum(cost.stage_seconds(stage, plan.micro_batch)) for stage in range(len(plan.stages))]
        wanted = safe_k(seconds, [sum(hop) for hop in cost.hops(plan.micro_batch)], m)
    counts = fitting(setting, plan, wanted)
    if counts is None or (schedule == "gpipe" and counts != tuple(wanted)):
        return None
    return replace(plan, schedule=schedule, in_flight=counts)


def _in_rounds(setting: Setting, plan: Plan, m: int) -> Plan | None:
    """The interleaved plan: in flight what a micro-batch's way to the loss and back takes, or what fits.

    ``k_s = min(M, D + ceil( Σ_{j>=s} (t_j + hop_j) / T ))``, ``T`` being the busiest rank's seconds and
    ``D`` the number of devices, because so many micro-batches wait for their turn in a round.
    """
    cost = PlanCost(plan, setting.profile, optimizer_copies=setting.optimizer_copies)
    seconds = [sum(cost.stage_seconds(stage, plan.micro_batch)) for stage in range(len(plan.stages))]
    hops = [sum(hop) for hop in cost.hops(plan.micro_batch)]
    period = max(sum(seconds[stage] for stage in held) for held in plan.stages_of_rank)
    devices = {name for stage in plan.stages for name in stage.devices}
    ahead = accumulate(t + hop for t, hop in zip(reversed(seconds), reversed([*hops, 0.0])))
    counts = [min(m, len(devices) + steps_ahead(way, period)) for way in ahead][::-1]
    limits = [device.memory_bytes for device in plan.cluster.devices]
    while True:
        plan = replace(plan, schedule="interleaved", in_flight=tuple(counts))
        cost = PlanCost(plan, setting.profile, optimizer_copies=setting.optimizer_copies)
        full = [
            rank
            for rank, (used, limit) in enumerate(zip(cost.memory_bytes(), limits))
            if limit is not None and used > limit
        ]
        if not full:
            return plan
        for rank in full:
            most = max(plan.stages_of_rank[rank], key=lambda stage: counts[stage])
            if counts[most] == 1:
                return None
            counts[most] -= 1


def fitting(setting: Setting, plan: Plan, wanted: Sequence[int]) -> tuple[int, ...] | None:
    """In-flight counts cut down to what memory allows, still falling along the stages; None if none do."""
    slices = plan.slices(plan.batch_size)
    costs, n_slices = setting.costs(max(slices)), len(slices)
    counts: list[int] = []
    for index, (stage, k) in enumerate(zip(plan.stages, wanted)):
        for name, share in zip(stage.devices, stage.shares):
            limit = setting.cluster.device(name).memory_bytes
            if limit is None:
                continue
            if index == len(plan.stages) - 1:
                limit -= round(batch_bytes(costs, setting.batch_size))
            need = partial(
                costs.memory_bytes,
                name,
                stage.start,
                stage.stop,
                n_micro_batches=n_slices,
                copied=is_copied(setting.cluster),
                share=Share(*member_parts(setting.profile, plan, stage, share)),
            )
            while k > 0 and need(k) > limit:
                k -= 1
            if k == 0:
                return None
        counts.append(k)
        for earlier in range(index, 0, -1):
            counts[earlier] = min(counts[earlier], counts[earlier - 1])
    return tuple(counts)


def finish(setting: Setting, plan: Plan, images_per_s_bound: float) -> Plan:
    """The plan with its prediction."""
    cost = PlanCost(plan, setting.profile, optimizer_copies=setting.optimizer_copies)
    timeline = simulate_schedule(schedule_of(plan, setting.profile.graph), cost.seconds, cost.transfer)
    step_s, busy = timeline.step_s + cost.optimizer_s(), timeline.busy
    seconds = [cost.stage_seconds(stage, plan.micro_batch) for stage in range(len(plan.stages))]
    return replace(
        plan,
        prediction=Prediction(
            step_s=step_s,
            images_per_s=plan.batch_size / step_s,
            busy=tuple(
                busy[ranks[0]]
                if len(plan.stages_of_rank[ranks[0]]) == 1
                else len(cost.slices) * sum(mine) / timeline.step_s
                for ranks, mine in zip(plan.ranks_of_stage, seconds)
            ),
            memory_bytes=cost.memory_bytes(),
            forward_s=tuple(forward for forward, _ in seconds),
            backward_s=tuple(backward for _, backward in seconds),
            cut_bytes=cost.entering_bytes(plan.micro_batch),
            lower_bound_s=cost.lower_bound_s(),
            images_per_s_bound=images_per_s_bound,
        ),
    )


def fastest(candidates: Iterable[Candidate]) -> Candidate:
    """The best of several.

    Raises:
        InfeasibleError: There are none.
    """
    ranked = sorted(candidates, key=lambda candidate: candidate.order)
    if not ranked:
        raise InfeasibleError("no schedule of these stages fits in memory")
    return ranked[0]
