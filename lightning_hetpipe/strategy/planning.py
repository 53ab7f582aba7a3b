"""The plan of a run: the user's, the last run's if it still fits, or a new one from measurements."""

import logging
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.engine.emulate import Emulator
from lightning_hetpipe.engine.session import Engine
from lightning_hetpipe.engine.survey import tabulated_sizes
from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.planner.search import make_plan
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.profiles import DeviceProfile, Profile
from lightning_hetpipe.profiling.cache import cached_profile
from lightning_hetpipe.profiling.measure import measure_device
from lightning_hetpipe.strategy.capture import Captured
from lightning_hetpipe.strategy.discovery import find_cluster
from lightning_hetpipe.strategy.exchange import Exchange
from lightning_hetpipe.strategy.options import Options
from lightning_hetpipe.tracing import Traced

log = logging.getLogger(__name__)

Context = Callable[[], AbstractContextManager[Any]]
_MEASURE = "measure"


def choose_plan(
    options: Options,
    engine: Engine,
    exchange: Exchange,
    traced: Traced,
    captured: Captured,
    context: Context,
    last: Plan | None,
) -> Plan:
    """The plan of this run, equal on all ranks. Called on all ranks.

    Args:
        context: Entered around each forward, such as autocast.
        last: The plan of an earlier run of this strategy; used again for the same model and batch.

    Raises:
        PlanError: The user's plan belongs to another model.
        InfeasibleError: Nothing fits.
    """
    if options.plan is not None:
        options.plan.check_graph(traced.graph)
        return options.plan
    fingerprint = traced.graph.fingerprint
    if last is not None and (last.graph_fingerprint, last.batch_size) == (fingerprint, captured.batch_size):
        return last
    cluster = options.cluster or find_cluster(exchange, engine.device)
    profile = options.profile or _profile(engine, exchange, traced, captured, context, cluster)
    if profile.graph.fingerprint != fingerprint:
        raise PlanError(
            f"the profile is of another model (fingerprint {profile.graph.fingerprint}, this one has "
            f"{fingerprint}): measure again, or leave profile= out"
        )
    text = exchange.lead(lambda: _make(options, profile, cluster, captured.batch_size).to_json())
    plan = Plan.from_json(text)
    if exchange.leads and options.run_dir is not None:
        options.run_dir.mkdir(parents=True, exist_ok=True)
        plan.save(options.run_dir / "plan.json")
        profile.save(options.run_dir / "profile.json")
    return plan


def _profile(
    engine: Engine,
    exchange: Exchange,
    traced: Traced,
    captured: Captured,
    context: Context,
    cluster: Cluster,
) -> Profile:
    """The profile that rank 0 keeps from an earlier run, or a new one; equal on all ranks."""
    sizes = tabulated_sizes(captured.batch_size)

    def measure() -> Profile:
        work = partial(_measure, engine, exchange, traced, captured, context, cluster, sizes)
        devices = exchange.agree(work)
        return Profile(traced.graph, tuple(devices), environment=_environment())

    if not exchange.leads:
        message = exchange.broadcast()
        if message == _MEASURE:
            measure()
            message = exchange.broadcast()
        return Profile.from_json(message)

    def make() -> Profile:
        exchange.broadcast(_MEASURE)
        return measure()

    with context():
        precision = (torch.get_default_dtype(), torch.is_autocast_enabled(engine.device.type))
    key = {
        "graph": traced.graph.fingerprint,
        "devices": [(device.name, *device.kind_key) for device in cluster.devices],
        "sizes": sizes,
        "precision": precision,
        **_environment(),
    }
    profile = cached_profile(key, make)
    exchange.broadcast(profile.to_json())
    return profile


def _measure(
    engine: Engine,
    exchange: Exchange,
    traced: Traced,
    captured: Captured,
    context: Context,
    cluster: Cluster,
    sizes: tuple[int, ...],
) -> DeviceProfile:
    """Measures this rank's device; the whole module is on it meanwhile."""
    device = cluster.devices[exchange.rank]
    if exchange.leads:
        log.info("measuring %d layers on %d devices", len(traced.graph), len(cluster.devices))
    args, kwargs = captured.arguments(engine.device)
    traced.module.to(engine.device)
    training = traced.module.training
    traced.module.train()
    try:
        return measure_device(
            traced,
            traced.bind(args, kwargs),
            sizes,
            device.name,
            section=Emulator(device).section,
            context=context,
        )
    finally:
        traced.module.train(training)


def _environment() -> dict[str, str]:
    return {"torch": torch.__version__, "processor": platform.processor() or platform.machine()}


def _make(options: Options, profile: Profile, cluster: Cluster, batch_size: int) -> Plan:
    merge: Any = options.merge
    plan = make_plan(
        profile,
        cluster,
        batch_size,
        micro_batch="auto" if options.micro_batch is None else options.micro_batch,
        schedule=options.schedule,
        merge=merge,
        pinned_last=None if _is_movable(cluster) else cluster.devices[0].name,
    )
    # A process cannot become another machine: where devices are real, rank i stays device i.
    return plan if _is_movable(cluster) else replace(plan, cluster=cluster)


def _is_movable(cluster: Cluster) -> bool:
    """True where any process can stand for any device: all are emulated on one host."""
    return (
        all(device.emulation is not None for device in cluster.devices)
        and len({device.host for device in cluster.devices}) == 1
    )
