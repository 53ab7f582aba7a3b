"""The planned and the measured step in one picture, under the same action names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_hetpipe.timeline import Span, Timeline

_FORWARD, _BACKWARD, _TRANSFER = "#4c8bf5", "#e8923a", "#c9ced6"
_NAMED = 0.012  # a span gets its name from this fraction of the step on; narrower ones cannot hold it


def save_gantt(timelines: Sequence[Timeline], path: str | Path, names: Sequence[str] = ()) -> None:
    """Writes `draw_gantt` to a file.

    Args:
        timelines, names: As there.
        path: Where to write; the suffix chooses the format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        ImportError: matplotlib is not installed (``pip install lightning-hetpipe[recipes]``).
    """
    draw_gantt(timelines, names).savefig(path, dpi=120)


def draw_gantt(timelines: Sequence[Timeline], names: Sequence[str] = ()) -> Any:
    """Draws the timelines below each other on one time axis.

    Args:
        timelines: Usually the simulated and the measured step.
        names: What to call each rank; ``rank 0``, ... by default.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed (``pip install lightning-hetpipe[recipes]``).
    """
    # Figure instead of pyplot: no global state, and no window system is looked for.
    from matplotlib.figure import Figure

    longest_s = max(timeline.step_s for timeline in timelines)
    heights = [timeline.n_ranks for timeline in timelines]
    figure = Figure(figsize=(12, 1.2 + 0.45 * sum(heights)), layout="constrained")
    panels = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, timeline in zip(panels[:, 0], timelines):
        begin_s = min((span.start_s for span in timeline.spans), default=0.0)
        for span in timeline.spans:
            _draw(axes, span, begin_s, named=span.duration_s > _NAMED * longest_s)
        axes.set_yticks(range(timeline.n_ranks))
        axes.set_yticklabels(names or [f"rank {rank}" for rank in range(timeline.n_ranks)])
        axes.set_ylim(timeline.n_ranks - 0.5, -0.5)
        axes.set_title(f"{timeline.source}: {timeline.step_s:.4g} s per step", loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("seconds since the start of the step")
    return figure


def _draw(axes: Any, span: Span, begin_s: float, *, named: bool) -> None:
    colour = (_FORWARD if "F" in span.action else _BACKWARD) if span.compute else _TRANSFER
    start_s, height = span.start_s - begin_s, 0.8 if span.compute else 0.2
    axes.barh(span.rank, span.duration_s, height, start_s, color=colour, edgecolor="white", lw=0.4)
    if named and span.compute:
        middle_s = start_s + span.duration_s / 2
        axes.text(middle_s, span.rank, span.action, ha="center", va="center", fontsize=5, clip_on=True)
