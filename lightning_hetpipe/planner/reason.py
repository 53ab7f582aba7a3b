"""Says in words why a plan won, or why there is none."""

from collections.abc import Sequence

import numpy as np

from lightning_hetpipe.errors import InfeasibleError
from lightning_hetpipe.planner.baselines import Baseline
from lightning_hetpipe.planner.candidates import Candidate, Setting
from lightning_hetpipe.planner.cost import batch_bytes
from lightning_hetpipe.planner.plan_cost import PlanCost
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.units import format_bytes


def explain(
    setting: Setting,
    plan: Plan,
    found: Sequence[Candidate],
    rows: Sequence[Baseline],
    *,
    gap: float,
    merging: str = "",
) -> str:
    """One line: is it worth it, the bottleneck, the best rejected alternative, the binding limit.

    Args:
        setting: What was asked.
        plan: The winner, with its prediction.
        found: Every candidate that was simulated.
        rows: Baselines.
        gap: How far the search can be from the best placement, as a fraction.
        merging: Whether groups pay.
    """
    parts = [
        _worth(setting, plan, rows),
        _bottleneck(setting, plan),
        merging,
        _rejected(plan, found),
        _limit(plan),
    ]
    if gap > 0.005:
        single = " of one stage per device" if plan.schedule == "interleaved" else ""
        parts.append(f"a better placement{single} could save {gap:.0%} at most")
    return "; ".join(part for part in parts if part)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def _worth(setting: Setting, plan: Plan, rows: Sequence[Baseline]) -> str:
    best = min((row for row in rows if np.isfinite(row.step_s)), key=lambda row: row.step_s, default=None)
    if len(plan.stages) == 1 and plan.stages[0].split == "none":
        name = plan.stages[0].devices[0]
        if len(setting.cluster.devices) == 1:
            return f"{name} is the only device ({_step_s(plan):.4g} s per step)"
        return f"a pipeline is not worth it: {name} alone is fastest ({_step_s(plan):.4g} s per step)"
    if best is None:
        return "nothing but a pipeline fits"
    ratio = best.step_s / _step_s(plan)
    if ratio < 0.995:
        return f"{best.name} would be faster ({best.step_s:.4g} against {_step_s(plan):.4g} s per step)"
    return f"{ratio:.2f}x {best.name}"


def _bottleneck(setting: Setting, plan: Plan) -> str:
    cost = PlanCost(plan, setting.profile, optimizer_copies=setting.optimizer_copies)
    size = plan.micro_batch
    seconds = [sum(cost.stage_seconds(index, size)) for index in range(len(plan.stages))]
    stages = [sum(seconds[each] for each in plan.stages_of_rank[ranks[0]]) for ranks in plan.ranks_of_stage]
    slowest = int(np.argmax(stages))
    mine = plan.stages_of_rank[plan.ranks_of_stage[slowest][0]]
    held = f"stage {slowest}" if len(mine) == 1 else f"stages {', '.join(map(str, mine))}"
    text = f"{held} on {'+'.join(plan.stages[slowest].devices)} set{'s' if len(mine) == 1 else ''} the pace"
    hops = [max(hop) for hop in cost.hops(size)]
    if hops and max(hops) > max(stages):
        cut = int(np.argmax(hops))
        text = f"the link between stages {cut} and {cut + 1} sets the pace"
    idle = len(plan.cluster.devices) - len({name for stage in plan.stages for name in stage.devices})
    return f"{text} ({max([*stages, *hops]):.4g} s per micro-batch)" + (
        f", {idle} device{'s' if idle > 1 else ''} idle" if idle else ""
    )


def _rejected(plan: Plan, found: Sequence[Candidate]) -> str:
    others = [candidate for candidate in found if _shape(candidate.plan) != _shape(plan)]
    if not others:
        return ""
    other = min(others, key=lambda candidate: candidate.order)
    loss = other.step_s / _step_s(plan) - 1
    stages = " > ".join(f"{'+'.join(s.devices)}:{s.stop - s.start}" for s in other.plan.stages[:6])
    more = " ..." if len(other.plan.stages) > 6 else ""
    return (
        f"next best {stages}{more}, micro-batch {other.plan.micro_batch}, {other.plan.schedule}: {loss:+.1%}"
    )


def _shape(plan: Plan) -> tuple[object, ...]:
    return plan.stages, plan.micro_batch, plan.schedule


def _limit(plan: Plan) -> str:
    """The device whose memory is nearly full, if any."""
    assert plan.prediction is not None
    for device, used in zip(plan.cluster.devices, plan.prediction.memory_bytes):
        if device.memory_bytes is not None and used > 0.9 * device.memory_bytes:
            return (
                f"memory of {device.name} binds ({format_bytes(used)} of {format_bytes(device.memory_bytes)})"
            )
    return ""


def infeasible(
    setting: Setting,
    sizes: Sequence[int],
    *,
    stages: int | None,
    device_order: Sequence[str] | None,
) -> InfeasibleError:
    """The error that lists what could be changed, with today's values."""
    costs = setting.costs(min(sizes))
    n_layers = len(costs.graph)
    weights = float(costs.parameter_bytes[-1]) * (2 + setting.optimizer_copies)
    first = setting.cluster.devices[0].name
    layers = [costs.memory_bytes(first, i, i + 1, 1) for i in range(n_layers)]
    fullest = int(np.argmax(layers))
    limits = [device.memory_bytes for device in setting.cluster.devices]
    known = [limit for limit in limits if limit is not None]
    total = "unlimited" if len(known) < len(limits) else format_bytes(sum(known))
    remedies = [
        f"more memory: the devices have {total} together, {format_bytes(max(known, default=0))} at most; "
        f"weights, gradients and optimizer state take {format_bytes(weights)}, and the largest layer "
        f"({costs.graph.layers[fullest].name}) {format_bytes(layers[fullest])} at micro-batch {min(sizes)}",
        f"an optimizer with less state: {setting.optimizer_copies:g} values per parameter now "
        f"(0 would save {format_bytes(float(costs.parameter_bytes[-1]) * setting.optimizer_copies)})",
        f"a smaller batch: {setting.batch_size} samples now, whose inputs take "
        f"{format_bytes(batch_bytes(costs, setting.batch_size))} on the last stage's device",
    ]
    if min(sizes) > 1:
        remedies.append(f"a smaller micro-batch: {min(sizes)} samples now")
    if stages is not None:
        remedies.append(f"more stages: {stages} now, {len(limits)} devices at hand")
    if device_order is not None:
        remedies.append(f"another order or more devices: {', '.join(device_order)} now")
    if "1f1b" not in setting.schedules:
        remedies.append("schedule 1f1b, which holds fewer micro-batches than gpipe")
    listed = "\n".join(f"  {number}. {remedy}" for number, remedy in enumerate(remedies, start=1))
    return InfeasibleError(
        f"no plan for a batch of {setting.batch_size} fits cluster {setting.cluster.name!r}. Change one of:\n"
        f"{listed}"
    )
