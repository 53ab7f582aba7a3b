"""Runs an action list on paper: the same lists, and the same arithmetic, as the runtime.

Each rank computes one action at a time. Sends cost the rank nothing; each directed link carries one
message at a time, in the order of sending, and adds its latency:

    starts = max(sent, link free)    link free = starts + bytes / bandwidth    usable = link free + latency
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.planner.cost import ADAM
from lightning_hetpipe.planner.plan_cost import PlanCost, schedule_of
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.profiles import Profile
from lightning_hetpipe.schedule import Action, Schedule
from lightning_hetpipe.timeline import Span, Timeline

# (action, sending rank, receiving rank) -> seconds that the link is occupied, seconds of latency
Transfer = Callable[[Action, int, int], tuple[float, float]]


def simulate_schedule(schedule: Schedule, seconds: Callable[[Action], float], transfer: Transfer) -> Timeline:
    """When every action of a step starts and ends.

    Members of a group compute an action together: it starts when the last of them is ready. Receives and
    reductions are spans of waiting.

    Args:
        schedule: A valid schedule.
        seconds: Duration of a computation or reduction.
        transfer: Link time and latency of a send between two ranks; not asked within one rank.

    Raises:
        ScheduleError: The schedule deadlocks.
    """
    spans: list[Span] = []
    _run(schedule, seconds, transfer, spans)
    spans.sort(key=lambda span: (span.rank, span.start_s, span.end_s))
    return Timeline(tuple(spans), schedule.n_ranks, "simulated")


def simulate(plan: Plan, profile: Profile, *, optimizer_copies: float = ADAM) -> Timeline:
    """The step that a plan predicts, without the optimizer's own seconds.

    Args:
        plan: Any plan, hand-written ones included.
        profile: Of the same model; it must have the plan's devices.
        optimizer_copies: State values that the optimizer keeps per parameter (Adam 2, SGD 0).

    Raises:
        PlanError: The plan was made for another model.
        ProfileError: A device was not profiled.
        ScheduleError: The plan's in-flight counts cannot work.
    """
    plan.check_graph(profile.graph)
    cost = PlanCost(plan, profile, optimizer_copies=optimizer_copies)
    timeline = simulate_schedule(schedule_of(plan, profile.graph), cost.seconds, cost.transfer)
    return replace(timeline, peak_memory_bytes=cost.memory_bytes())


def step_seconds(schedule: Schedule, seconds: Callable[[Action], float], transfer: Transfer) -> float:
    """`simulate_schedule(...).step_s`, without the spans."""
    return _run(schedule, seconds, transfer, None)


def _run(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    transfer: Transfer,
    spans: list[Span] | None,
) -> float:
    clocks = [0.0] * schedule.n_ranks
    positions = [0] * schedule.n_ranks
    free: dict[tuple[int, int], float] = defaultdict(float)  # when each link is next idle
    usable: dict[tuple[int, Action], float] = {}  # (rank, receive) -> when its message is complete
    arrived: dict[tuple[int, Action], int] = defaultdict(int)
    asleep: dict[tuple[int, Action], int] = {}  # what each waiting rank waits for
    ready: dict[Action, list[int]] = defaultdict(list)  # members that reached a shared action
    awake = deque(range(schedule.n_ranks))
    shared = {stage for stage, ranks in enumerate(schedule.ranks_of_stage) if len(ranks) > 1}

    while awake:
        rank = awake.popleft()
        row, clock = schedule.actions[rank], clocks[rank]
        position = positions[rank]
        while position < len(row):
            action = row[position]
            kind = action.kind
            if kind.is_send:
                receive = action.counterpart
                n_senders = len(schedule.ranks(action.stage))
                for peer in schedule.ranks(receive.stage):
                    done = clock
                    if peer != rank:
                        occupied, latency = transfer(action, rank, peer)
                        free[rank, peer] = max(clock, free[rank, peer]) + occupied
                        done = free[rank, peer] + latency
                    key = (peer, receive)
                    usable[key] = max(usable.get(key, 0.0), done)
                    arrived[key] += 1
                    if arrived[key] == n_senders and key in asleep:
                        awake.append(asleep.pop(key))
            elif kind.is_receive:
                key = (rank, action)
                if arrived[key] < len(schedule.ranks(action.counterpart.stage)):
                    asleep[key] = rank
                    break
                start, clock = clock, max(clock, usable[key])
                if spans is not None:
                    spans.append(Span(rank, str(action), start, clock, compute=False))
            elif action.stage in shared:
                ready[action].append(rank)
                clocks[rank] = clock
                members = schedule.ranks(action.stage)
                if len(ready[action]) < len(members):
                    break
                start = max(clocks[member] for member in members)
                clock = start + seconds(action)
                for member in members:
                    clocks[member] = clock
                    if spans is not None:
                        spans.append(Span(member, str(action), start, clock, kind.is_compute))
                    if member != rank:
                        positions[member] += 1
                        awake.append(member)
            else:
                start, clock = clock, clock + seconds(action)
                if spans is not None:
                    spans.append(Span(rank, str(action), start, clock, kind.is_compute))
            position += 1
        clocks[rank], positions[rank] = clock, position

    stuck = [row[position] for row, position in zip(schedule.actions, positions) if position < len(row)]
    if stuck:
        raise ScheduleError(f"schedule {schedule.name!r} deadlocks at {', '.join(map(str, stuck))}")
    return max(clocks)
