"""Moves on a finished plan, judged by the simulator rather than by the closed form.

The closed form does not see which of two neighbours comes first, nor that messages queue on a link. Where
some layers together are a bad place to cut, as within a residual block, a cut has to jump over them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from lightning_hetpipe.planner.candidates import Candidate, Setting, make_candidates, n_actions
from lightning_hetpipe.plans import Stage


def polish(setting: Setting, start: Candidate, *, fixed: int, actions: int) -> Candidate:
    """Climbs from a plan: moves a cut, or exchanges the devices of two neighbouring stages.

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
    """Exchanges, then cuts that move by one layer, by two, and so on."""
    for index, (left, right) in enumerate(pairwise(stages[: len(stages) - fixed])):
        yield (*stages[:index], _held_as(left, right), _held_as(right, left), *stages[index + 2 :])
    for distance in range(1, max((right.stop - left.start for left, right in pairwise(stages)), default=0)):
        for index, (left, right) in enumerate(pairwise(stages)):
            for cut in (left.stop - distance, left.stop + distance):
                if left.start < cut < right.stop:
                    moved = replace(left, stop=cut), replace(right, start=cut)
                    yield (*stages[:index], *moved, *stages[index + 2 :])


def _held_as(stage: Stage, other: Stage) -> Stage:
    """The same layers on the other stage's devices."""
    return replace(other, start=stage.start, stop=stage.stop)
