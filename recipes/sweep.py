"""python recipes/sweep.py

Every micro-batch size under every schedule, run for real. For each model, cluster and batch size, a few steps
at a time and in turn:

    reference        the whole model on the fastest device alone
    auto             what the strategy goes on with: planned, then refined in its first steps
    M = stages       the best plan with as many micro-batches as `auto` has stages
    8 gpipe ...      the best plan of every size and schedule

A row is predicted / measured - 1 of a plan's step ("difference"), and the same of its step in steps of the
reference ("relative"), which the drift of a machine's speed does not touch. At the end: how near the
predictions of the sweep came, and what `auto` reached beside the fastest of it. Every cell is kept in --out
as it ends, so that a study that was stopped goes on where it was; one of all cells is only printed.

    python recipes/sweep.py --models resnet18 --clusters lab4 twins --batches 32 64 --sizes 4 8
"""

import argparse
import itertools
import json
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from bench import EMULATED, Bench, alone, identity, predicted_s
from typing_extensions import override
from warm import warm_processors

import lightning_hetpipe as hp
from lightning_hetpipe.errors import InfeasibleError
from lightning_hetpipe.planner.microbatch import offered
from lightning_hetpipe.trial import fit, random_batches, start_method

MODELS = ("resnet18", "resnet50", "vgg11", "vit_tiny")
REFERENCE, AUTO, AS_STAGES = "reference", "auto", "M = stages"
TRIALS = 16  # steps after which `auto` has compared its choice with others


@dataclass(frozen=True)
class Row:
    """A plan, predicted beside measured.

    Attributes:
        asked: What it is the plan of.
        swept: Whether it is one of the sweep, that is of a size and a schedule.
        stages: The devices of each.
        turns_s: Measured seconds of a step in each round.
        ratios: The same in steps of the reference.
    """

    asked: str
    swept: bool
    micro_batch: int
    schedule: str
    stages: tuple[tuple[str, ...], ...]
    predicted_s: float
    predicted_ratio: float
    turns_s: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        return statistics.median(self.turns_s)

    @property
    def difference(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def relative(self) -> float:
        return self.predicted_ratio / statistics.median(self.ratios) - 1

    @property
    def has_groups(self) -> bool:
        return any(len(devices) > 1 for devices in self.stages)

    def __str__(self) -> str:
        stages = " ".join("+".join(devices) for devices in self.stages)
        figures = f"{self.predicted_s:8.3f} s {self.measured_s:8.3f} s {self.difference:+11.1%}"
        name = f"{self.asked:11} {self.micro_batch:5d} {self.schedule:11}"
        return f"  {name} {figures} {self.relative:+9.1%}  {stages}"


@dataclass(frozen=True)
class Cell:
    """All that was run of one model on one cluster with one batch size; the reference comes first."""

    model: str
    cluster: str
    batch_size: int
    norm: str
    rows: tuple[Row, ...]

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> "Cell":
        rows = []
        for row in values["rows"]:
            stages = tuple(map(tuple, row["stages"]))
            rows.append(
                Row(
                    **row
                    | {"stages": stages, "turns_s": tuple(row["turns_s"]), "ratios": tuple(row["ratios"])}
                )
            )
        return cls(**values | {"rows": tuple(rows)})

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.model, self.cluster, self.batch_size, self.norm

    @property
    def swept(self) -> list[Row]:
        return [row for row in self.rows if row.swept]

    def row(self, asked: str) -> Row | None:
        return next((row for row in self.rows if row.asked == asked), None)

    def beside_best(self) -> float:
        """Images/s of `auto` by those of the fastest of the sweep."""
        return self._beside(min(self.swept, key=lambda row: statistics.median(row.ratios)))

    def beside_as_stages(self) -> float | None:
        other = self.row(AS_STAGES)
        return None if other is None else self._beside(other)

    def _beside(self, other: Row) -> float:
        """The median over the rounds; of plans that ran in turn, the reference leaves it."""
        auto = self.row(AUTO)
        assert auto is not None
        return statistics.median(
            theirs / ours for ours, theirs in zip(auto.ratios, other.ratios, strict=True)
        )

    def __str__(self) -> str:
        norm = "" if self.norm == "keep" else f", norm {self.norm}"
        head = f"{self.model} on {self.cluster}, batch {self.batch_size}{norm}"
        found = [f"auto / best of the sweep {self.beside_best():.3f}"]
        if (beside := self.beside_as_stages()) is not None:
            found.append(f"auto / {AS_STAGES} {beside:.3f}")
        return "\n".join([head, *map(str, self.rows), "  " + ", ".join(found)])


class _StopWhenSettled(L.Callback):
    """Ends a training once its first steps have told which plan goes on."""

    def __init__(self) -> None:
        self._planned: object = None

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        plan = trainer.strategy.plan  # type: ignore[attr-defined]
        if self._planned is None:
            self._planned = plan
        trainer.should_stop = plan is not self._planned  # on all ranks in the same step


def auto_plan(bench: Bench) -> hp.Plan:
    """What the strategy goes on with after its first steps."""
    strategy = hp.HetPipeStrategy(cluster=bench.cluster, profile=bench.profile, start_method=start_method())
    batches = random_batches(bench.shapes, bench.n_classes, bench.batch_size, TRIALS)
    fit(bench.network(), strategy, batches, [_StopWhenSettled()])
    assert strategy.plan is not None
    return strategy.plan


def asked_plans(
    bench: Bench, schedules: Sequence[str], sizes: Sequence[int]
) -> Iterator[tuple[str, Callable[[], hp.Plan]]]:
    """What is asked for, and how to get it.

    Raises:
        InfeasibleError: The model fits on no device alone.
    """

    def best(**options: object) -> Callable[[], hp.Plan]:
        return lambda: hp.plan(bench.profile, bench.cluster, bench.batch_size, baselines=False, **options)

    singles = list(alone(bench.profile, bench.cluster, bench.batch_size))
    if not singles:
        raise InfeasibleError(f"{bench.model} fits on no device of {bench.cluster_name} alone")
    yield REFERENCE, lambda: min(singles, key=lambda plan: plan.prediction.step_s)
    auto = auto_plan(bench)
    yield AUTO, lambda: auto
    yield AS_STAGES, best(micro_batch=-(-bench.batch_size // len(auto.stages)))
    for size, schedule in itertools.product(sizes, schedules):
        # One micro-batch is the same under every schedule.
        if size < bench.batch_size or (size == bench.batch_size and schedule == schedules[0]):
            yield f"{size} {schedule}", best(micro_batch=size, schedule=schedule)


def study(bench: Bench, schedules: Sequence[str], sizes: Sequence[int], rounds: int, steps: int) -> Cell:
    """Plans a cell and runs it.

    Raises:
        InfeasibleError: The model fits on no device alone.
    """
    plans: dict[str, hp.Plan] = {}
    for asked, make in asked_plans(bench, schedules, sizes or offered(bench.batch_size, smallest=4)):
        try:
            plans[asked] = make()
        except InfeasibleError:
            if asked == REFERENCE:
                raise
            print(f"{bench.model} on {bench.cluster_name}, batch {bench.batch_size}: {asked} does not fit")
    seconds = {asked: predicted_s(plan, bench.profile) for asked, plan in plans.items()}
    # Where not all run at once, those that may be the fastest run together.
    names = sorted(plans, key=lambda asked: (asked != REFERENCE, asked != AUTO, seconds[asked]))
    runs = dict(zip(names, bench.run_in_turn([plans[asked] for asked in names], rounds, steps), strict=True))
    swept = _first_of_each({asked: plan for asked, plan in plans.items() if asked[0].isdigit()})
    rows = [
        Row(
            asked,
            asked in swept,
            plan.micro_batch,
            plan.schedule,
            tuple(stage.devices for stage in plan.stages),
            predicted_s=seconds[asked],
            predicted_ratio=seconds[asked] / seconds[REFERENCE],
            turns_s=runs[asked].trial.turns_s,
            ratios=runs[asked].ratios,
        )
        for asked, plan in plans.items()
        if asked in swept or not asked[0].isdigit()
    ]
    return Cell(bench.model, bench.cluster_name, bench.batch_size, bench.norm, tuple(rows))


def _first_of_each(plans: dict[str, hp.Plan]) -> set[str]:
    """The names of the plans, but for those that do the same as one before."""
    names: dict[object, str] = {}
    for asked, plan in plans.items():
        names.setdefault(identity(plan), asked)
    return set(names.values())


def predictions(name: str, rows: Sequence[Row]) -> str:
    """How near the predictions of some plans came."""
    if not rows:
        return f"{name}: none"
    lines = [f"{name}: {len(rows)} plans"]
    for kind in ("difference", "relative"):
        sizes = sorted(abs(getattr(row, kind)) for row in rows)
        within = ", ".join(
            f"{sum(size <= limit for size in sizes)} within {limit:.0%}" for limit in (0.05, 0.15)
        )
        lines.append(f"  {kind:10} median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, {within}")
    return "\n".join(lines)


def summary(cells: Sequence[Cell]) -> str:
    """What all cells say together."""
    rows = [row for cell in cells for row in cell.swept]
    bests = [cell.beside_best() for cell in cells]
    others = [beside for cell in cells if (beside := cell.beside_as_stages()) is not None]
    lines = [
        predictions("all", rows),
        predictions("layers only", [row for row in rows if not row.has_groups]),
        predictions("with groups", [row for row in rows if row.has_groups]),
        *(
            predictions(model, [row for cell in cells if cell.model == model for row in cell.swept])
            for model in dict.fromkeys(cell.model for cell in cells)
        ),
        f"auto / best of the sweep: median {statistics.median(bests):.3f}, worst {min(bests):.3f} "
        f"({len(cells)} cells)",
    ]
    if others:
        lines.append(
            f"auto / {AS_STAGES}: best {max(others):.3f}, worst {min(others):.3f} ({len(others)} cells)"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, help="of conf/model")
    parser.add_argument("--clusters", nargs="+", default=EMULATED, help="of conf/cluster")
    parser.add_argument("--batches", nargs="+", type=int, default=[32])
    parser.add_argument("--sizes", nargs="+", type=int, default=[], help="default: all on offer from 4 on")
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"], help="auto: the best one")
    parser.add_argument("--norm", choices=("keep", "group"), default="keep", help="group: auto tries sizes")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each plan")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--out", type=Path, default=Path("sweep.json"), help="keeps the cells")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")

    kept: dict[object, Cell] = {}
    if options.out.exists():
        known = map(Cell.from_mapping, json.loads(options.out.read_text(encoding="utf-8")))
        kept = {cell.key: cell for cell in known}
    cells: list[Cell] = []
    for model, cluster, batch in itertools.product(options.models, options.clusters, options.batches):
        bench = Bench(model, cluster, batch, options.norm, max(options.batches))
        key = (model, cluster, batch, options.norm)
        if key not in kept:
            try:
                kept[key] = study(bench, options.schedules, options.sizes, options.rounds, options.steps)
            except InfeasibleError as error:
                print(f"{model} on {cluster}, batch {batch} left out: {error}", flush=True)
                continue
            options.out.write_text(
                json.dumps([asdict(cell) for cell in kept.values()], indent=1) + "\n", "utf-8"
            )
        cells.append(kept[key])
        print(cells[-1], flush=True)
    if cells:
        print(summary(cells))


if __name__ == "__main__":
    with warm_processors():
        main()
