"""python recipes/prediction.py

How near predictions come: plans of four models on the emulated clusters, under both schedules and three
micro-batch sizes, run for real; those of a model on a cluster take turns with a reference, the whole model on
the fastest device alone. Prints one row per plan: predicted / measured - 1 of its step ("difference"), and
the same of its step in steps of the reference ("relative"), which the drift of a machine's speed does not
touch. Then the median and the worst of both, in all and by kind of plan; the references are not counted.

    python recipes/prediction.py --models resnet18 --clusters lab4 twins --micro-batches 4 8
"""

import argparse
import itertools
import json
import statistics
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench import EMULATED, Bench, alone, identity, predicted_s
from warm import warm_processors

import lightning_hetpipe as hp
from lightning_hetpipe.errors import InfeasibleError

MODELS = ("resnet18", "resnet50", "vgg11", "vit_tiny")


@dataclass(frozen=True)
class Row:
    """A plan, predicted beside measured.

    Attributes:
        stages: The devices of each.
        difference: Predicted / measured - 1.
        relative: The same of the step in steps of the cell's reference; None for the reference.
        turns_s: Measured seconds of a step in each round.
    """

    model: str
    cluster: str
    schedule: str
    micro_batch: int
    stages: tuple[tuple[str, ...], ...]
    predicted_s: float
    measured_s: float
    difference: float
    relative: float | None
    turns_s: tuple[float, ...]

    def __str__(self) -> str:
        stages = " ".join("+".join(devices) for devices in self.stages)
        relative = " reference" if self.relative is None else f"{self.relative:+10.1%}"
        figures = f"{self.predicted_s:8.3f} s {self.measured_s:8.3f} s {self.difference:+11.1%} {relative}"
        name = f"{self.model:9} {self.cluster:10} {self.schedule:8} {self.micro_batch:11d}"
        return f"{name} {figures}  {stages}"


def plans_of(bench: Bench, schedules: list[str], sizes: list[int]) -> list[hp.Plan]:
    """The reference, then the other plans, each once.

    Raises:
        InfeasibleError: The model fits on no device alone.
    """
    largest = {"micro_batch": min(max(sizes), bench.batch_size)}
    singles = list(alone(bench.profile, bench.cluster, bench.batch_size, **largest))
    if not singles:
        raise InfeasibleError(f"{bench.model} fits on no device of {bench.cluster_name} alone")
    plans = [min(singles, key=lambda plan: plan.prediction.step_s)]
    for schedule, size in itertools.product(schedules, sizes):
        try:
            plan = hp.plan(
                bench.profile,
                bench.cluster,
                bench.batch_size,
                micro_batch=size,
                schedule=schedule,
                baselines=False,
            )
        except InfeasibleError:
            print(f"{bench.model:9} {bench.cluster_name:10} {schedule:8} {size:11d} does not fit", flush=True)
            continue
        if identity(plan) not in map(identity, plans):
            plans.append(plan)
    return plans


def rows_of(bench: Bench, plans: list[hp.Plan], rounds: int, steps: int) -> list[Row]:
    """Runs the plans in turn; the first one is the reference."""
    rows = []
    first_s = predicted_s(plans[0], bench.profile)
    for plan, measured in zip(plans, bench.run_in_turn(plans, rounds, steps)):
        step_s = predicted_s(plan, bench.profile)
        rows.append(
            Row(
                bench.model,
                bench.cluster_name,
                plan.schedule,
                plan.micro_batch,
                tuple(stage.devices for stage in plan.stages),
                predicted_s=step_s,
                measured_s=measured.step_s,
                difference=step_s / measured.step_s - 1,
                relative=None if plan is plans[0] else step_s / first_s / measured.ratio - 1,
                turns_s=measured.trial.turns_s,
            )
        )
    return rows


def summary(name: str, rows: list[Row]) -> str:
    """What is said of some plans, references left out."""
    counted = [row for row in rows if row.relative is not None]
    if not counted:
        return f"{name}: none"
    lines = [f"{name}: {len(counted)} plans"]
    for kind in ("difference", "relative"):
        sizes = sorted(abs(getattr(row, kind)) for row in counted)
        within = ", ".join(
            f"{sum(size <= limit for size in sizes)} within {limit:.0%}" for limit in (0.05, 0.15)
        )
        lines.append(f"  {kind:10} median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, {within}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--clusters", nargs="+", default=EMULATED)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each plan")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--json", type=Path, help="keeps the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")

    rows: list[Row] = []
    print(
        "model     cluster    schedule micro-batch  predicted   measured  difference   relative  stages",
        flush=True,
    )
    for model, cluster in itertools.product(options.models, options.clusters):
        bench = Bench(model, cluster, options.batch)
        try:
            plans = plans_of(bench, options.schedules, options.micro_batches)
        except InfeasibleError as error:
            print(f"{model:9} {cluster:10} left out: {error}", flush=True)
            continue
        mine = rows_of(bench, plans, options.rounds, options.steps)
        print(*mine, sep="\n", flush=True)
        rows += mine
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(summary("all", rows))
    print(summary("layers only", [row for row in rows if all(len(names) == 1 for names in row.stages)]))
    print(summary("with groups", [row for row in rows if any(len(names) > 1 for names in row.stages)]))


if __name__ == "__main__":
    with warm_processors():
        main()
