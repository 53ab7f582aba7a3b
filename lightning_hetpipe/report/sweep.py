"""One table at the end of a Hydra multirun: what was varied, and what came out."""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from lightning_hetpipe.report.table import show


def sweep_table(results: Sequence[tuple[str, Mapping[str, float]]]) -> Table:
    """One row per job: its overrides, then every number that any job returned; ``-`` where it has none."""
    names = list(dict.fromkeys(name for _, figures in results for name in figures))
    table = Table("overrides", *names, title="Sweep", title_justify="left")
    for overrides, figures in results:
        table.add_row(overrides, *(f"{figures[name]:.4g}" if name in figures else "-" for name in names))
    return table


class SweepTable(Callback):
    """Collects the mappings that the jobs return and prints them when the last one ends."""

    def __init__(self) -> None:
        self.results: list[tuple[str, dict[str, float]]] = []

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Keeps the numbers of one job."""
        value = job_return._return_value
        overrides = OmegaConf.select(config, "hydra.job.override_dirname")
        figures = value if isinstance(value, Mapping) else {}
        self.results.append(
            (str(overrides), {k: float(v) for k, v in figures.items() if isinstance(v, (int, float))})
        )

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Prints the table."""
        show(sweep_table(self.results))
