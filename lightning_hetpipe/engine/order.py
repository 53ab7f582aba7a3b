"""What one rank can conclude from a schedule about the progress of the others.

Gloo does not tell whether a send was taken without blocking on it. The schedule does: once this rank
has received ``2F``'s result for micro-batch 3, every message that was received before that on the way
must have been taken, and its buffer can go.
"""

from collections.abc import Callable

from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.schedule.action import Action, Schedule

Clock = list[int]  # per rank, how many of its actions are certainly over
Carries = Callable[[Action, int, int], bool]  # whether a send brings anything from one rank to another


def taken_sends(
    schedule: Schedule, rank: int, carries: Carries = lambda send, sender, receiver: True
) -> list[tuple[Action, ...]]:
    """Per action of a rank, its earlier sends that are certainly taken once the action is over.

    Each send is listed once, at the first action that proves it; those that nothing proves are absent.

    Args:
        schedule: Of all ranks.
        rank: Whose sends.
        carries: A message without content is not sent, so that it proves nothing.

    Raises:
        ScheduleError: The actions wait for each other in a circle.
    """
    position = {
        (holder, action): index
        for holder, row in enumerate(schedule.actions)
        for index, action in enumerate(row)
    }
    clocks = _clocks(schedule, carries)
    open_sends: list[tuple[Action, list[tuple[int, int]]]] = []
    proved = []
    for action, clock in zip(schedule.actions[rank], clocks[rank], strict=True):
        taken = [
            send for send, receives in open_sends if all(clock[peer] > index for peer, index in receives)
        ]
        open_sends = [entry for entry in open_sends if entry[0] not in taken]
        proved.append(tuple(taken))
        if action.kind.is_send:
            assert action.peer is not None
            receive = action.counterpart
            peers = [peer for peer in schedule.ranks(action.peer) if carries(action, rank, peer)]
            open_sends.append((action, [(peer, position[peer, receive]) for peer in peers]))
    return proved


def _clocks(schedule: Schedule, carries: Carries) -> list[list[Clock]]:
    """Per rank and action, the clock after it: a topological walk over all action lists."""
    n_ranks = schedule.n_ranks
    clocks: list[list[Clock]] = [[] for _ in range(n_ranks)]
    sent: dict[tuple[int, Action], Clock] = {}
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while len(clocks[rank]) < len(row):
                action = row[len(clocks[rank])]
                clock = list(clocks[rank][-1]) if clocks[rank] else [0] * n_ranks
                if action.kind.is_receive:
                    assert action.peer is not None
                    send = action.counterpart
                    keys = [(peer, send) for peer in schedule.ranks(action.peer) if carries(send, peer, rank)]
                    if any(key not in sent for key in keys):
                        break
                    clock = [max(column) for column in zip(clock, *(sent[key] for key in keys), strict=True)]
                clock[rank] = len(clocks[rank]) + 1
                if action.kind.is_send:
                    sent[rank, action] = clock
                clocks[rank].append(clock)
                moved = True
    for rank, row in enumerate(schedule.actions):
        if len(clocks[rank]) < len(row):
            raise ScheduleError(f"rank {rank} would wait forever at {row[len(clocks[rank])]}")
    return clocks
