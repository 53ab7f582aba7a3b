"""Cuts a plan's stages into rounds: devices are visited again in the same order, a smaller run each time.

    1f1b           a: 0..11             b: 12..23            fill: one whole stage per device
    interleaved    a: 0..5   b: 6..11   a: 12..17  b: 18..23       half a stage per device

The pipeline fills in half the time and every boundary is crossed about twice as often, with more micro-batches
held. The last device ends each round, so rank 0 still holds the last stage.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from lightning_hetpipe.planner.candidates import Candidate, Setting, draft, in_rounds
from lightning_hetpipe.planner.plan_cost import PlanCost, schedule_of
from lightning_hetpipe.planner.simulate import step_seconds
from lightning_hetpipe.plans import Plan, Stage

WINS = 0.99  # of the step before: rounds cost messages that the simulator knows and people do not
_ROUNDS = (2, 3)


def interleave(setting: Setting, start: Candidate, *, actions: int) -> Candidate | None:
    """The best plan in rounds that a plan can be cut into and that fits, or None.

    Args:
        setting: What candidates share.
        start: With one device per stage; its devices, their order and the micro-batch size stay.
        actions: Simulated actions after which no other cut is tried.
    """
    best: Candidate | None = None
    for rounds in _ROUNDS:
        for stages in _cut(setting, start.plan, rounds):
            plan = _with_counts(setting, draft(setting, stages, start.plan.micro_batch))
            actions -= 6 * len(stages) * len(plan.slices(plan.batch_size)) if plan else 0
            if plan is None or actions < 0:
                continue
            cost = PlanCost(plan, setting.profile, optimizer_copies=setting.optimizer_copies)
            lists = schedule_of(plan, setting.profile.graph, check=False)
            found = Candidate(plan, step_seconds(lists, cost.seconds, cost.transfer) + cost.optimizer_s())
            best = found if best is None or found.order < best.order else best
    return best
