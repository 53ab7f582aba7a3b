"""python recipes/micro_batch.py

Is the micro-batch that `auto` takes the best there is? For every model, cluster and batch size: trains a few
steps with `auto`, with every size on offer, and with as many micro-batches as stages; prints images/s
and the ratios. Every run is kept in --out as it ends, so that a study that was stopped goes on where it was.

    python recipes/micro_batch.py --models resnet18 --clusters lab4 twins --batches 32 --norm group
"""

import argparse
import json
import math
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from classifier import Classifier
from resnet import small_picture_network
from rich.table import Table
from torch.utils.data import DataLoader, Subset, TensorDataset

import lightning_hetpipe as hp
from lightning_hetpipe.planner.microbatch import offered
from lightning_hetpipe.report import show
from lightning_hetpipe.strategy.options import read_cluster

TRIALS = 15  # steps in which `auto` compares its choice with others, at most
PIXELS, CLASSES = 32, 10
Runs = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One model on one cluster with one batch size, and what BatchNorm does."""

    model: str
    cluster: str
    batch_size: int
    norm: str

    def key(self, asked: str) -> str:
        """A run of the cell in the file."""
        return f"{self.model}/{self.cluster}/{self.batch_size}/{self.norm}/{asked}"


def train(cell: Cell, micro_batch: str, steps: int, profile: Path) -> dict[str, Any]:
    """Trains for some steps; the plan's choices, and images per second from start to start."""
    L.seed_everything(0, verbose=False)
    cluster = read_cluster(cell.cluster)
    strategy = hp.HetPipeStrategy(
        cluster=cluster,
        micro_batch=micro_batch,
        norm=cell.norm,
        profile=profile if profile.exists() else None,
        run_dir=profile.parent,
        start_method="fork",
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=len(cluster.devices),
        max_epochs=1,
        callbacks=[hp.PipelineStatsMonitor(tolerance=math.inf)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=profile.parent,
    )
    images = torch.randn(cell.batch_size, 3, PIXELS, PIXELS)
    samples = TensorDataset(images, torch.randint(CLASSES, (cell.batch_size,)))
    repeated = Subset(samples, list(range(cell.batch_size)) * steps)
    trainer.fit(
        Classifier(small_picture_network(cell.model, CLASSES), lr=0.01), DataLoader(repeated, cell.batch_size)
    )
    plan = strategy.plan
    return {
        "micro_batch": plan.micro_batch,
        "schedule": plan.schedule,
        "stages": len(plan.stages),
        "images_per_s": float(trainer.callback_metrics["hetpipe/images_per_s"]),
        "images_per_s_predicted": plan.prediction.images_per_s,
    }


def study(cell: Cell, steps: int, smallest: int, runs: Runs, out: Path) -> None:
    """Makes those runs of a cell that are not there yet."""

    def once(asked: str, micro_batch: str, steps: int) -> dict[str, Any]:
        if cell.key(asked) not in runs:
            runs[cell.key(asked)] = train(cell, micro_batch, steps, profile)
            out.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
            print(cell.key(asked), runs[cell.key(asked)], flush=True)
        return runs[cell.key(asked)]

    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"  # measured by the first run, the same for the others
        auto = once("auto", "auto", steps + TRIALS)
        for size in offered(cell.batch_size, smallest):
            once(str(size), str(size), steps)
        once("stages", str(-(-cell.batch_size // auto["stages"])), steps)


def row(cell: Cell, runs: Runs) -> Iterator[str]:
    """The cell's line of the table."""
    own = {
        key.rpartition("/")[2]: run
        for key, run in runs.items()
        if key.rpartition("/")[0] == cell.key("")[:-1]
    }
    auto, as_stages = own["auto"], own["stages"]
    best = max((run for asked, run in own.items() if asked.isdigit()), key=lambda run: run["images_per_s"])
    yield from (cell.model, cell.cluster, str(cell.batch_size))
    yield from (f"{auto['micro_batch']} {auto['schedule']}", f"{auto['images_per_s']:.4g}")
    yield from (f"{best['micro_batch']} {best['schedule']}", f"{best['images_per_s']:.4g}")
    yield f"{auto['images_per_s'] / best['images_per_s']:.3f}"
    yield from (f"{as_stages['micro_batch']}", f"{auto['images_per_s'] / as_stages['images_per_s']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["resnet18", "mobilenet_v2"], help="names in torchvision.models"
    )
    parser.add_argument("--clusters", nargs="+", default=["twins", "lab4"], help="shipped ones, or files")
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--steps", type=int, default=8, help="of each run; auto takes its trials besides")
    parser.add_argument("--smallest", type=int, default=2, help="micro-batch of the sweep")
    parser.add_argument(
        "--norm", default="keep", help="group lets auto try other sizes too; see HetPipeStrategy"
    )
    parser.add_argument("--out", type=Path, default=Path("micro_batch.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")

    runs: Runs = json.loads(options.out.read_text()) if options.out.exists() else {}
    cells = [
        Cell(model, cluster, batch, options.norm)
        for model in options.models
        for cluster in options.clusters
        for batch in options.batches
    ]
    for cell in cells:
        study(cell, options.steps, options.smallest, runs, options.out)
    table = Table("model", "cluster", "batch", "auto", "images/s", "best", "images/s", "auto / best",
                  "M = stages", "auto / that")  # fmt: skip
    for cell in cells:
        table.add_row(*row(cell, runs))
    show(table)


if __name__ == "__main__":
    main()
