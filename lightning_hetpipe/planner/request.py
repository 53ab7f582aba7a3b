"""What a plan is asked for, and whether that can be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.planner.arguments import read_merge
from lightning_hetpipe.planner.candidates import Setting
from lightning_hetpipe.planner.split import Even
from lightning_hetpipe.planner.teams import Teams
from lightning_hetpipe.plans import Merge
from lightning_hetpipe.schedule import SCHEDULES


@dataclass(frozen=True)
class Request:
    """The options of `make_plan`."""

    setting: Setting
    micro_batch: int | Literal["auto"]
    schedule: str
    stages: int | None
    even: Even | None
    cuts: tuple[str, ...] | None
    device_order: tuple[str, ...] | None
    pinned_last: str | None

    @property
    def is_fixed(self) -> bool:
        """Whether the stages are given, so that nothing is searched."""
        return self.even is not None or self.cuts is not None

    @property
    def sizes(self) -> tuple[int, ...]:
        if self.micro_batch == "auto":
            return self.setting.sizes
        return (self.micro_batch,)


def check_request(request: Request) -> None:
    """Refuses options that contradict each other, the model or the cluster.

    Raises:
        PlanError: They do.
        ProfileError: A device was not profiled.
    """
    setting, n_layers = request.setting, len(request.setting.profile.graph)
    names = {device.name for device in setting.cluster.devices}
    if request.micro_batch != "auto" and not 1 <= request.micro_batch <= setting.batch_size:
        raise PlanError(
            f"micro_batch {request.micro_batch} must lie between 1 and the batch size {setting.batch_size}"
        )
    if request.schedule not in (*SCHEDULES, "auto"):
        raise PlanError(
            f"schedule {request.schedule!r} is unknown; known are {', '.join(SCHEDULES)} and auto"
        )
    if request.schedule == "interleaved" and (request.is_fixed or request.stages is not None):
        raise PlanError(
            "the interleaved schedule was asked for together with given stages (cuts, even, or their "
            "number): leave those out, or write the plan by hand"
        )
    if request.cuts is not None and request.even is not None:
        raise PlanError(f"cuts {request.cuts} and an even split were both asked for: give one of them")
    if request.cuts is not None and request.stages != len(request.cuts) + 1:
        raise PlanError(f"{len(request.cuts)} cuts make {len(request.cuts) + 1} stages, not {request.stages}")
    if request.even not in (None, "layers", "time"):
        raise PlanError(f"even {request.even!r} is unknown; known are layers, time, True and False")
    for name in (*(request.device_order or ()), *((request.pinned_last,) if request.pinned_last else ())):
        if name not in names:
            raise PlanError(
                f"device {name!r} is not in cluster {setting.cluster.name!r}; "
                f"it has {', '.join(sorted(names))}"
            )
    order = request.device_order
    if order is not None:
        if not order or len(set(order)) < len(order):
            raise PlanError(f"device_order {order} must name each device once")
        if request.pinned_last not in (None, order[-1]):
            raise PlanError(f"device_order ends with {order[-1]!r}, but {request.pinned_last!r} must be last")
        if request.stages not in (None, len(order)):
            raise PlanError(f"device_order names {len(order)} devices for {request.stages} stages")
    wanted = request.stages or (len(order) if order else 1)
    if not 1 <= wanted <= min(n_layers, len(names)):
        raise PlanError(
            f"{wanted} stages were asked for; the model has {n_layers} layers and the cluster "
            f"{len(names)} devices: ask for at most {min(n_layers, len(names))}"
        )
    for name in names:
        setting.profile.device(name)


def teams_of(merge: Merge | Sequence[Sequence[str]], schedule: str) -> Teams:
    """The groups that are asked for, if any.

    Raises:
        PlanError: They are no groups, or the schedule has none.
    """
    known = read_merge(merge)
    if isinstance(known, str):
        return ()
    if schedule == "interleaved":
        raise PlanError(
            f"merge={[list(team) for team in known]} and the interleaved schedule were both asked for, but "
            "under it no devices share a stage: leave one of them out"
        )
    return known
