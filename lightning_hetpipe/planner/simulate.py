"""Runs an action list on paper: the same lists, and the same arithmetic, as the runtime.

Each rank does one action at a time. A send occupies the rank while the message is packed and handed over;
each directed link carries one message at a time, in the order of sending, and adds its latency:

    starts = max(sent, link free)    link free = starts + bytes / bandwidth    usable = link free + latency
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from lightning_hetpipe.checks import require
from lightning_hetpipe.errors import PlanError, ProfileError, ScheduleError
from lightning_hetpipe.graph import READER
from lightning_hetpipe.planner.cost import ADAM
from lightning_hetpipe.planner.plan_cost import PlanCost, schedule_of
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.profiles import Profile
from lightning_hetpipe.schedule import Action, Kind, Schedule
from lightning_hetpipe.timeline import Span, Timeline

# (action, sending rank, receiving rank) -> seconds that the sender, then the link is occupied, and of latency
Transfer = Callable[[Action, int, int], tuple[float, float, float]]
# (receiving rank, sending stage, receiving stage, forward, micro-batch)
Message = tuple[int, int, int, bool, int | None]
_COMPUTES = (Kind.F, Kind.B)


def simulate_schedule(schedule: Schedule, seconds: Callable[[Action], float], transfer: Transfer) -> Timeline:
    """When every action of a step starts and ends.

    Members of a group compute an action together: it starts when the last of them is ready. Receives and
    reductions are spans of waiting.

    Args:
        schedule: A valid schedule.
        seconds: Duration of a computation or reduction.
        transfer: Sender's time, link time and latency of a send between two ranks; not asked within one rank.

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
    require(isinstance(plan, Plan), PlanError, "plan", plan, "a Plan")
    require(isinstance(profile, Profile), ProfileError, "profile", profile, "a Profile")
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
    ranks_of = {stage: schedule.ranks(stage) for stage in range(READER, schedule.n_stages)}
    clocks = [0.0] * schedule.n_ranks
    positions = [0] * schedule.n_ranks
    free: dict[tuple[int, int], float] = {}  # when each link is next idle
    usable: dict[Message, float] = {}  # when a message is complete
    missing: dict[Message, int] = {}  # senders of a group that have not sent yet
    asleep: dict[Message, int] = {}  # which rank waits for a message
    ready: dict[Action, list[int]] = {}  # members that reached a shared action
    awake = deque(range(schedule.n_ranks))

    while awake:
        rank = awake.popleft()
        row, clock, position = schedule.actions[rank], clocks[rank], positions[rank]
        while position < len(row):
            action = row[position]
            stage, kind, m, other = action.stage, action.kind, action.micro_batch, action.peer
            start = clock
            if kind in _COMPUTES and len(ranks_of[stage]) == 1:
                clock += seconds(action)
            elif kind is Kind.SEND_F or kind is Kind.SEND_B:
                assert other is not None
                for peer in ranks_of[other]:
                    message = (peer, stage, other, kind is Kind.SEND_F, m)
                    done = clock
                    if peer != rank:
                        sent, occupied, latency = transfer(action, rank, peer)
                        clock += sent
                        free[rank, peer] = done = max(clock, free.get((rank, peer), 0.0)) + occupied
                        done += latency
                    usable[message] = max(usable.get(message, 0.0), done)
                    missing[message] = missing.get(message, len(ranks_of[stage])) - 1
                    if not missing[message] and message in asleep:
                        awake.append(asleep.pop(message))
                position += 1
                continue
            elif kind is Kind.RECV_F or kind is Kind.RECV_B:
                assert other is not None
                message = (rank, other, stage, kind is Kind.RECV_F, m)
                if missing.get(message, 1):
                    asleep[message] = rank
                    break
                clock = max(clock, usable[message])
            else:
                members, clocks[rank] = ranks_of[stage], clock
                here = ready.setdefault(action, [])
                here.append(rank)
                if len(here) < len(members):
                    break
                start = max(clocks[member] for member in members)
                clock = start + seconds(action)
                for member in members:
                    if member != rank:
                        clocks[member] = clock
                        positions[member] += 1
                        awake.append(member)
                        if spans is not None:
                            spans.append(Span(member, str(action), start, clock, kind.is_compute))
            if spans is not None:
                spans.append(Span(rank, str(action), start, clock, kind.is_compute))
            position += 1
        clocks[rank], positions[rank] = clock, position

    stuck = [row[position] for row, position in zip(schedule.actions, positions) if position < len(row)]
    if stuck:
        raise ScheduleError(f"schedule {schedule.name!r} deadlocks at {', '.join(map(str, stuck))}")
    return max(clocks)
