"""What the user asks the strategy for, read and checked before anything is started."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_hetpipe.checks import is_list, is_name, is_number, is_whole, require
from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.errors import ClusterError, GraphError, PlanError, ProfileError
from lightning_hetpipe.planner.groups import composite_name
from lightning_hetpipe.planner.request import teams_of
from lightning_hetpipe.plans import Merge, Plan, read_plan_file
from lightning_hetpipe.profiles import Profile
from lightning_hetpipe.schedule import SCHEDULES
from lightning_hetpipe.shipped import conf_dir

Norm = Literal["keep", "deferred", "sync", "group", "freeze"]
_CHOICES = {
    "schedule": ("auto", *SCHEDULES),
    "norm": get_args(Norm),
    "loss_reduction": ("mean", "sum"),
    "start_method": ("popen", "fork", "spawn"),
    "checkpoint": ("file", "directory"),
}


@dataclass(frozen=True)
class SplitByHand:
    """A plan of which only the stages are given; the rest is measured and predicted as always.

    Attributes:
        cuts: Names of the layers at which every stage but the first begins; None splits evenly by layers.
        devices: Who holds the stages, in order, ``b+c`` for a group; None for all, as the cluster lists them.
        teams: The groups among them.
    """

    cuts: tuple[str, ...] | None = None
    devices: tuple[str, ...] | None = None
    teams: tuple[tuple[str, ...], ...] = ()

    @property
    def names(self) -> tuple[str, ...] | None:
        """The devices one by one."""
        if self.devices is None:
            return None
        members = {composite_name(team): team for team in self.teams}
        return tuple(name for device in self.devices for name in members.get(device, (device,)))

    def __post_init__(self) -> None:
        for kind, names in (("cuts", self.cuts), ("devices", self.names)):
            if names is not None and len(set(names)) < len(names):
                raise PlanError(f"the plan's {kind} {', '.join(names)} name one twice: give each once")
        if self.cuts is not None and self.devices is not None and len(self.devices) != len(self.cuts) + 1:
            raise PlanError(
                f"{len(self.cuts)} cuts make {len(self.cuts) + 1} stages, but {len(self.devices)} devices "
                f"are named: {', '.join(self.devices)}"
            )


@dataclass(frozen=True)
class Options:
    """The strategy's arguments as values: files are read, choices are known.

    Attributes:
        cluster: None where it is to be found at start.
        plan, profile: None where they are to be made.
        split: The stages where they are given and the rest of the plan is not.
        micro_batch: None where the planner chooses.
        refine: Whether the planner's choice is compared with its neighbours in the first steps.
        blocks: Name of a sequence of blocks, for modules that do not trace.
        merge: Whether devices may share a stage, or the groups that must.
    """

    cluster: Cluster | None
    plan: Plan | None
    split: SplitByHand | None
    profile: Profile | None
    module: str
    micro_batch: int | None
    schedule: str
    norm: Norm
    loss_reduction: str
    start_method: str
    checkpoint: str
    refine: bool
    timeout_s: float
    run_dir: Path | None
    blocks: str | None
    merge: Merge = "auto"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise PlanError(f"{name}={getattr(self, name)!r} is unknown; known are {', '.join(choices)}")
        require(isinstance(self.module, str), GraphError, "module", self.module, "a dotted name, or 'auto'")
        named = self.blocks is None or isinstance(self.blocks, str)
        require(named, GraphError, "blocks", self.blocks, "the dotted name of a sequence of blocks, or None")
        bounded = is_number(self.timeout_s) and self.timeout_s > 0
        require(bounded, PlanError, "timeout_s", self.timeout_s, "seconds > 0")
        if self.plan is not None and self.cluster is not None:
            _check_same_cluster(self.plan.cluster, self.cluster)
        if self.plan is not None and self.profile is not None:
            _check_same_profile(self.plan, self.profile)
        if self.plan is not None:
            _check_same_settings(self.plan, {"micro_batch": self.micro_batch, "schedule": self.schedule})
        if self.split is not None and self.cluster is not None:
            for name in self.split.names or ():
                self.cluster.device(name)
        if self.merge != "auto" and _has_groups(self.plan, self.split):
            raise PlanError(f"merge={self.merge!r}, but plan= has groups of its own: leave merge= out")
        teams = teams_of(self.merge, self.schedule)
        if teams:
            if self.plan is not None:
                raise PlanError("merge= names groups, and plan= has its stages: leave one of them out")
            for name in (name for team in teams for name in team if self.cluster is not None):
                assert self.cluster is not None
                self.cluster.device(name)

    @property
    def known_cluster(self) -> Cluster | None:
        """The cluster as far as it is known before the start: a plan brings its own."""
        return self.plan.cluster if self.plan is not None else self.cluster

    def check_world(self, world_size: int) -> None:
        """Refuses a number of processes that the cluster does not have.

        Raises:
            ClusterError: They differ.
        """
        cluster = self.known_cluster
        if cluster is not None and len(cluster.devices) != world_size:
            names = ", ".join(device.name for device in cluster.devices)
            raise ClusterError(
                f"cluster {cluster.name!r} has {len(cluster.devices)} devices ({names}), but {world_size} "
                f"processes were asked for. Say Trainer(devices={len(cluster.devices)}), or use a cluster "
                "of that size."
            )


def read_cluster(cluster: Cluster | Mapping[str, Any] | str | Path | None) -> Cluster | None:
    """A cluster from a value, a mapping, a YAML file, or the name of a shipped one.

    Raises:
        ClusterError: It cannot be read or contradicts itself.
    """
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, Mapping):
        return Cluster.from_mapping(cluster)
    accepts = "a Cluster, a mapping, a YAML file or the name of a shipped cluster"
    require(isinstance(cluster, (str, Path)), ClusterError, "cluster", cluster, accepts)
    path = Path(cluster)
    if not path.suffix and not path.exists():
        shipped = conf_dir() / "cluster" / f"{path}.yaml"
        if not shipped.exists():
            known = sorted(file.stem for file in shipped.parent.glob("*.yaml"))
            raise ClusterError(
                f"cluster {str(cluster)!r} is neither a file nor a shipped one; shipped are "
                f"{', '.join(known)}"
            )
        path = shipped
    return Cluster.from_yaml(path)


def read_plan(plan: Plan | Mapping[str, Any] | str | Path | None) -> Plan | SplitByHand | None:
    """A plan from a value, a mapping or a file; ``even`` or a mapping with ``cuts`` is a split by hand.

    Raises:
        PlanError: It cannot be read or contradicts itself.
    """
    if plan is None or isinstance(plan, Plan):
        return plan
    if plan == "even":
        return SplitByHand()
    accepts = "a Plan, a mapping, a plan file or 'even'"
    require(isinstance(plan, (str, Path, Mapping)), PlanError, "plan", plan, accepts)
    if not isinstance(plan, Mapping):
        data = read_plan_file(plan)
        return _read_split(data) if _is_split(data) else Plan.load(plan)
    return _read_split(plan) if _is_split(plan) else Plan.from_mapping(plan)


def _has_groups(plan: Plan | None, split: SplitByHand | None) -> bool:
    shared = plan is not None and any(stage.split != "none" for stage in plan.stages)
    return shared or (split is not None and bool(split.teams))


def _is_split(data: object) -> bool:
    return isinstance(data, Mapping) and "format" not in data and "cuts" in data


def _read_split(data: Any) -> SplitByHand:
    unknown = sorted(set(map(str, data)) - {"cuts", "devices"})
    if unknown:
        raise PlanError(f"a plan with cuts has unknown keys {', '.join(unknown)}; known are cuts and devices")
    cuts, devices = data["cuts"], data.get("devices")
    if not is_list(cuts) or not all(map(is_name, cuts)):
        raise PlanError(f"cuts of the plan is {cuts!r}: give a list of names")
    cuts = tuple(map(str, cuts))
    if devices is None:
        return SplitByHand(cuts)
    groups = [each if is_list(each) else [each] for each in devices] if is_list(devices) else [[]]
    if not all(each and all(map(is_name, each)) for each in groups):
        raise PlanError(
            f"devices of the plan is {devices!r}: give a list of names, and a list of names for a group"
        )
    held = [tuple(map(str, each)) for each in groups]
    return SplitByHand(
        cuts, tuple(map(composite_name, held)), tuple(names for names in held if len(names) > 1)
    )


def read_profile(profile: Profile | str | Path | None) -> Profile | None:
    """A profile from a value or a file.

    Raises:
        ProfileError: It cannot be read.
    """
    if profile is None or isinstance(profile, Profile):
        return profile
    require(isinstance(profile, (str, Path)), ProfileError, "profile", profile, "a Profile or a file")
    return Profile.load(profile)


def read_micro_batch(micro_batch: int | str) -> int | None:
    """A number of samples, or None for ``auto``.

    Raises:
        PlanError: It is neither.
    """
    if micro_batch == "auto":
        return None
    if isinstance(micro_batch, str) and micro_batch.isdecimal():  # from a command line
        micro_batch = int(micro_batch)
    accepts = "samples, a whole number from 1 on, or 'auto'"
    require(is_whole(micro_batch), PlanError, "micro_batch", micro_batch, accepts)
    return int(micro_batch)


def read_run_dir(run_dir: str | Path | None) -> Path | None:
    """A folder, or None for none.

    Raises:
        PlanError: It is neither.
    """
    known = run_dir is None or isinstance(run_dir, (str, Path))
    require(known, PlanError, "run_dir", run_dir, "the path of a folder, or None")
    return None if run_dir is None else Path(run_dir)


def _check_same_settings(plan: Plan, asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        own = getattr(plan, name)
        if value not in (None, "auto", own):
            raise PlanError(f"{name}={value} was asked for, but plan= has {name} {own}: leave {name}= out")


def _check_same_profile(plan: Plan, profile: Profile) -> None:
    if plan.profile_hash not in ("", profile.content_hash):
        raise PlanError(
            f"the plan was made from another profile (hash {plan.profile_hash}, this one has "
            f"{profile.content_hash}): make a new plan, or leave profile= or plan= out"
        )


def _check_same_cluster(planned: Cluster, given: Cluster) -> None:
    ours = {device.name: device for device in given.devices}
    for device in planned.devices:
        if ours.get(device.name) != device:
            what = "does not have" if device.name not in ours else "describes differently"
            raise PlanError(
                f"the plan was made for another cluster: it uses device {device.name!r}, which cluster "
                f"{given.name!r} {what}. Make a new plan, or leave cluster= out."
            )
    if len(ours) != len(planned.devices):
        missing = sorted(set(ours) - {device.name for device in planned.devices})
        raise PlanError(
            f"the plan was made for another cluster: cluster {given.name!r} also has {', '.join(missing)}. "
            "Make a new plan, or leave cluster= out."
        )
    for pair in permutations(ours, 2):
        if planned.link(*pair) != given.link(*pair):
            raise PlanError(
                f"the plan was made for another cluster: the link {' -> '.join(pair)} of cluster "
                f"{given.name!r} has other figures. Make a new plan, or leave cluster= out."
            )
