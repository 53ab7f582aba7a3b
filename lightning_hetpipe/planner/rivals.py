"""Plans worth a trial beside a planned one: its stages under another order of work, or in other slices.

The prediction orders plans well, but near its optimum a step is flat, and a fixed cost per micro-batch that
is a little off moves the best size by one. Those few plans are told apart by running them.
"""

from collections.abc import Iterator
from dataclasses import replace

from lightning_hetpipe.planner.candidates import Setting, finish, fitting, schedules_of, with_schedule
from lightning_hetpipe.planner.cost import ADAM
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.profiles import Profile

_ROOM = 0.8  # of a device's memory that a rival may take; a trial must not end a run that the plan would not


def rivals(
    profile: Profile,
    plan: Plan,
    *,
    sizes: bool,
    schedule: str = "auto",
    optimizer_copies: float = ADAM,
) -> tuple[Plan, ...]:
    """Plans with the stages of ``plan`` that could be faster than predicted; at most five.

    The other schedules; 1F1B with one more micro-batch in flight; the next smaller and the next larger
    micro-batch on offer, each under its fastest schedule. Each fits where the plan fits: on every device it
    is predicted to hold no more than the plan, or than four fifths of the memory.

    Args:
        profile: The plan was made from it.
        plan: With its prediction.
        sizes: Whether the micro-batch size may change. A plan whose stages are shared keeps its size.
        schedule: As the planner was asked: ``auto``, or the only one.
        optimizer_copies: State values that the optimizer keeps per parameter.
    """
    setting = Setting(profile, plan.cluster, plan.batch_size, schedules_of(schedule), optimizer_copies)
    assert plan.prediction is not None
    bound = plan.prediction.images_per_s_bound
    known = {_order(plan)}
    found = []

    def admit(options: Iterator[Plan]) -> Iterator[Plan]:
        for option in options:
            finished = finish(setting, option, bound)
            if _order(option) not in known and _has_room(plan, finished):
                known.add(_order(option))
                yield finished

    if len(plan.stages) > 1 and len(plan.slices(plan.batch_size)) > 1:
        found += list(admit(_other_orders(setting, plan)))
    if sizes and all(stage.split == "none" for stage in plan.stages):
        for size in _beside(setting.sizes, plan.micro_batch):
            options = list(admit(_schedules(setting, replace(plan, micro_batch=size))))
            found += sorted(options, key=_step_s)[:1]
    return tuple(found)


def _other_orders(setting: Setting, plan: Plan) -> Iterator[Plan]:
    for option in _schedules(setting, plan):
        if option.schedule != plan.schedule:
            yield option
    if plan.schedule == "1f1b":
        m = len(plan.slices(plan.batch_size))
        wanted = [min(m, k + 1) for k in plan.in_flight]
        if fitting(setting, plan, wanted) == tuple(wanted):
            yield replace(plan, in_flight=tuple(wanted))


def _schedules(setting: Setting, plan: Plan) -> Iterator[Plan]:
    # Stages that share a device have no other schedule.
    for name in ("interleaved",) if plan.schedule == "interleaved" else setting.schedules:
        option = with_schedule(setting, plan, name)
        if option is not None:
            yield option


def _beside(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    smaller = [each for each in sizes if each < size]
    larger = [each for each in sizes if each > size]
    return (*smaller[-1:], *larger[:1])


def _has_room(plan: Plan, rival: Plan) -> bool:
    assert plan.prediction is not None
    assert rival.prediction is not None
    return all(
        device.memory_bytes is None or used <= max(planned, _ROOM * device.memory_bytes)
        for device, planned, used in zip(
            plan.cluster.devices, plan.prediction.memory_bytes, rival.prediction.memory_bytes
        )
    )


def _order(plan: Plan) -> tuple[object, ...]:
    return plan.micro_batch, plan.schedule, plan.in_flight


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s
