"""The plan: where every layer runs, in slices of which size, in which order, and what that should cost.

A plan is a value. It can be written, read, diffed and edited by hand; it is bound by a hash to the
model, cluster and profile that it was made from.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from lightning_hetpipe.checks import frozen, is_number, is_whole, require
from lightning_hetpipe.cluster import Cluster, slowest_link
from lightning_hetpipe.errors import ClusterError, PlanError
from lightning_hetpipe.graph import LayerGraph, Route
from lightning_hetpipe.predictions import Alternative as Alternative
from lightning_hetpipe.predictions import Prediction as Prediction
from lightning_hetpipe.schedule import SCHEDULES, Schedule, make_schedule, stages_of_rank
from lightning_hetpipe.text import align, format_seconds
from lightning_hetpipe.units import format_bytes

FORMAT = 1
FAST_WORK_PER_S = 50e9
Split = Literal["none", "channel", "batch"]
Merge = Literal["auto", "never"] | tuple[tuple[str, ...], ...]
COLUMNS = (
    "stage", "layers", "device", "share", "in flight",
    "forward", "backward", "busy", "memory", "enters",
)  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """What a channel group weighs when it chooses what to share and what each member does whole.

    Attributes:
        work_per_s: Speed of the whole group, in units of `stage.layout.Operation.work`.
        latency_s, bandwidth_bytes_per_s: Of the slowest link between its members.
    """

    work_per_s: float
    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            holds = is_number(value) and (value > 0 or key == "latency_s")
            require(holds, PlanError, f"pace.{key}", value, "a number > 0 (latency_s may be 0)")


@dataclass(frozen=True)
class Stage:
    """A run of layers and the devices that hold it.

    Attributes:
        start, stop: Layers ``start`` to ``stop - 1``.
        devices: Names of the group's devices; one for an unshared stage.
        shares: Each device's fraction of the stage, summing to 1.
        split: How the group shares the stage.
        pace: Of a channel group; None in a hand-written plan, whose group assumes a fast device.
    """

    start: int
    stop: int
    devices: tuple[str, ...]
    shares: tuple[float, ...] = (1.0,)
    split: Split = "none"
    pace: Pace | None = None

    def __post_init__(self) -> None:
        for key in ("start", "stop"):
            value = getattr(self, key)
            require(is_whole(value, 0), PlanError, key, value, "the index of a layer, from 0 on")
        named = isinstance(self.devices, tuple) and all(isinstance(name, str) for name in self.devices)
        require(named, PlanError, "devices", self.devices, "a tuple of device names")
        counted = isinstance(self.shares, tuple) and all(map(is_number, self.shares))
        require(counted, PlanError, "shares", self.shares, "a tuple of fractions")
        paced = self.pace is None or isinstance(self.pace, Pace)
        require(paced, PlanError, "pace", self.pace, "a Pace, or None")
        if self.stop <= self.start:
            raise PlanError(f"stage {self.start}..{self.stop} holds no layer")
        if not self.devices or len(self.devices) != len(self.shares):
            raise PlanError(f"stage on {self.devices} has shares {self.shares}: give one per device")
        if len(set(self.devices)) < len(self.devices):
            raise PlanError(f"stage on {self.devices} names a device twice: name each once")
        if any(share <= 0 for share in self.shares) or abs(sum(self.shares) - 1) > 1e-6:
            raise PlanError(f"shares {self.shares} of {self.devices} must be positive and sum to 1")
        if self.split not in get_args(Split):
            raise PlanError(f"split {self.split!r} is unknown; known are {', '.join(get_args(Split))}")
        if (self.split == "none") != (len(self.devices) == 1):
            raise PlanError(f"a stage on {len(self.devices)} devices cannot have split {self.split!r}")


@dataclass(frozen=True)
class Plan:
    """Cluster, stages, slices, schedule and prediction.

    Attributes:
        cluster: In rank order: rank ``i`` runs on ``cluster.devices[i]``; rank 0 holds the last stage.
        layer_names: Names of all layers, so that a reader sees what the cuts mean.
        stages: In order of execution.
        batch_size: Samples of a full batch.
        micro_batch: Samples per micro-batch; the last ones of a batch may be smaller.
        schedule: ``gpipe``, ``1f1b``, or ``interleaved``, under which a device may hold several stages
            that are no neighbours.
        in_flight: Micro-batches that each stage may hold between forward and backward.
        graph_fingerprint: The model it was made for.
        profile_hash: The profile it was made from; empty for a hand-written plan.
        prediction: None for a hand-written plan that was not simulated.
        reason: One line on why this plan.
        alternatives: What it was compared with.
    """

    cluster: Cluster
    layer_names: tuple[str, ...]
    stages: tuple[Stage, ...]
    batch_size: int
    micro_batch: int
    schedule: str
    in_flight: tuple[int, ...]
    graph_fingerprint: str = ""
    profile_hash: str = ""
    prediction: Prediction | None = None
    reason: str = ""
    alternatives: tuple[Alternative, ...] = field(default=())

    def __post_init__(self) -> None:
        require(isinstance(self.cluster, Cluster), PlanError, "cluster", self.cluster, "a Cluster")
        _require_all("layer_names", self.layer_names, str)
        _require_all("stages", self.stages, Stage)
        _require_all("alternatives", self.alternatives, Alternative)
        _check_stages(self)
        for key in ("batch_size", "micro_batch"):
            value = getattr(self, key)
            require(is_whole(value), PlanError, key, value, "samples, a whole number from 1 on")
        predicted = self.prediction is None or isinstance(self.prediction, Prediction)
        require(predicted, PlanError, "prediction", self.prediction, "a Prediction, or None")
        for key in ("graph_fingerprint", "profile_hash", "reason"):
            value = getattr(self, key)
            require(isinstance(value, str), PlanError, key, value, "text")
        if self.schedule not in SCHEDULES:
            raise PlanError(f"schedule {self.schedule!r} is unknown; known are {', '.join(SCHEDULES)}")
        counted = isinstance(self.in_flight, tuple) and all(map(is_whole, self.in_flight))
        if not counted or len(self.in_flight) != len(self.stages):
            raise PlanError(f"in_flight {self.in_flight} must give at least 1 for each stage")

    @property
    def starts(self) -> tuple[int, ...]:
        """First layer of each stage."""
        return tuple(stage.start for stage in self.stages)

    @property
    def loss_apart(self) -> bool:
        """Whether a group shares the last stage: then a loss stage on rank 0 follows it.

        It has no layers. The outputs of the group come together there, for the step that waits for them.
        """
        return len(self.stages[-1].devices) > 1

    @cached_property
    def executed_ranks(self) -> tuple[tuple[int, ...], ...]:
        """`ranks_of_stage` with the loss stage, as schedules have it."""
        return (*self.ranks_of_stage, (0,)) if self.loss_apart else self.ranks_of_stage

    @property
    def executed_in_flight(self) -> tuple[int, ...]:
        """``in_flight`` with the loss stage, which goes in step with the one before it."""
        return (*self.in_flight, self.in_flight[-1]) if self.loss_apart else self.in_flight

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank holds, the loss stage not counted; several under ``interleaved``."""
        return tuple(map(tuple, stages_of_rank(self.ranks_of_stage, len(self.cluster.devices))))

    @cached_property
    def ranks_of_stage(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each stage."""
        rank_of = {device.name: rank for rank, device in enumerate(self.cluster.devices)}
        return tuple(tuple(rank_of[name] for name in stage.devices) for stage in self.stages)

    def pace(self, stage: Stage) -> Pace:
        """What a channel group weighs; declared links and a fast device where it does not say."""
        if stage.pace is not None:
            return stage.pace
        slowest = slowest_link(self.cluster.link(a, b) for a, b in permutations(stage.devices, 2))
        return Pace(FAST_WORK_PER_S, slowest.latency_s, slowest.bandwidth_bytes_per_s)

    def slices(self, n_samples: int) -> tuple[int, ...]:
        """Micro-batch sizes of a batch of ``n_samples``; see `micro_batch_sizes`."""
        return micro_batch_sizes(n_samples, self.micro_batch)

    def routes(self, graph: LayerGraph) -> tuple[Route, ...]:
        """The messages between the stages, the loss stage included."""
        return graph.routes(self.starts, loss_apart=self.loss_apart)

    def action_lists(
        self,
        routes: Sequence[Route],
        n_micro_batches: int,
        *,
        reduce: Iterable[int] = (),
        training: bool = True,
        check: bool = True,
    ) -> Schedule:
        """What every rank does in one step: the lists that are simulated, drawn and executed.

        Args:
            routes: Those of `routes`.
            n_micro_batches: At least 1.
            reduce, training, check: As for `make_schedule`.

        Raises:
            ScheduleError: The plan's in-flight counts cannot work.
        """
        return make_schedule(
            self.schedule,
            ranks_of_stage=self.executed_ranks,
            n_ranks=len(self.cluster.devices),
            n_micro_batches=n_micro_batches,
            in_flight=self.executed_in_flight,
            routes=routes,
            reduce=reduce,
            training=training,
            check=check,
        )

    def check_graph(self, graph: LayerGraph) -> None:
        """Refuses a plan that was made for another model.

        Raises:
            PlanError: Number or names of layers, or the fingerprint, differ.
        """
        names = tuple(layer.name for layer in graph.layers)
        if self.layer_names != names:
            ours, theirs = len(self.layer_names), len(names)
            different = next(
                (f"layer {i} is {a!r} in the plan and {b!r} in the model"
                 for i, (a, b) in enumerate(zip(self.layer_names, names)) if a != b),
                f"the plan has {ours} layers, the model {theirs}",
            )  # fmt: skip
            raise PlanError(f"the plan was made for another model: {different}. Make a new plan.")
        if self.graph_fingerprint and self.graph_fingerprint != graph.fingerprint:
            raise PlanError(
                "the plan was made for a model with the same layers but other shapes or dtypes "
                f"(fingerprint {self.graph_fingerprint}, the model has {graph.fingerprint}). "
                "Make a new plan."
            )

    def rows(self) -> list[tuple[str, ...]]:
        """One row of text per stage, under the columns of `COLUMNS`; ``-`` for what was not predicted."""
        return [_row(self, index) for index in range(len(self.stages))]

    def table(self) -> str:
        """The stages as an aligned table, under a line with batch, micro-batch and schedule."""
        return f"{self.headline()}\n{align(COLUMNS, self.rows())}"

    def headline(self) -> str:
        """Cluster, batch, micro-batches and schedule, and the predicted speed, in one line."""
        n_micro_batches = len(self.slices(self.batch_size))
        text = (
            f"{self.cluster.name}: batch {self.batch_size} in {n_micro_batches} micro-batches of "
            f"{self.micro_batch}, {self.schedule}"
        )
        if self.prediction is None:
            return text
        return (
            f"{text}; {self.prediction.images_per_s:.4g} images/s, "
            f"{format_seconds(self.prediction.step_s)} per step (predicted)"
        )

    def why(self) -> str:
        """One line: the bottleneck, the best rejected alternative, the binding limit."""
        return self.reason or "written by hand: nothing was compared"

    def to_json(self) -> str:
        """A JSON text that `from_json` reads back to an equal plan."""
        data = asdict(self) | {"format": FORMAT, "cluster": self.cluster.to_mapping()}
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads a plan.

        Raises:
            PlanError: The text is not a plan of this format, or contradicts itself.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise PlanError(f"the plan is not JSON: {error}") from error
        return cls.from_mapping(data)

    @classmethod
    def from_mapping(cls, data: object) -> "Plan":
        """Builds a plan from a mapping, as YAML or JSON give it.

        Raises:
            PlanError: A key is missing or unknown, or the plan contradicts itself.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise PlanError(f"the file is not a plan of format {FORMAT}")
        return _read_plan({key: value for key, value in data.items() if key != "format"})

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a JSON or YAML plan file.

        Raises:
            PlanError: The file is missing or does not hold a plan.
        """
        try:
            return cls.from_mapping(read_plan_file(path))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


def _row(plan: Plan, index: int) -> tuple[str, ...]:
    stage, ranks = plan.stages[index], plan.ranks_of_stage[index]
    names = plan.layer_names[stage.start : stage.stop]
    prediction = plan.prediction or Prediction(0.0, 0.0)
    memory = [prediction.memory_bytes[rank] for rank in ranks if rank < len(prediction.memory_bytes)]

    def figure(values: tuple[float, ...], write: Callable[[float], str]) -> str:
        return write(values[index]) if index < len(values) else "-"

    return (
        str(index),
        names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})",
        ", ".join(f"{name} (rank {rank})" for name, rank in zip(stage.devices, ranks)),
        "all" if stage.split == "none" else " ".join((stage.split, *map("{:.0%}".format, stage.shares))),
        str(plan.in_flight[index]),
        figure(prediction.forward_s, format_seconds),
        figure(prediction.backward_s, format_seconds),
        figure(prediction.busy, "{:.0%}".format),
        format_bytes(max(memory)) if memory else "-",
        figure(prediction.cut_bytes, format_bytes),
    )


def micro_batch_sizes(n_samples: int, micro_batch: int) -> tuple[int, ...]:
    """Slices of so many samples; the last one may be smaller, but is no single sample.

    BatchNorm refuses a slice that has one value per channel, and one sample makes poor statistics. So a
    last sample shares with the slice before it; only slices of 2 grow by that.

    >>> micro_batch_sizes(20, 8), micro_batch_sizes(17, 8), micro_batch_sizes(5, 2)
    ((8, 8, 4), (8, 5, 4), (2, 3))
    """
    full, rest = divmod(n_samples, micro_batch)
    if rest != 1 or not full:
        return (micro_batch,) * full + ((rest,) if rest else ())
    shared = (micro_batch + 2) // 2, (micro_batch + 1) // 2
    return (micro_batch,) * (full - 1) + (shared if shared[1] > 1 else (sum(shared),))


def read_plan_file(path: str | Path) -> Any:
    """What a JSON or YAML file holds.

    Raises:
        PlanError: It is missing, or neither.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        # YAML reads 1e-05 as text, so JSON is not simply left to the YAML parser.
        return json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise PlanError(f"plan {path} cannot be read: {error}") from error


def content_hash(text: str) -> str:
    """A short hash of a text, for binding a plan to what it was made from."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _require_all(key: str, values: object, kind: type) -> None:
    known = isinstance(values, tuple) and all(isinstance(value, kind) for value in values)
    require(known, PlanError, key, values, f"a tuple of {kind.__name__} values")


def _check_stages(plan: Plan) -> None:
    if not plan.stages:
        raise PlanError("the plan has no stages")
    edges = [(stage.start, stage.stop) for stage in plan.stages]
    expected = 0
    for start, stop in edges:
        if start != expected:
            raise PlanError(f"stages {edges} leave a gap or overlap at layer {expected}")
        expected = stop
    if expected != len(plan.layer_names):
        raise PlanError(f"stages {edges} do not end at the model's last of {len(plan.layer_names)} layers")
    used = [name for stage in plan.stages for name in stage.devices]
    known = {device.name for device in plan.cluster.devices}
    for name in used:
        if name not in known:
            raise PlanError(
                f"the plan places a stage on device {name!r}, which cluster "
                f"{plan.cluster.name!r} does not have; it has {', '.join(sorted(known))}"
            )
        if used.count(name) > 1 and plan.schedule != "interleaved":
            raise PlanError(
                f"device {name!r} is used by two stages; give each device one, or make the schedule "
                "interleaved"
            )
    if plan.schedule == "interleaved":
        _check_rounds(plan.stages)
    if plan.cluster.devices[0].name not in plan.stages[-1].devices:
        raise PlanError(
            f"rank 0 ({plan.cluster.devices[0].name!r}) must hold the last stage, which is on "
            f"{', '.join(plan.stages[-1].devices)}: put that device first in the cluster"
        )


def _check_rounds(stages: Sequence[Stage]) -> None:
    for index, (stage, after) in enumerate(zip(stages, (*stages[1:], None))):
        if stage.split != "none":
            raise PlanError(
                f"stage {index} is shared by {', '.join(stage.devices)}, which the interleaved schedule "
                "cannot do: give it one device, or take 1f1b"
            )
        if after is not None and after.devices == stage.devices:
            raise PlanError(
                f"stages {index} and {index + 1} are neighbours, both on {stage.devices[0]!r}: make them one"
            )


def _read_plan(data: dict[str, Any]) -> Plan:
    try:
        cluster = Cluster.from_mapping(data.pop("cluster"))
        stages = tuple(map(_read_stage, data.pop("stages")))
        prediction = data.pop("prediction", None)
        alternatives = tuple(Alternative(**entry) for entry in data.pop("alternatives", ()))
        return Plan(
            cluster=cluster,
            stages=stages,
            prediction=Prediction(**frozen(prediction)) if prediction else None,
            alternatives=alternatives,
            **frozen(data),
        )
    except ClusterError as error:
        raise PlanError(f"the plan's cluster is wrong: {error}") from error
    except PlanError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(f"the plan is damaged: {error!r}") from error


def _read_stage(data: Mapping[str, Any]) -> Stage:
    entry = frozen(data)
    pace = entry.pop("pace", None)
    return Stage(**entry, pace=None if pace is None else Pace(**pace))
