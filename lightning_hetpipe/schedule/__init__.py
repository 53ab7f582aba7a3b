"""Action lists: generated, validated, simulated, drawn and executed."""

from collections.abc import Iterable, Sequence

from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.graph import Route
from lightning_hetpipe.schedule.action import Action, Kind, Schedule
from lightning_hetpipe.schedule.draw import grid
from lightning_hetpipe.schedule.generate import forward_only, gpipe, interleaved, one_f_one_b
from lightning_hetpipe.schedule.lower import RanksOfStage, in_step, lower, stages_of_rank
from lightning_hetpipe.schedule.validate import validate

__all__ = ["SCHEDULES", "Action", "Kind", "Schedule", "grid", "make_schedule", "stages_of_rank", "validate"]

SCHEDULES = ("gpipe", "1f1b", "interleaved")


def make_schedule(
    name: str,
    *,
    ranks_of_stage: RanksOfStage,
    n_ranks: int,
    n_micro_batches: int,
    in_flight: Sequence[int],
    routes: Iterable[Route],
    reduce: Iterable[int] = (),
    training: bool = True,
    check: bool = True,
) -> Schedule:
    """What every rank does in one step, proven to be complete and to run to its end.

    Args:
        name: ``gpipe``, ``1f1b``, or ``interleaved`` where a rank holds several stages.
        ranks_of_stage: The ranks that hold each stage; rank 0 holds the last one.
        n_ranks: Ranks without a stage have an empty list.
        n_micro_batches: At least 1; may be fewer than there are stages.
        in_flight: Micro-batches each stage holds at most; `gpipe` takes all of them.
        routes: The messages between the stages (`Plan.routes`).
        reduce: Stages whose ranks share gradients with others, and reduce them at the end.
        training: False for a forward-only schedule, whatever the name.
        check: False leaves the proof out, for lists that are simulated and thrown away.

    Raises:
        ScheduleError: The arguments contradict each other.
    """
    n_stages, routes = len(ranks_of_stage), tuple(routes)
    if n_micro_batches < 1:
        raise ScheduleError(f"a schedule of {n_micro_batches} micro-batches was asked for: give at least 1")
    if n_stages == 0 or 0 not in ranks_of_stage[-1]:
        raise ScheduleError(f"the last stage must be on rank 0; stages are on {tuple(ranks_of_stage)}")
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is unknown; known are {', '.join(SCHEDULES)}")
    ahead = n_micro_batches
    held = stages_of_rank(ranks_of_stage, n_ranks)
    if name != "interleaved" and any(
        len(stages) > 1 and stages != [n_stages - 2, n_stages - 1] for stages in held
    ):
        raise ScheduleError(
            f"stages are on ranks {tuple(map(tuple, ranks_of_stage))}: where a rank holds several stages, "
            "the schedule must be interleaved"
        )
    if not training:
        ahead = min(2 * n_stages, n_micro_batches)  # outputs on their way stay bounded
    elif name != "gpipe":
        ahead = min(in_flight[0], n_micro_batches)
    if name == "interleaved":
        limits = in_flight if training else (ahead,) * n_stages
        orders = interleaved(ranks_of_stage, n_ranks, n_micro_batches, limits, training=training)
    elif not training:
        orders = in_step(forward_only(n_stages, n_micro_batches), ranks_of_stage, n_ranks)
    elif name == "gpipe":
        orders = in_step(gpipe(n_stages, n_micro_batches), ranks_of_stage, n_ranks)
    else:
        orders = in_step(one_f_one_b(n_stages, n_micro_batches, in_flight), ranks_of_stage, n_ranks)
    schedule = lower(
        name,
        orders,
        ranks_of_stage=ranks_of_stage,
        n_ranks=n_ranks,
        n_micro_batches=n_micro_batches,
        ahead=ahead,
        routes=routes,
        reduce=reduce,
        training=training,
    )
    if check:
        validate(schedule, routes, in_flight=in_flight if name != "gpipe" and training else None)
    return schedule
