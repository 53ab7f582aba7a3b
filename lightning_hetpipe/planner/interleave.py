"""Cuts a plan's stages into rounds: its devices are visited again in the same order, a smaller run each time.

    1f1b           a: 0..11             b: 12..23                fill: one whole stage per device
    interleaved    a: 0..5   b: 6..11   a: 12..17  b: 18..23           half a stage per device

The pipeline fills in half the time, and about twice as much crosses the links. The last device ends each
round, so rank 0 still holds the last stage.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from lightning_hetpipe.planner.candidates import Candidate, Setting, make_candidates
from lightning_hetpipe.planner.chain import Array
from lightning_hetpipe.planner.polish import polish
from lightning_hetpipe.plans import Plan, Stage

WINS = 0.95  # of the step in one round: what a plan in rounds must stay below to be taken
_ROUNDS = (2, 3)


def interleave(setting: Setting, start: Candidate, *, actions: int) -> Candidate | None:
    """The best plan in rounds that a plan can be cut into and that fits, or None.

    Args:
        setting: What candidates share.
        start: With one device per stage; its devices, their order and the micro-batch size stay.
        actions: Simulated actions after which the cuts are moved no more.
    """
    setting = replace(setting, schedules=("interleaved",))
    found = [
        candidate
        for stages in _in_rounds(setting, start.plan)
        for candidate in make_candidates(setting, stages, start.plan.micro_batch)
    ]
    if not found:
        return None
    best = min(found, key=lambda candidate: candidate.order)
    return polish(setting, best, fixed=len(best.plan.stages), actions=actions)


def _in_rounds(setting: Setting, plan: Plan) -> Iterator[tuple[Stage, ...]]:
    """Every round gives each device the same part of its work."""
    if len(plan.stages) < 2 or any(stage.split != "none" for stage in plan.stages):
        return
    costs = setting.costs(plan.micro_batch)
    tables = [np.add(*costs.seconds(stage.devices[0])) for stage in plan.stages]
    done = np.mean([table / table[-1] for table in tables], axis=0)  # [layers + 1], from 0 to 1
    work = [float(done[stage.stop] - done[stage.start]) for stage in plan.stages]
    for rounds in _ROUNDS:
        marks = np.cumsum(np.tile(work, rounds) / rounds)[:-1]
        cuts = _nearest(done, marks)
        edges = [0, *cuts, len(costs.graph)]
        if all(a < b for a, b in pairwise(edges)):
            devices = [stage.devices for stage in plan.stages] * rounds
            yield tuple(Stage(a, b, names) for (a, b), names in zip(pairwise(edges), devices))


def _nearest(done: Array, marks: Array) -> list[int]:
    right = np.searchsorted(done, marks).clip(1, len(done) - 1)
    left = done[right] - marks > marks - done[right - 1]
    return [int(cut) for cut in np.where(left, right - 1, right)]
