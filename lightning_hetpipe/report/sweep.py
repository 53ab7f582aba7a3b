"""The end of a Hydra multirun: one table of what was varied and what came out, and one picture of it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_hetpipe.report.table import show

log = logging.getLogger(__name__)

Job = tuple[Sequence[str], Mapping[str, float]]
SIZE, CHOICE = "micro_batch", "micro_batch_auto"  # figures: of the job, and what auto would have taken there
_MEASURED, _PREDICTED = "images_per_s", "images_per_s_predicted"


def varied(jobs: Sequence[Job]) -> list[dict[str, str]]:
    """By job, the overrides that not all jobs share."""
    shared = set.intersection(*(set(overrides) for overrides, _ in jobs)) if jobs else set()
    return [
        dict(override.partition("=")[::2] for override in overrides if override not in shared)
        for overrides, _ in jobs
    ]


def sweep_table(jobs: Sequence[Job]) -> Table:
    """One row per job: the overrides that others do not share, and every number that any job returned.

    Where jobs tell their micro-batch size and what ``auto`` takes, those that have that size are marked.
    """
    every = list(dict.fromkeys(name for _, figures in jobs for name in figures))
    names, marked = [name for name in every if name != CHOICE], CHOICE in every
    table = Table(title="Sweep", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("overrides", no_wrap=True)
    for name in (*(("auto takes",) if marked else ()), *names):
        table.add_column(name)
    for overrides, (_, figures) in zip(varied(jobs), jobs):
        text = " ".join(f"{key}={value}" for key, value in overrides.items())
        mark = ("<--" if is_choice(figures) else "",) if marked else ()
        table.add_row(text, *mark, *(f"{figures[name]:.4g}" if name in figures else "-" for name in names))
    return table


def is_choice(figures: Mapping[str, float]) -> bool:
    """Whether a job ran with the micro-batch size that ``auto`` takes."""
    return CHOICE in figures and figures.get(SIZE) == figures[CHOICE]


def curves(jobs: Sequence[Job]) -> tuple[str, dict[str, list[tuple[float, Mapping[str, float]]]]]:
    """What a sweep can be drawn over: the override with the most numbers, and the jobs along it.

    Returns:
        The override's name, "" if none was varied over numbers; by the other overrides, the value and the
        figures of each job, ascending.
    """
    overrides = varied(jobs)
    counts: dict[str, set[float]] = {}
    for each in overrides:
        for key, value in each.items():
            if (number := _number(value)) is not None:
                counts.setdefault(key, set()).add(number)
    axis = max(counts, key=lambda key: len(counts[key]), default="")
    found: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
    for each, (_, figures) in zip(overrides, jobs):
        number = _number(each.get(axis, ""))
        if number is not None and _MEASURED in figures:
            name = " ".join(f"{key}={value}" for key, value in each.items() if key != axis)
            found.setdefault(name, []).append((number, figures))
    return (axis, {name: sorted(points, key=lambda point: point[0]) for name, points in found.items()})


def save_sweep(jobs: Sequence[Job], path: str | Path) -> bool:
    """Draws images per second over what was varied: measured, predicted (dashed), auto's choice (ringed).

    Args:
        path: Where to write; the suffix chooses the format.

    Returns:
        Whether there was anything to draw: an override with two numbers, and jobs with ``images_per_s``.

    Raises:
        ImportError: matplotlib is not installed (``pip install lightning-hetpipe[recipes]``).
    """
    axis, lines = curves(jobs)
    if not any(len(points) > 1 for points in lines.values()):
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (name, points) in enumerate(lines.items()):
        colour = f"C{index}"
        axes.plot([x for x, _ in points], [f[_MEASURED] for _, f in points], "o-", color=colour, label=name)
        guessed = [(x, figures[_PREDICTED]) for x, figures in points if _PREDICTED in figures]
        axes.plot([x for x, _ in guessed], [y for _, y in guessed], "--", color=colour, alpha=0.6)
        chosen = [(x, figures[_MEASURED]) for x, figures in points if is_choice(figures)]
        axes.plot([x for x, _ in chosen], [y for _, y in chosen], "o", ms=14, mfc="none", color=colour)
    if all(x > 0 for points in lines.values() for x, _ in points):
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xlabel(axis)
    axes.set_ylabel("images/s (dashed: predicted; ring: what auto takes)")
    axes.set_ylim(bottom=0)
    if any(lines):
        axes.legend()
    figure.savefig(path, dpi=120)
    return True


class SweepTable(Callback):
    """Collects the mappings that the jobs return; after the last one prints a table and draws a picture.

    Args:
        objective: The figure that a sweeper which searches, such as Optuna's, takes as the job's result;
            None leaves it the mapping.
    """

    def __init__(self, objective: str | None = None) -> None:
        self.jobs: list[Job] = []
        self._objective = objective

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Keeps the numbers of one job; a job that failed has none.

        Raises:
            ValueError: The objective is none of them.
        """
        value = job_return._return_value
        figures = value if isinstance(value, Mapping) else {}
        self.jobs.append((list(config.hydra.overrides.task), figures))
        if self._objective is None or not isinstance(value, Mapping):
            return
        if self._objective not in figures:
            raise ValueError(
                f"objective={self._objective} is no figure of a job; it has {', '.join(figures)}"
            )
        job_return.return_value = figures[self._objective]

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Prints the table; leaves ``sweep.png`` in the sweep's directory."""
        show(sweep_table(self.jobs))
        path = Path(config.hydra.sweep.dir) / "sweep.png"
        try:
            if save_sweep(self.jobs, path):
                show(f"the picture is {path}")
        except ImportError as error:
            log.warning("the sweep was not drawn: %s", error)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
