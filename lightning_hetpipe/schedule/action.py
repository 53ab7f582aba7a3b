"""An action is a value that prints and parses; a schedule is a table of them.

The notation is that of ``torch.distributed.pipelining`` (``2F0``, ``1SEND_B3``), with two additions:
``r`` is the reader (rank 0's suspended user step), and a transfer that skips stages names its peer
after a colon (``0SEND_F3:2``).
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.graph import READER


class Kind(StrEnum):
    """What an action does."""

    F = "F"  # forward of one micro-batch
    B = "B"  # backward: input and weight gradients
    I = "I"  # backward, input gradients only  # noqa: E741
    W = "W"  # backward, weight gradients only
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"  # once per step: gradients that several ranks share

    # Enum's own hash is written in Python; schedules are long and looked up by kind.
    __hash__ = str.__hash__

    @property
    def is_compute(self) -> bool:
        return self in _COMPUTE

    @property
    def is_send(self) -> bool:
        return self in (Kind.SEND_F, Kind.SEND_B)

    @property
    def is_receive(self) -> bool:
        return self in (Kind.RECV_F, Kind.RECV_B)


_COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
# The neighbour a transfer means when it names no peer.
_NEIGHBOUR = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
_TEXT = re.compile(
    r"(?P<stage>\d+|r)(?P<kind>SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|F|B|I|W)"
    r"(?P<micro_batch>\d+)?(?::(?P<peer>\d+|r))?"
)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one stage does.

    Attributes:
        stage: The stage that acts, or `READER`.
        kind: What it does.
        micro_batch: Which slice of the batch; None for ``REDUCE_GRAD``.
        peer: The stage at the other end of a transfer; None for every other kind.
    """

    stage: int
    kind: Kind
    micro_batch: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{_stage_text(self.stage)}{self.kind}"
        if self.micro_batch is not None:
            text += str(self.micro_batch)
        if self.peer is not None and self.peer != self.stage + _NEIGHBOUR[self.kind]:
            text += f":{_stage_text(self.peer)}"
        return text

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Reads what `str` writes.

        >>> Action.parse("0SEND_F3:2")
        Action(stage=0, kind=<Kind.SEND_F: 'SEND_F'>, micro_batch=3, peer=2)

        Raises:
            ScheduleError: The text is not an action.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action such as 2F0, 1SEND_B3 or 0SEND_F3:2")
        stage, kind = _parse_stage(match["stage"]), Kind(match["kind"])
        micro_batch = None if match["micro_batch"] is None else int(match["micro_batch"])
        peer = None if match["peer"] is None else _parse_stage(match["peer"])
        if (micro_batch is None) != (kind is Kind.REDUCE_GRAD):
            raise ScheduleError(
                f"{text!r}: {kind} takes {'no' if micro_batch is not None else 'a'} micro-batch"
            )
        if kind in _NEIGHBOUR:
            peer = stage + _NEIGHBOUR[kind] if peer is None else peer
        elif peer is not None:
            raise ScheduleError(f"{text!r}: only a transfer has a peer")
        return cls(stage, kind, micro_batch, peer)

    @property
    def counterpart(self) -> "Action":
        """The transfer at the other end of this one."""
        assert self.peer is not None
        return Action(self.peer, _COUNTERPART[self.kind], self.micro_batch, self.stage)


_COUNTERPART = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}


@dataclass(frozen=True)
class Schedule:
    """Per rank, the ordered list of actions of one step.

    Attributes:
        name: ``gpipe``, ``1f1b``, ...
        actions: One list per rank; idle ranks have an empty one.
        ranks_of_stage: The ranks that hold each stage (one, unless a group shares it).
        n_micro_batches: Slices of the batch.
        training: False for a forward-only schedule.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    ranks_of_stage: tuple[tuple[int, ...], ...]
    n_micro_batches: int
    training: bool = True

    @property
    def n_stages(self) -> int:
        return len(self.ranks_of_stage)

    @property
    def n_ranks(self) -> int:
        return len(self.actions)

    def ranks(self, stage: int) -> tuple[int, ...]:
        """The ranks of a stage; the reader lives on rank 0."""
        return (0,) if stage == READER else self.ranks_of_stage[stage]

    def to_csv(self) -> str:
        """One row per rank, actions separated by commas."""
        return "\n".join(",".join(map(str, row)) for row in self.actions)


def _stage_text(stage: int) -> str:
    return "r" if stage == READER else str(stage)


def _parse_stage(text: str) -> int:
    return READER if text == "r" else int(text)
