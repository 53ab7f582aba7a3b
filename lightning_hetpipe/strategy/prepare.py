"""From an unmodified LightningModule to a running pipeline: peek, trace, measure, plan, cut.

rank 0   run the user's step up to the module call ──► its arguments ──► every rank
all      trace ── measure own device ──► rank 0
rank 0   plan ──► every rank
all      keep own tensors, build own stage
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hetpipe.engine.emulate import Emulator
from lightning_hetpipe.engine.runtime import SharedGradients
from lightning_hetpipe.engine.session import Engine, MakeSchedule
from lightning_hetpipe.errors import PlanError, UnsupportedError
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.profiles import Profile
from lightning_hetpipe.schedule.action import Schedule
from lightning_hetpipe.stage.norm import convert_norm, small_batch_advice
from lightning_hetpipe.strategy import hooks, norms
from lightning_hetpipe.strategy.capture import Capture, Captured
from lightning_hetpipe.strategy.clipping import install_clipping, warn_of_own_clipping
from lightning_hetpipe.strategy.devices import refuse_autocast_across_kinds
from lightning_hetpipe.strategy.exchange import Exchange
from lightning_hetpipe.strategy.groups import Groups, OwnPart, build, check_samples, make_groups
from lightning_hetpipe.strategy.mirror import keep_local
from lightning_hetpipe.strategy.optimizer import optimizer_of, state_copies
from lightning_hetpipe.strategy.options import Options
from lightning_hetpipe.strategy.partition import (
    OwnerMap,
    borrowed_parameters,
    copies_of,
    gather,
    partition,
    slots,
)
from lightning_hetpipe.strategy.pipeline import Pipeline
from lightning_hetpipe.strategy.pipelined import find_pipelined, refuse_one_layer
from lightning_hetpipe.strategy.planning import choose_plans
from lightning_hetpipe.strategy.precision import prepare_precision
from lightning_hetpipe.strategy.refine import SEES, Refinement, sees_micro_batches
from lightning_hetpipe.strategy.refusals import refuse_cut_weights
from lightning_hetpipe.strategy.shards import join
from lightning_hetpipe.strategy.steps import StandIn
from lightning_hetpipe.tracing import TensorSpec, Traced, trace

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What a run has on this rank before the module is looked at.

    Attributes:
        module: The LightningModule.
        callbacks: The Trainer's; they may keep copies of the module.
        precision: The Trainer's precision plugin.
        group: All ranks, for what the weights need; None where there is one rank.
        show_progress: Whether measuring draws a bar.
        trains: Whether an optimizer will be made.
        gradient_copies: 1 where the gradients of earlier batches stand beside those that are made; else 0.
    """

    module: Any
    callbacks: list[Any]
    precision: Any
    options: Options
    engine: Engine
    exchange: Exchange
    group: Any
    trains: bool
    gradient_copies: int
    is_overridden: Callable[[str, Any], bool]
    show_progress: bool


def prepare(run: Run, capture: Capture, plan: Plan | None) -> Pipeline:
    """Makes the pipeline of a run. Called on all ranks; only rank 0 captures.

    Args:
        plan: One to use; None to make one.

    Raises:
        HetPipeError: The module cannot be traced, no plan fits, or the plan is another model's.
    """
    name, pipelined = find_pipelined(run.module, run.options.module)
    refuse_one_layer(run.module, name, pipelined)
    convert_norm(pipelined, run.options.norm)
    stand_in = StandIn(pipelined, _label(run.module, name))
    captured: Captured = run.exchange.lead(lambda: capture(stand_in))
    traced = _trace(run, pipelined, captured)
    plans, profile, groups = _plan(run, name, pipelined, traced, captured, plan)
    plan, context = plans[0], run.precision.forward_context
    run.engine.cluster = plan.cluster
    run.engine.emulator = Emulator(plan.cluster.devices[run.exchange.rank])
    owners = _owners(run.module, name, traced, groups)
    modules = (run.module, *copies_of(run.module, run.callbacks))
    for each in modules:
        partition(each, owners, run.exchange.rank, run.group, run.engine.device)
    gc.collect()  # weights that went to other ranks are still in reference cycles
    prepare_precision(run.precision, run.engine.device, run.group)
    own, lists = _install(run, traced, groups, owners)
    restore_clipping = install_clipping(
        run.precision, run.group, borrowed_parameters(run.module, owners, run.exchange.rank)
    )
    warn_of_own_clipping(run.module)
    keep_local(run.module)

    def at_close(whole: bool) -> None:
        hooks.remove(run.module)
        norms.remove(run.module)
        own.leave()
        restore_clipping()
        if run.options.norm != "group":
            convert_norm(pipelined, "keep")
        run.engine.emulator.lift_memory_limit()
        if whole:
            for each in modules:
                join(each, owners, run.exchange.rank, run.group)
                gather(each, owners, run.exchange.rank, run.group)

    del captured  # or the batch in it would count as memory that the process has anyway
    run.engine.limit_memory(_held_bytes(run.module))
    pipeline = Pipeline(
        run.module,
        stand_in,
        traced,
        Refinement(plans, SEES if sees_micro_batches(pipelined) else ""),
        lists,
        run.engine,
        run.exchange,
        loss_reduction=run.options.loss_reduction,
        context=context,
        commit=own.commit if run.options.norm == "deferred" else lambda: None,
        owners=owners,
        at_close=at_close,
        profile=profile,
    )
    stand_in.install()
    hooks.install(run.module, pipeline.lead_hook, run.is_overridden)
    norms.install(run.module, run.exchange, run.is_overridden, owners.shards)
    return pipeline


def _say(run: Run, pipelined: Any, groups: Groups) -> None:
    """Shows the plan, how groups share their stages, and what it means for BatchNorm."""
    plan = groups.plan
    rank_zero_info(f"{plan.table()}\nwhy: {plan.why()}")
    for index, layout in groups.layouts.items():
        log.debug("stage %d:\n%s", index, layout.describe())
        rank_zero_info(f"stage {index}: {layout.summary()}")
    parts = [share for i in groups.indices("batch") for share in plan.stages[i].shares]
    seen = plan.micro_batch if run.options.norm == "sync" else int(plan.micro_batch * min(parts, default=1.0))
    advice = small_batch_advice(pipelined, max(1, seen))
    if advice is not None and run.exchange.leads:
        log.warning(advice)


def _label(module: Any, name: str) -> str:
    return f"{type(module).__name__}.{name}" if name else type(module).__name__


def _plan(
    run: Run, name: str, pipelined: Any, traced: Traced, captured: Captured, last: Plan | None
) -> tuple[tuple[Plan, ...], Profile | None, Groups]:
    """The plan of the run, then its rivals; what they were made from, if known; and its groups."""
    context = run.precision.forward_context
    optimizer = optimizer_of(run.module) if run.trains else None
    copies = state_copies(optimizer, run.engine.device) + run.gradient_copies

    def choose(options: Options, last: Plan | None) -> tuple[tuple[Plan, ...], Profile | None]:
        return choose_plans(
            options,
            run.engine,
            run.exchange,
            traced,
            captured,
            context,
            last,
            optimizer,
            copies,
            show_progress=run.show_progress,
        )

    plans, profile = choose(run.options, last)
    refuse_autocast_across_kinds(run.precision, plans[0].cluster)
    try:
        groups = _groups(run, name, traced, plans[0], captured)
        if optimizer is not None and any(layout.placements for layout in groups.layouts.values()):
            refuse_cut_weights(optimizer.make)
    except (PlanError, UnsupportedError) as error:
        if run.options.merge != "auto" or run.options.plan is not None or run.options.split is not None:
            raise
        rank_zero_info(f"the planner's groups cannot be: {error} Planning again with merge='never'.")
        plans, profile = choose(replace(run.options, merge="never"), None)
        groups = _groups(run, name, traced, plans[0], captured)
    _say(run, pipelined, groups)
    return plans, profile, groups


def _trace(run: Run, pipelined: Any, captured: Captured) -> Traced:
    """The module as layers, equal on all ranks."""
    made: list[Traced] = []

    def work() -> str:
        args, kwargs = captured.arguments(torch.device("cpu"))
        with run.precision.forward_context():
            made.append(trace(pipelined, args, kwargs, run.options.blocks))
        return made[0].graph.fingerprint

    fingerprints = run.exchange.agree(work)
    if len(set(fingerprints)) > 1:
        raise PlanError(
            f"the ranks built different models (fingerprints {', '.join(fingerprints)}): every rank must "
            "build the same module, whatever its device"
        )
    return made[0]


def _groups(run: Run, name: str, traced: Traced, plan: Plan, captured: Captured) -> Groups:
    """How the plan's groups share their stages.

    Raises:
        PlanError: They cannot.
    """
    args, kwargs = captured.arguments(torch.device("cpu"))
    example = {key: TensorSpec.of(value) for key, value in traced.bind(args, kwargs).items()}
    used = [traced.parameters_of(stage.start, stage.stop) for stage in plan.stages]
    tied = {each for names in used for each in names if sum(each in others for others in used) > 1}
    prefix = f"{name}." if name else ""
    outside = {
        each.removeprefix(prefix)
        for slot in slots(run.module)
        if not all(each.startswith(prefix) for each in slot.names)
        for each in slot.names
    }
    for stage, names, ranks in zip(plan.stages, used, plan.ranks_of_stage):
        if stage.split == "channel" and 0 in ranks and names & outside:
            raise PlanError(
                f"{', '.join(sorted(names & outside))}: the step uses it outside {name or 'its layers'}, and "
                f"{', '.join(stage.devices)} share its stage by channels: share it by samples, or leave "
                f"{plan.cluster.devices[0].name} out of the group"
            )
    groups = make_groups(plan, traced, example, tied | outside)
    if groups.indices("batch"):

        def check() -> None:
            with run.precision.forward_context():
                check_samples(groups, traced, traced.bind(args, kwargs))

        run.exchange.lead(check)
    return groups


def _owners(module: Any, name: str, traced: Traced, groups: Groups) -> OwnerMap:
    plan = groups.plan
    holders = [
        (traced.parameters_of(stage.start, stage.stop) | traced.buffers_of(stage.start, stage.stop), ranks)
        for stage, ranks in zip(plan.stages, plan.ranks_of_stage)
    ]
    placements = {key: each for layout in groups.layouts.values() for key, each in layout.placements.items()}
    return OwnerMap.of_stages(module, name, holders, placements)


def _install(
    run: Run, traced: Traced, groups: Groups, owners: OwnerMap
) -> tuple[OwnPart, Callable[[Plan], MakeSchedule]]:
    """Builds this rank's stages and connects it with the others; also gives what makes their action lists."""
    plan = groups.plan
    routes = plan.routes(traced.graph)
    rank = run.exchange.rank
    memberships = {
        index: membership
        for index, ranks in enumerate(plan.ranks_of_stage)
        if len(ranks) > 1 and (membership := run.engine.join(ranks)) is not None
    }
    seed = run.exchange.broadcast(torch.initial_seed() % 2**31)
    own = build(groups, traced, run.module, owners, rank, run.engine.device, memberships, seed)
    stage_of_rank = {rank: index for index, ranks in enumerate(plan.ranks_of_stage) for rank in ranks}
    names_of = _shared_names(run.module, owners, plan)
    shared = [
        SharedGradients(
            stage_of_rank[rank],
            ranks,
            tuple(run.module.get_parameter(each) for each in names),
            counts=_counts(plan, rank),
        )
        for ranks, names in names_of.items()
        if rank in ranks
    ]
    reducing = sorted(
        {stage_of_rank[each] for ranks in names_of for each in ranks} | set(groups.indices("batch"))
    )

    def lists(plan: Plan) -> MakeSchedule:
        def make(n_micro_batches: int, training: bool) -> Schedule:
            reduce = reducing if training else ()
            return plan.action_lists(routes, n_micro_batches, reduce=reduce, training=training)

        return make

    run.engine.install(
        lists(plan),
        routes,
        groups.holdings,
        own.stages,
        context=run.precision.forward_context,
        shared=shared,
        owners=list(names_of),
        axes=groups.axes,
        reductions=own.reductions,
    )
    return own, lists


def _counts(plan: Plan, rank: int) -> bool:
    """Whether the gradients of a rank are its own, and not those of another member of its channel group."""
    return all(
        stage.split != "channel" or rank not in ranks[1:]
        for stage, ranks in zip(plan.stages, plan.ranks_of_stage)
    )


def _held_bytes(module: Any) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(each.numel() * each.element_size() for each in tensors if not each.is_meta)


def _shared_names(module: Any, owners: OwnerMap, plan: Plan) -> dict[tuple[int, ...], list[str]]:
    """Trainable parameters that ranks of several stages hold, by those ranks; tied ones under one name."""
    shared: dict[tuple[int, ...], list[str]] = {}
    for name, parameter in module.named_parameters():
        ranks = owners.of(name)
        if len(ranks) > 1 and ranks not in plan.ranks_of_stage and parameter.requires_grad:
            shared.setdefault(tuple(sorted(ranks)), []).append(name)
    return shared
