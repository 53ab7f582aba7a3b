"""The plan of a run: the user's, the last run's if it still fits, or a new one from fresh measurements."""

import logging
from typing import Any

import torch

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.engine.emulate import Emulator
from lightning_hetpipe.engine.session import Engine
from lightning_hetpipe.engine.survey import tabulated_sizes
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.profiles import DeviceProfile, Profile
from lightning_hetpipe.strategy.capture import Captured
from lightning_hetpipe.strategy.discovery import find_cluster
from lightning_hetpipe.strategy.exchange import Exchange
from lightning_hetpipe.strategy.options import Options
from lightning_hetpipe.tracing import Traced

log = logging.getLogger(__name__)


def choose_plan(
    options: Options,
    engine: Engine,
    exchange: Exchange,
    traced: Traced,
    captured: Captured,
    last: Plan | None,
) -> Plan:
    """The plan of this run, equal on all ranks. Called on all ranks.

    Args:
        last: The plan of an earlier run of this strategy; used again for the same model and batch.

    Raises:
        PlanError: The user's plan belongs to another model.
        InfeasibleError: Nothing fits.
    """
    if options.plan is not None:
        options.plan.check_graph(traced.graph)
        return options.plan
    if (
        last is not None
        and last.graph_fingerprint == traced.graph.fingerprint
        and last.batch_size == captured.batch_size
    ):
        return last
    cluster = options.cluster or find_cluster(exchange, engine.device)
    profile = options.profile or _measure(engine, exchange, traced, captured, cluster, options.micro_batch)
    text = exchange.lead(lambda: _make(options, profile, cluster, captured.batch_size).to_json())
    plan = Plan.from_json(text)
    plan.check_graph(traced.graph)
    if exchange.leads:
        _record(options, plan, profile)
    return plan


def _measure(
    engine: Engine,
    exchange: Exchange,
    traced: Traced,
    captured: Captured,
    cluster: Cluster,
    micro_batch: int | None,
) -> Profile:
    """Every rank measures its own device; all get the whole profile."""
    from lightning_hetpipe.profiling.measure import measure_device

    device = cluster.devices[exchange.rank]
    emulator = Emulator(device)
    args, kwargs = captured.arguments(engine.device)
    inputs = traced.bind(args, kwargs)
    sizes = _sizes(captured.batch_size, micro_batch)

    def work() -> DeviceProfile:
        return measure_device(traced, inputs, sizes, device.name, section=emulator.section)

    return Profile(traced.graph, tuple(exchange.agree(work)), environment={"torch": torch.__version__})


def _sizes(batch_size: int, micro_batch: int | None) -> tuple[int, ...]:
    """Micro-batch sizes worth measuring: the one that is asked for, or a range up to the batch."""
    if micro_batch is not None:
        return (min(micro_batch, batch_size),)
    return tabulated_sizes(batch_size)


def _make(options: Options, profile: Profile, cluster: Cluster, batch_size: int) -> Plan:
    from lightning_hetpipe.planner.search import make_plan

    arguments: dict[str, Any] = {}
    if not _is_movable(cluster):
        arguments["pinned_last"] = cluster.devices[0].name
    return make_plan(
        profile,
        cluster,
        batch_size,
        micro_batch="auto" if options.micro_batch is None else options.micro_batch,
        schedule=options.schedule,
        merge=options.merge,
        **arguments,
    )


def _is_movable(cluster: Cluster) -> bool:
    """True where any process can stand for any device: all are emulated on one host."""
    return all(device.emulation is not None for device in cluster.devices) and (
        len({device.host for device in cluster.devices}) == 1
    )


def _record(options: Options, plan: Plan, profile: Profile) -> None:
    log.info("plan: %s", plan.reason)
    if options.run_dir is not None:
        options.run_dir.mkdir(parents=True, exist_ok=True)
        plan.save(options.run_dir / "plan.json")
        profile.save(options.run_dir / "profile.json")
