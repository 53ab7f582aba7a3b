"""One table at the end of a Hydra multirun: what was varied, and what came out."""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_hetpipe.report.table import show

Job = tuple[Sequence[str], Mapping[str, float]]


def sweep_table(jobs: Sequence[Job]) -> Table:
    """One row per job: the overrides that others do not share, and every number that any job returned."""
    names = list(dict.fromkeys(name for _, figures in jobs for name in figures))
    shared = (
        set[str]()
        .union(*(overrides for overrides, _ in jobs))
        .intersection(*(overrides for overrides, _ in jobs))
    )
    table = Table("overrides", *names, title="Sweep", title_justify="left", box=SIMPLE_HEAD)
    for overrides, figures in jobs:
        varied = " ".join(override for override in overrides if override not in shared)
        table.add_row(varied, *(f"{figures[name]:.4g}" if name in figures else "-" for name in names))
    return table


class SweepTable(Callback):
    """Collects the mappings that the jobs return and prints them when the last one ends."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Keeps the numbers of one job; a job that failed has none."""
        value = job_return._return_value
        figures = value if isinstance(value, Mapping) else {}
        self.jobs.append((list(config.hydra.overrides.task), figures))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Prints the table."""
        show(sweep_table(self.jobs))
