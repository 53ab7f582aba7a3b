"""Rich tables of plans, comparisons, profiles, and of what was predicted beside what was measured."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table

from lightning_hetpipe.plans import COLUMNS, Alternative, Plan
from lightning_hetpipe.profiles import Profile
from lightning_hetpipe.text import format_seconds
from lightning_hetpipe.timeline import Timeline
from lightning_hetpipe.units import format_bytes

_WIDTH = 140  # of what does not go to a terminal


def show(*parts: RenderableType) -> None:
    """Prints tables and text below each other, as wide as the terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _WIDTH))
    for part in parts:
        console.print(part, highlight=False, markup=False)


def plan_table(plan: Plan) -> Table:
    """One row per stage; the title has batch and schedule, the caption says why."""
    return _table(plan.headline(), COLUMNS, plan.rows(), caption=f"why: {plan.why()}")


def comparison_table(rows: Iterable[Alternative], title: str = "Compared", *, bound: float = 0.0) -> Table:
    """Every alternative, fastest first; those that cannot run come last, with the reason in the note.

    Args:
        bound: Images/s of all devices that never wait; 0 where unknown.
    """
    ordered = sorted(rows, key=lambda row: -row.images_per_s)
    return _table(
        title,
        ("alternative", "images/s", "of bound", "step", "memory", "note"),
        [
            (
                row.name,
                f"{row.images_per_s:.4g}" if row.images_per_s else "-",
                f"{row.images_per_s / bound:.0%}" if row.images_per_s and bound else "-",
                format_seconds(row.step_s) if row.images_per_s else "-",
                format_bytes(row.memory_bytes) if row.memory_bytes else "-",
                row.note,
            )
            for row in ordered
        ],
    )


def largest_table(plan: Plan, even: Plan | None) -> Table:
    """The largest batch of a cluster beside the largest of GPipe with the layers divided evenly."""
    rows = [_largest_row("this plan", plan)]
    if even is None:
        rows.append(("gpipe, even split", "-", "-", "-", "-", "not one sample fits"))
    else:
        gain = f"this plan: {plan.batch_size / even.batch_size - 1:+.0%}"
        rows.append((*_largest_row("gpipe, even split", even)[:-1], gain))
    columns = ("largest batch of", "samples", "micro-batch", "in flight", "fullest device", "note")
    return _table("Largest batch", columns, rows)


def _largest_row(name: str, plan: Plan) -> tuple[str, ...]:
    assert plan.prediction is not None
    memory = format_bytes(max(plan.prediction.memory_bytes))
    flight = " ".join(map(str, plan.in_flight))
    return name, str(plan.batch_size), str(plan.micro_batch), flight, memory, plan.schedule


def measured_table(plan: Plan, predicted: Timeline, measured: Timeline) -> Table:
    """Step time, images/s, and each used rank's busy fraction and peak memory, predicted and measured."""
    return _table(
        f"{plan.cluster.name}: predicted and measured",
        ("figure", "predicted", "measured", "difference"),
        [*_step_rows(plan, predicted, measured), *_rank_rows(plan, predicted, measured)],
    )


def _step_rows(plan: Plan, predicted: Timeline, measured: Timeline) -> list[tuple[str, ...]]:
    steps = (predicted.step_s, measured.step_s)
    speeds = [plan.batch_size / step_s if step_s else 0.0 for step_s in steps]
    return [
        ("step", *map(format_seconds, steps), _difference(*steps)),
        ("images/s", *(f"{speed:.4g}" for speed in speeds), _difference(*speeds)),
    ]


def _rank_rows(plan: Plan, predicted: Timeline, measured: Timeline) -> list[tuple[str, ...]]:
    memory = plan.prediction.memory_bytes if plan.prediction else ()
    rows: list[tuple[str, ...]] = []
    for rank in dict.fromkeys(rank for ranks in plan.ranks_of_stage for rank in ranks):
        stages = plan.stages_of_rank[rank]
        word = "stage" if len(stages) == 1 else "stages"
        where = f"{word} {', '.join(map(str, stages))} on {plan.cluster.devices[rank].name}"
        busy = (predicted.busy[rank], measured.busy[rank])
        rows.append((f"{where}: busy", *(f"{value:.0%}" for value in busy), ""))
        if rank < len(memory) and rank < len(measured.peak_memory_bytes):
            pair = (memory[rank], measured.peak_memory_bytes[rank])
            rows.append((f"{where}: memory", *map(format_bytes, pair), _difference(*pair)))
    return rows


def profile_table(profile: Profile) -> Table:
    """Seconds of each layer on each device at the largest micro-batch size that was measured."""
    size = max(device.micro_batches[-1] for device in profile.devices)
    tables = [device.layer_seconds(size) for device in profile.devices]
    rows = [
        (
            layer.name,
            layer.operation,
            format_bytes(layer.parameter_bytes) if layer.parameter_bytes else "-",
            *(format_seconds(forward[i] + backward[i]) for forward, backward in tables),
        )
        for i, layer in enumerate(profile.graph.layers)
    ]
    totals = (
        f"{format_seconds(sum(forward))} + {format_seconds(sum(backward))}" for forward, backward in tables
    )
    weights = format_bytes(sum(layer.parameter_bytes for layer in profile.graph.layers))
    rows.append(("all, forward + backward", "", weights, *totals))
    return _table(
        f"{profile.origin} profile, micro-batch of {size}",
        ("layer", "operation", "weights", *(device.device for device in profile.devices)),
        rows,
    )


def _difference(predicted: float, measured: float) -> str:
    return f"{measured / predicted - 1:+.0%}" if predicted else "-"


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Table:
    table = Table(
        title=title, caption=caption or None, title_justify="left", caption_justify="left", box=SIMPLE_HEAD
    )
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
