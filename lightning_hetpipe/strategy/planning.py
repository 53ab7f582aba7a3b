"""The plan of a run: the user's, the last run's if it still fits, or a new one from measurements."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.engine.emulate import Emulator
from lightning_hetpipe.engine.session import Engine
from lightning_hetpipe.engine.shares import measuring_shares, sharing_of
from lightning_hetpipe.engine.survey import as_slow_as, fastest_alike, tabulated_sizes
from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.planner.rivals import rivals
from lightning_hetpipe.planner.search import make_plan
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.profiles import DeviceProfile, Profile
from lightning_hetpipe.profiling.cache import processor_name
from lightning_hetpipe.profiling.device import Optimizer, allocator_for, profile_device
from lightning_hetpipe.sharing import Sharing
from lightning_hetpipe.stage.batchnorm import paused_statistics
from lightning_hetpipe.strategy.capture import Captured
from lightning_hetpipe.strategy.discovery import find_cluster
from lightning_hetpipe.strategy.exchange import Exchange
from lightning_hetpipe.strategy.options import Options
from lightning_hetpipe.strategy.progress import MeasuringBar
from lightning_hetpipe.strategy.refine import sees_micro_batches
from lightning_hetpipe.tracing import Traced

log = logging.getLogger(__name__)

Context = Callable[[], AbstractContextManager[Any]]


def choose_plans(
    options: Options,
    engine: Engine,
    exchange: Exchange,
    traced: Traced,
    captured: Captured,
    context: Context,
    last: Plan | None,
    optimizer: Optimizer | None,
    optimizer_copies: float,
    *,
    show_progress: bool,
) -> tuple[tuple[Plan, ...], Profile | None]:
    """The plan of this run, then its rivals, to be tried beside it, and what they were made from, if known.

    Equal on all ranks, which all call it.

    Args:
        context: Entered around each forward, such as autocast.
        last: The plan of an earlier run of this strategy; used again for the same model and batch.
        optimizer: The run's, to be measured; None where unknown.
        optimizer_copies: State values that it keeps per parameter.
        show_progress: Whether rank 0 draws a bar while devices and links are measured.

    Raises:
        PlanError: The user's plan belongs to another model.
        InfeasibleError: Nothing fits.
    """
    if options.plan is not None:
        options.plan.check_graph(traced.graph)
        return (options.plan,), options.profile
    fingerprint = traced.graph.fingerprint
    if last is not None and (last.graph_fingerprint, last.batch_size) == (fingerprint, captured.batch_size):
        return (last,), None
    cluster = options.cluster or find_cluster(exchange, engine.device)
    sharing = None
    asked = not isinstance(options.merge, str) or (options.split is not None and bool(options.split.teams))
    may_share = asked or (options.merge == "auto" and options.split is None)
    if options.profile is None and may_share:
        args, kwargs = captured.arguments(torch.device("cpu"))
        with context():
            sharing = sharing_of(traced, traced.bind(args, kwargs), len(cluster.devices))
    measure = partial(
        _measure, engine, exchange, traced, captured, context, cluster, optimizer, sharing is not None
    )
    with MeasuringBar(shown=show_progress and exchange.leads) as bar:
        profile = options.profile or _profile(engine, exchange, traced, cluster, sharing, measure, bar)
    if profile.graph.fingerprint != fingerprint:
        raise PlanError(
            f"the profile is of another model (fingerprint {profile.graph.fingerprint}, this one has "
            f"{fingerprint}): measure again, or leave profile= out"
        )
    module = traced.module

    def make() -> list[str]:
        plan = _make(options, profile, cluster, captured.batch_size, optimizer_copies)
        return [each.to_json() for each in (plan, *_rivals(options, profile, plan, module, optimizer_copies))]

    plans = tuple(map(Plan.from_json, exchange.lead(make)))
    if exchange.leads and options.run_dir is not None:
        options.run_dir.mkdir(parents=True, exist_ok=True)
        plans[0].save(options.run_dir / "plan.json")
        profile.save(options.run_dir / "profile.json")
    return plans, profile


def _profile(
    engine: Engine,
    exchange: Exchange,
    traced: Traced,
    cluster: Cluster,
    sharing: Sharing | None,
    measure: Callable[[MeasuringBar], DeviceProfile | None],
    bar: MeasuringBar,
) -> Profile:
    """What every rank measured of its own device, now or earlier, the links between them, their software."""
    found: list[DeviceProfile | None] = exchange.agree(partial(measure, bar))
    measured = {each.device: each for each in found if each is not None}
    devices = tuple(
        measured[device.name]
        if device.name in measured
        else as_slow_as(device, measured[fastest_alike(device, cluster).name], cluster)
        for device in cluster.devices
    )
    bar.advance("measuring the links", 0, None)
    return Profile(
        traced.graph,
        devices,
        links=engine.measure_links(cluster),
        software=engine.measure_software(cluster),
        environment={"torch": torch.__version__, "processor": processor_name()},
        sharing=sharing,
    )


def _measure(
    engine: Engine,
    exchange: Exchange,
    traced: Traced,
    captured: Captured,
    context: Context,
    cluster: Cluster,
    optimizer: Optimizer | None,
    shares: bool,
    bar: MeasuringBar,
) -> DeviceProfile | None:
    """This rank's device, with the whole module on it; None where another rank measures for it.

    That is one with an equal processor of the same host, where all devices are emulated.
    """
    device = cluster.devices[exchange.rank]
    if _is_movable(cluster) and fastest_alike(device, cluster) != device:
        return None
    what = f"measuring {len(traced.graph)} layers on {device.name}"

    def advance(done: int, total: int) -> None:
        waits = done == total and exchange.world_size > 1
        bar.advance("waiting for the other devices" if waits else what, done, total)

    if exchange.leads:
        log.info("measuring %d layers on %d devices", len(traced.graph), len(cluster.devices))
    args, kwargs = captured.arguments(engine.device)
    traced.module.to(engine.device)
    inputs = traced.bind(args, kwargs)
    with _training(traced.module), paused_statistics(traced.module):
        return profile_device(
            traced,
            inputs,
            tabulated_sizes(captured.batch_size),
            device,
            section=Emulator(device).section,
            context=context,
            optimizer=optimizer,
            settings=allocator_for(device),
            progress=advance,
            shares=measuring_shares(traced, inputs, context) if shares else None,
        )


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Puts a module that evaluates in training mode; one that trains keeps the parts that do not."""
    modes = {each: each.training for each in module.modules()}
    if not module.training:
        module.train()
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode


def _make(
    options: Options, profile: Profile, cluster: Cluster, batch_size: int, optimizer_copies: float
) -> Plan:
    plan = make_plan(
        profile,
        cluster,
        batch_size,
        micro_batch="auto" if options.micro_batch is None else options.micro_batch,
        schedule=options.schedule,
        even="layers" if options.split is not None and options.split.cuts is None else False,
        cuts=None if options.split is None else options.split.cuts,
        device_order=None if options.split is None else options.split.devices,
        merge=options.merge if options.split is None or not options.split.teams else options.split.teams,
        optimizer_copies=optimizer_copies,
        pinned_last=None if _is_movable(cluster) else cluster.devices[0].name,
    )
    # A process cannot become another machine: where devices are real, rank i stays device i.
    return plan if _is_movable(cluster) else replace(plan, cluster=cluster)


def _rivals(
    options: Options, profile: Profile, plan: Plan, module: nn.Module, optimizer_copies: float
) -> tuple[Plan, ...]:
    """What is tried in the first steps: only where all was left to the planner, and only what is exact."""
    if not options.refine or options.micro_batch is not None or options.split is not None:
        return ()
    return rivals(
        profile,
        plan,
        sizes=not sees_micro_batches(module),
        schedule=options.schedule,
        optimizer_copies=optimizer_copies,
    )


def _is_movable(cluster: Cluster) -> bool:
    """True where any process can stand for any device: all are emulated on one host."""
    return (
        all(device.emulation is not None for device in cluster.devices)
        and len({device.host for device in cluster.devices}) == 1
    )
