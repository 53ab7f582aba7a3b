"""Refuses what is no profile, no cluster or no number before a search begins."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hetpipe.checks import is_number, is_whole, require
from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.errors import ClusterError, PlanError, ProfileError
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
