"""What happened when: one type for the simulated and for the measured step."""

import json
from collections.abc import Iterable
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

    def to_chrome_trace(self, path: str | Path) -> None:
        """Writes the spans for ``chrome://tracing`` or Perfetto."""
        Path(path).write_text(json.dumps(chrome_trace([self]), indent=1), encoding="utf-8")


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
