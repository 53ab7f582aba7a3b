"""What happened when: one type for the simulated and for the measured step."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Source = Literal["simulated", "measured"]


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank.

    Attributes:
        rank: The rank that ran it.
        action: The action's text, such as ``2F0``.
        start_s: Seconds since the start of the step.
        end_s: Seconds since the start of the step.
        compute: True for work of the device, False for waiting on a transfer.
    """

    rank: int
    action: str
    start_s: float
    end_s: float
    compute: bool = True

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """The spans of one step over all ranks, ordered by rank and start."""

    spans: tuple[Span, ...]
    n_ranks: int
    source: Source
    peak_memory_bytes: tuple[int, ...] = field(default=())

    @property
    def step_s(self) -> float:
        """Seconds from the first start to the last end; 0 for an empty timeline."""
        if not self.spans:
            return 0.0
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """Fraction of the step each rank spends computing."""
        step_s = self.step_s
        if step_s == 0.0:
            return (0.0,) * self.n_ranks
        busy_s = [0.0] * self.n_ranks
        for span in self.spans:
            if span.compute:
                busy_s[span.rank] += span.duration_s
        return tuple(seconds / step_s for seconds in busy_s)

    def gantt(self, width: int = 100, axis_s: float | None = None) -> str:
        """A picture of the step in characters.

        Forward is drawn with ``─``, backward with ``═``, both under the action's name where it fits;
        transfers are ``·``, waiting is blank.

        Args:
            width: Columns for the time axis.
            axis_s: Seconds that it is long; the step's own by default. See `gantts`.

        >>> spans = (Span(0, "0F0", 0.0, 0.5), Span(0, "0B0", 0.5, 1.5))
        >>> print(Timeline(spans, 1, "simulated").gantt(width=12))
        simulated: 1.5 s per step
        rank 0 |0F0─0B0═════| 100 %
        """
        begin_s = min((span.start_s for span in self.spans), default=0.0)
        axis_s = self.step_s if axis_s is None else max(axis_s, self.step_s)
        columns_per_s = width / axis_s if axis_s else 0.0
        rows = [[" "] * width for _ in range(self.n_ranks)]
        # Transfers first: what the device computes meanwhile hides them.
        drawn = (span for span in self.spans if span.duration_s > 0)
        for span in sorted(drawn, key=lambda span: span.compute):
            first = min(round((span.start_s - begin_s) * columns_per_s), width - 1)
            last = min(max(round((span.end_s - begin_s) * columns_per_s), first + 1), width)
            rows[span.rank][first:last] = _bar(span, last - first)
        digits = len(str(self.n_ranks - 1))
        lines = [
            f"rank {rank:{digits}d} |{''.join(row)}| {busy * 100:3.0f} %"
            for rank, (row, busy) in enumerate(zip(rows, self.busy))
        ]
        return "\n".join([f"{self.source}: {self.step_s:.4g} s per step", *lines])

    def to_chrome_trace(self, path: str | Path) -> None:
        """Writes the spans for ``chrome://tracing`` or Perfetto."""
        Path(path).write_text(json.dumps(chrome_trace([self]), indent=1), encoding="utf-8")


def gantts(timelines: Sequence[Timeline], width: int = 100) -> str:
    """Pictures of several steps below each other, on one time axis.

    >>> one, two = (Timeline((Span(0, "0F0", 0.0, end_s),), 1, "measured") for end_s in (1.0, 2.0))
    >>> print(gantts([one, two], width=8))
    measured: 1 s per step
    rank 0 |0F0─    | 100 %
    measured: 2 s per step
    rank 0 |0F0─────| 100 %
    """
    longest_s = max((timeline.step_s for timeline in timelines), default=0.0)
    return "\n".join(timeline.gantt(width, longest_s) for timeline in timelines)


def _bar(span: Span, columns: int) -> str:
    """The span's characters: its name, as far as it fits, then the sign of its kind."""
    if not span.compute:
        return "·" * columns
    sign = "─" if "F" in span.action else "═"
    name = span.action if len(span.action) <= columns else ""
    return name.ljust(columns, sign)


def chrome_trace(timelines: Iterable[Timeline]) -> dict[str, object]:
    """Puts several timelines side by side, one trace process each.

    Returns:
        A mapping in the Trace Event Format: complete events (``ph: X``), times in microseconds.
    """
    events: list[dict[str, object]] = []
    for process, timeline in enumerate(timelines):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.source}})
        for rank in range(timeline.n_ranks):
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": process,
                    "tid": rank,
                    "args": {"name": f"rank {rank}"},
                }
            )
        for span in timeline.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.action,
                    "cat": "compute" if span.compute else "transfer",
                    "pid": process,
                    "tid": span.rank,
                    "ts": span.start_s * 1e6,
                    "dur": span.duration_s * 1e6,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
