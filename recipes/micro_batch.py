"""python recipes/micro_batch.py

Is the micro-batch that `auto` takes the best there is? For every model, cluster and batch size: lets the
strategy choose (planned, then refined in its first steps), and runs what it goes on with beside the best
plan of every size on offer, and of as many micro-batches as stages; all of a cell a few steps at a time and
in turn. Prints images/s and the ratios, each the median over the rounds. Every cell is kept in --out as it
ends, so that a study that was stopped goes on where it was.

    python recipes/micro_batch.py --models resnet18 --clusters lab4 twins --batches 32 --norm group
"""

import argparse
import json
import statistics
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench import profile, run_in_turn
from resnet import small_picture_network
from rich.table import Table
from torch import nn
from warm import warm_processors

import lightning_hetpipe as hp
from lightning_hetpipe.errors import InfeasibleError
from lightning_hetpipe.planner.microbatch import offered
from lightning_hetpipe.report import show
from lightning_hetpipe.strategy.options import read_cluster
from lightning_hetpipe.trial import fit, random_batches, start_method

TRIALS = 16  # steps after which `auto` has compared its choice with others
PIXELS, CLASSES = 32, 10
SHAPES = ((3, PIXELS, PIXELS),)
Runs = dict[str, dict[str, Any]]  # by what was asked: auto, a size, stages


@dataclass(frozen=True)
class Cell:
    """One model on one cluster with one batch size, and what BatchNorm is."""

    model: str
    cluster: str
    batch_size: int
    norm: str

    @property
    def key(self) -> str:
        return f"{self.model}/{self.cluster}/{self.batch_size}/{self.norm}"

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return hp.convert_norm(small_picture_network(self.model, CLASSES), self.norm)


def auto_plan(cell: Cell, cluster: hp.Cluster, measured: hp.Profile) -> hp.Plan:
    """What the strategy goes on with after its first steps."""
    strategy = hp.HetPipeStrategy(cluster=cluster, profile=measured, start_method=start_method())
    fit(cell.network(), strategy, random_batches(SHAPES, CLASSES, cell.batch_size, TRIALS), [])
    assert strategy.plan is not None
    return strategy.plan


def study(cell: Cell, smallest: int, rounds: int) -> Runs:
    """Plans and runs a cell."""
    cluster = read_cluster(cell.cluster)
    assert cluster is not None
    measured = profile(cell.network(), SHAPES, cluster, cell.batch_size)
    auto = auto_plan(cell, cluster, measured)
    as_stages = -(-cell.batch_size // len(auto.stages))
    sizes = {str(size): size for size in offered(cell.batch_size, smallest)} | {"stages": as_stages}
    plans = {"auto": auto}
    for asked, size in sizes.items():
        try:
            plans[asked] = hp.plan(measured, cluster, cell.batch_size, micro_batch=size, baselines=False)
        except InfeasibleError:
            print(f"{cell.key}: micro-batches of {size} do not fit")
    runs = run_in_turn(cell.network(), SHAPES, CLASSES, list(plans.values()), rounds, 2)
    auto_s = runs[0].step_s
    return {
        asked: {
            "micro_batch": plan.micro_batch,
            "schedule": plan.schedule,
            "stages": len(plan.stages),
            "images_per_s": cell.batch_size / (auto_s * run.ratio),
            "images_per_s_predicted": cell.batch_size / plan.prediction.step_s,
            "turns_s": run.trial.turns_s,
        }
        for (asked, plan), run in zip(plans.items(), runs)
    }


def best_of(runs: Runs) -> dict[str, Any]:
    """The fastest of the sizes on offer."""
    return max((run for asked, run in runs.items() if asked.isdigit()), key=lambda run: run["images_per_s"])


def beside(runs: Runs, other: dict[str, Any]) -> float:
    return float(runs["auto"]["images_per_s"] / other["images_per_s"])


def table_of(cells: dict[Cell, Runs]) -> Table:
    table = Table("model", "cluster", "batch", "auto", "images/s", "best", "images/s", "auto / best",
                  "M = stages", "auto / that")  # fmt: skip
    for cell, runs in cells.items():
        auto, best, as_stages = runs["auto"], best_of(runs), runs.get("stages")
        table.add_row(
            *(cell.model, cell.cluster, str(cell.batch_size)),
            *(f"{auto['micro_batch']} {auto['schedule']}", f"{auto['images_per_s']:.4g}"),
            *(f"{best['micro_batch']} {best['schedule']}", f"{best['images_per_s']:.4g}"),
            f"{beside(runs, best):.3f}",
            *(
                ("-", "-")
                if as_stages is None
                else (str(as_stages["micro_batch"]), f"{beside(runs, as_stages):.3f}")
            ),
        )
    return table


def summary(cells: dict[Cell, Runs]) -> str:
    bests = [beside(runs, best_of(runs)) for runs in cells.values()]
    lines = [
        f"auto / best of the sweep: median {statistics.median(bests):.3f}, worst {min(bests):.3f} "
        f"({len(bests)} cells)"
    ]
    others = [beside(runs, runs["stages"]) for runs in cells.values() if "stages" in runs]
    if others:
        lines.append(f"auto / as many as stages: best {max(others):.3f}, worst {min(others):.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["resnet18", "mobilenet_v2"], help="names in torchvision.models"
    )
    parser.add_argument("--clusters", nargs="+", default=["twins", "lab4"], help="shipped ones, or files")
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--rounds", type=int, default=5, help="turns of two steps of each plan")
    parser.add_argument("--smallest", type=int, default=2, help="micro-batch of the sweep")
    parser.add_argument(
        "--norm", choices=("keep", "group"), default="keep", help="group lets auto try other sizes too"
    )
    parser.add_argument("--out", type=Path, default=Path("micro_batch.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")

    kept: dict[str, Runs] = json.loads(options.out.read_text()) if options.out.exists() else {}
    cells: dict[Cell, Runs] = {}
    for model in options.models:
        for cluster in options.clusters:
            for batch in options.batches:
                cell = Cell(model, cluster, batch, options.norm)
                if cell.key not in kept:
                    kept[cell.key] = study(cell, options.smallest, options.rounds)
                    options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
                cells[cell] = kept[cell.key]
                show(table_of({cell: cells[cell]}))
    show(table_of(cells), summary(cells))


if __name__ == "__main__":
    with warm_processors():
        main()
