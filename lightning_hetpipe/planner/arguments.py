"""Refuses what is no profile, no cluster, no group or no number before a search begins."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hetpipe.checks import is_list, is_name, is_number, is_whole, require
from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.errors import ClusterError, PlanError, ProfileError
from lightning_hetpipe.plans import Merge
from lightning_hetpipe.profiles import Profile


def check_arguments(
    profile: object,
    cluster: object,
    batch_size: object,
    micro_batch: object,
    stages: object,
    optimizer_copies: object,
    names: Mapping[str, Any],
) -> None:
    """Refuses arguments of `make_plan` that are of the wrong kind.

    Args:
        names: What has to be a list of names, or None, by argument.

    Raises:
        HetPipeError: Of the kind that fits; names the argument and what it takes.
    """
    require(isinstance(profile, Profile), ProfileError, "profile", profile, "a Profile")
    require(isinstance(cluster, Cluster), ClusterError, "cluster", cluster, "a Cluster")
    samples = "samples, a whole number from 1 on"
    require(is_whole(batch_size), PlanError, "batch_size", batch_size, samples)
    known = micro_batch == "auto" or is_whole(micro_batch)
    require(known, PlanError, "micro_batch", micro_batch, f"{samples}, or 'auto'")
    known = stages is None or is_whole(stages)
    require(known, PlanError, "stages", stages, "a whole number from 1 on, or None")
    copies = "a number >= 0, such as 2 for Adam"
    require(is_number(optimizer_copies), PlanError, "optimizer_copies", optimizer_copies, copies)
    for key, value in names.items():
        known = value is None or (isinstance(value, Sequence) and not isinstance(value, str))
        known = known and all(isinstance(name, str) for name in value or ())
        require(known, PlanError, key, value, "a list of names, or None")


def read_merge(merge: object) -> Merge:
    """Whether devices may share a stage, or the groups that must.

    Raises:
        PlanError: It is neither ``auto`` nor ``never`` nor lists of device names, or they make no groups.
    """
    if merge == "auto":
        return "auto"
    if merge == "never":
        return "never"
    if (
        not is_list(merge)
        or not merge
        or not all(is_list(team) and all(map(is_name, team)) for team in merge)
    ):
        raise PlanError(
            f"merge={merge!r} is unknown: say 'auto', 'never', or give a list of lists of device names"
        )
    teams = [list(map(str, team)) for team in merge]
    names = [name for team in teams for name in team]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"merge={teams} names {name!r} twice: a device has one stage")
    for team in teams:
        if len(team) < 2:
            raise PlanError(f"merge={teams}: {team} is no group: name two or more")
    return tuple(map(tuple, teams))
