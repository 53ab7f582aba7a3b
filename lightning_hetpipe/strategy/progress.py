"""How far measuring is, in rank 0's terminal while the ranks are measured."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def has_bar(trainer: Any) -> bool:
    """Whether the Trainer shows progress now: in a fit, before its own bar is drawn."""
    bar = trainer.progress_bar_callback
    return trainer.state.fn == "fit" and bar is not None and getattr(bar, "is_enabled", True)


class MeasuringBar:
    """A bar that appears with the first layer that is measured, and is gone when measuring ends.

    No thread draws it: a thread would be measured too.

    Args:
        shown: False to draw nothing.
    """

    def __init__(self, *, shown: bool) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
            disable=not shown,
        )
        self._task = self._bar.add_task("")

    def __enter__(self) -> "MeasuringBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, text: str, done: int, total: int | None) -> None:
        """Shows what is measured now, and how many parts of it are done; None: of an unknown number."""
        self._bar.start()
        self._bar.update(self._task, description=text, completed=done, total=total)
        self._bar.refresh()
