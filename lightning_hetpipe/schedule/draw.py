"""A schedule as text: one row per rank, one column per unit of time."""

from collections.abc import Collection, Iterable

from lightning_hetpipe.graph import Route
from lightning_hetpipe.schedule.action import Action, Kind, Schedule
from lightning_hetpipe.schedule.lower import Wiring

_SHOWN = 14  # columns of an error's window


def grid(schedule: Schedule, routes: Iterable[Route] = (), *, width: int | None = None) -> str:
    """The computations of every rank, each as long as the others, transfers free.

        rank 0  rF0 rF1  .  2F0 2B0 2F1 2B1
        rank 1  0F0 0F1  .   .  ...

    Args:
        schedule: What to draw.
        routes: The plan's routes; without them each row is drawn without gaps.
        width: Columns to show; the rest is cut off with an ellipsis.
    """
    return _render(schedule, _slots(schedule, tuple(routes)), set(), 0, width)


def marked(schedule: Schedule, culprits: Collection[tuple[int, int]]) -> str:
    """Every action of every rank in order, culprits between ``>`` and ``<``, as errors show it.

    Args:
        schedule: What to draw.
        culprits: (rank, position in that rank's list).
    """
    marks = set(culprits)
    cells = {
        (rank, position): (position, action)
        for rank, row in enumerate(schedule.actions)
        for position, action in enumerate(row)
    }
    lines = []
    for rank in range(schedule.n_ranks):
        mine = [position for culprit_rank, position in culprits if culprit_rank == rank]
        first = max(0, min(mine, default=0) - _SHOWN // 2)
        lines.append(_render(schedule, cells, marks, first, _SHOWN, only=rank))
    return "\n".join(lines)


def _slots(schedule: Schedule, routes: tuple[Route, ...]) -> dict[tuple[int, int], tuple[int, Action]]:
    """The column of each computation: after its predecessor on the rank and what it consumes."""
    wiring = Wiring(routes, schedule.ranks_of_stage)
    ends: dict[Action, int] = {}
    slots: dict[tuple[int, int], tuple[int, Action]] = {}
    clocks, positions = [0] * schedule.n_ranks, [0] * schedule.n_ranks
    moved, wait = True, bool(routes)
    while moved or wait:
        wait = wait and moved  # what can never start is drawn without waiting
        moved = False
        for rank, row in enumerate(schedule.actions):
            while positions[rank] < len(row):
                action = row[positions[rank]]
                if action.kind.is_compute:
                    needed = [_producer(item) for item in wiring.inputs(action)] if wait else []
                    if any(item not in ends for item in needed):
                        break
                    slot = max([clocks[rank], *(ends[item] for item in needed)])
                    slots[rank, positions[rank]] = (slot, action)
                    ends[action] = clocks[rank] = slot + 1
                positions[rank] += 1
                moved = True
    return slots


def _producer(item: Action) -> Action:
    """The computation behind a receive (a local input is one itself)."""
    if not item.kind.is_receive:
        return item
    assert item.peer is not None
    return Action(item.peer, Kind.F if item.kind is Kind.RECV_F else Kind.B, item.micro_batch)


def _render(
    schedule: Schedule,
    cells: dict[tuple[int, int], tuple[int, Action]],
    marks: set[tuple[int, int]],
    first: int,
    width: int | None,
    only: int | None = None,
) -> str:
    texts = {
        (rank, column): f">{action}<" if (rank, position) in marks else str(action)
        for (rank, position), (column, action) in cells.items()
        if only is None or rank == only
    }
    last = max((column for _, column in texts), default=-1)
    stop = last + 1 if width is None else min(last + 1, first + width)
    cell = max((len(text) for (_, column), text in texts.items() if first <= column < stop), default=1)
    lines = []
    for rank in range(schedule.n_ranks) if only is None else (only,):
        columns = [texts.get((rank, column), ".").rjust(cell) for column in range(first, stop)]
        before, after = ("... " if first else ""), (" ..." if stop <= last else "")
        lines.append(f"rank {rank}  {before}{' '.join(columns)}{after}".rstrip())
    return "\n".join(lines)
