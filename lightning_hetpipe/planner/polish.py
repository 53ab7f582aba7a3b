"""Small moves on a finished plan, judged by the simulator rather than by the closed form.

The closed form does not see which of two neighbours comes first, nor that messages queue on a link.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from lightning_hetpipe.planner.candidates import Candidate, Setting, make_candidates, n_actions
from lightning_hetpipe.plans import Stage


def polish(setting: Setting, start: Candidate, *, fixed: int, actions: int) -> Candidate:
    """Climbs from a plan: moves a cut by one layer, or exchanges the devices of two neighbouring stages.

    Args:
        setting: What candidates share.
        start: Where to climb from; its schedule and micro-batch size stay.
        fixed: So many of the last stages keep their devices (all of them where the order is given).
        actions: Simulated actions after which no other move is tried.

    Returns:
        A candidate that is at least as good.
    """
    setting = replace(setting, schedules=(start.plan.schedule,))
    best, tried = start, {start.plan.stages}
    cost = n_actions(start.plan)
    improved = True
    while improved:
        improved = False
        for stages in _moves(best.plan.stages, fixed):
            if stages in tried:
                continue
            if actions < cost:
                return best
            tried.add(stages)
            actions -= cost
            found = next(make_candidates(setting, stages, start.plan.micro_batch), None)
            if found is not None and found.order < best.order:
                best, improved = found, True
                break
    return best


def _moves(stages: tuple[Stage, ...], fixed: int) -> Iterator[tuple[Stage, ...]]:
    for index, (left, right) in enumerate(pairwise(stages)):
        before, after = stages[:index], stages[index + 2 :]
        for cut in (left.stop - 1, left.stop + 1):
            if left.start < cut < right.stop:
                yield (*before, replace(left, stop=cut), replace(right, start=cut), *after)
        if index + 1 < len(stages) - fixed:
            yield (*before, _held_as(left, right), _held_as(right, left), *after)


def _held_as(stage: Stage, other: Stage) -> Stage:
    """The same layers on the other stage's devices."""
    return replace(other, start=stage.start, stop=stage.stop)
