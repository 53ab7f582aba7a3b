"""Whether slow devices should be kept apart, share a stage, or be left out.

    keep   P = P_f + n stages     (M + P - 1)/(R + n)    + 2c(P - 1)
    merge  n of them as one       (M + P - n)/(R + n e)  + 2c(P - n)
    drop   without them           (M + P - n - 1)/R      + 2c(P - n - 1)

in units of one micro-batch of the whole model on one of the ``n`` slow devices; the others are ``R`` times as
fast together, a transfer takes ``c``, and the group reaches the fraction ``e`` of what its members could.
So merging pays from ``e*`` on (`break_even`): the more, the fewer micro-batches fill the pipeline. The
formulas say why; which groups are taken is decided by placing layers on them and simulating the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Protocol

import numpy as np

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.planner.baselines import Baseline
from lightning_hetpipe.planner.candidates import Candidate, Setting, make_candidates
from lightning_hetpipe.planner.groups import (
    balanced,
    composite_name,
    composite_profile,
    make_group,
    reduced_cluster,
    refusal,
)
from lightning_hetpipe.planner.microbatch import neighbours
from lightning_hetpipe.planner.plan_cost import PlanCost
from lightning_hetpipe.planner.teams import Teams, teams_to_try
from lightning_hetpipe.plans import Split, Stage

GAIN = 0.1  # of the step: what groups must save; steps with groups were predicted up to 13 % too short
SPLITS: tuple[Split, ...] = ("channel", "batch")
_ROWS = 4  # samples per member at which a split by samples is first looked at
_PARTITIONS = 10  # that are tried, each by channels and by samples
_FINALISTS = 2  # that are searched over all micro-batch sizes
_LARGE = 1500  # layers times devices from which on less is tried
_PARTITIONS_LARGE = 2
_TOO_LARGE = 4000  # from which on groups have to be named: trying them would take minutes


class Look(Protocol):
    """Candidates of a setting at some micro-batch sizes, or over all that are worth it."""

    def __call__(
        self, setting: Setting, sizes: tuple[int, ...] | None, order: tuple[str, ...] | None = None
    ) -> list[Candidate]:
        """With ``order``, exactly these devices hold the stages."""


@dataclass
class Merges:
    """What came of merging: candidates, rows for the comparison, and the verdict in words.

    Attributes:
        exact: Whether the groups compute what one device would.
    """

    found: list[Candidate] = field(default_factory=list)
    rows: list[Baseline] = field(default_factory=list)
    verdict: str = ""
    exact: bool = True


def break_even(n: int, others: float, n_micro_batches: int, n_stages: int, transfer: float) -> float:
    """``e*``: the efficiency from which ``n`` slow devices do better as one stage than as ``n``.

    Args:
        n: Devices to merge.
        others: ``R``: speed of the other devices, in that of one slow device.
        n_micro_batches: ``M``.
        n_stages: ``P``, unmerged.
        transfer: ``c``: seconds of a transfer over those of a micro-batch of the model on a slow device.

    >>> round(break_even(2, 6.1, 4, 5, 0.0), 2), round(break_even(2, 6.1, 32, 5, 0.0), 2)
    (0.49, 0.89)
    """
    keep = (n_micro_batches + n_stages - 1) / (others + n) + 2 * transfer * (n - 1)
    return ((n_micro_batches + n_stages - n) / keep - others) / n


def merged(
    setting: Setting, teams: Teams, splits: Sequence[Split], micro_batch: int, first: str | None
) -> Setting:
    """The setting with each team as one device.

    Args:
        setting: Of single devices.
        teams: Device names; no device is in two of them.
        splits: How each team shares its stage.
        micro_batch: The size for which shares and layouts are made.
        first: A device that comes first in its group: the one that reads the data.
    """
    profile, cluster = setting.profile, setting.cluster
    groups = tuple(
        make_group(profile, cluster, sorted(team, key=lambda name: name != first), split, micro_batch)
        for team, split in zip(teams, splits)
    )
    composites = tuple(composite_profile(profile, cluster, group, micro_batch) for group in groups)
    return replace(
        setting,
        profile=replace(profile, devices=(*profile.devices, *composites)),
        cluster=reduced_cluster(profile, cluster, groups, micro_batch),
        groups=groups,
        members=setting,
    )


def search_merges(
    setting: Setting,
    best: Candidate | None,
    look: Look,
    *,
    first: str | None,
    sizes: Sequence[int],
    baselines: bool,
) -> Merges:
    """Tries groups of slow devices, and says whether they pay.

    Args:
        setting: Of single devices.
        best: The fastest plan without groups; None where none fits.
        look: Places layers in a setting.
        first: The device that reads the data, where that is settled.
        sizes: Micro-batch sizes that may be taken.
        baselines: False leaves out what is for the comparison only.

    Returns:
        Candidates with groups only, and only if they are worth it.
    """
    sharing = setting.profile.sharing
    if sharing is None or len(setting.cluster.devices) < 2:
        return Merges()
    size = best.plan.micro_batch if best else neighbours(sizes, max(1, setting.batch_size // 8), 1)[0]
    n_layers, n_devices = len(setting.profile.graph), len(setting.cluster.devices)
    if best is not None and n_layers * n_devices > _TOO_LARGE:
        return Merges(
            verdict=f"groups were not tried for {n_layers} layers on {n_devices} devices: name them"
        )
    large = n_layers * n_devices > _LARGE
    results: list[tuple[Candidate, Setting]] = []
    for teams in islice(teams_to_try(setting), _PARTITIONS_LARGE if large else _PARTITIONS):
        for split in SPLITS:
            fewest = 1 if split == "channel" else _ROWS * max(map(len, teams))
            near = neighbours(sizes, max(size, fewest), 1 if best else 3)
            tried = _merged_if_possible(setting, teams, split, near[0], first)
            if tried is not None:
                candidates = _with_groups(look(tried, near))
                if candidates:
                    results.append((min(candidates, key=_order), tried))
    results.sort(key=lambda result: result[0].order)
    finals = [
        (candidate, tried)
        for _, tried in results[: 0 if large else _FINALISTS]
        if (found := _with_groups(look(tried, None)))
        and (candidate := _rebalanced(setting, min(found, key=_order)))
    ]
    results = sorted([*finals, *results], key=lambda result: result[0].order)
    if not results:
        return Merges()
    winner = results[0][0]
    pays = best is None or winner.step_s < (1 - GAIN) * best.step_s
    made = Merges([winner] if pays else [], [], _verdict(setting, best, winner, pays=pays))
    made.rows = _rows(setting, best, [candidate for candidate, _ in results], pays=pays)
    if baselines and best is not None and pays:
        made.rows += _without(setting, winner, look, size)
    return made


def forced_merges(
    setting: Setting, teams: Teams, look: Look, *, first: str | None, sizes: Sequence[int]
) -> Merges:
    """Plans in which each of these teams shares a stage, by channels or by samples as is faster.

    What changes the training (`Setting.exact`) is left for when nothing else is possible.

    Raises:
        PlanError: A team cannot share any stage, with the reason for each way of sharing.
    """
    for name in (name for team in teams for name in team):
        setting.cluster.device(name)
    found: list[Candidate] = []
    for exact in (True, False):
        setting = replace(setting, exact=exact)
        for splits in product(SPLITS, repeat=len(teams)):
            if any(_reason(setting, team, split, max(sizes)) for team, split in zip(teams, splits)):
                continue
            fewest = _ROWS * max((len(t) for t, split in zip(teams, splits) if split == "batch"), default=0)
            size = neighbours(sizes, max(1, setting.batch_size // 8, fewest), 1)[0]
            tried = merged(setting, teams, splits, size, first)
            found += _with_all(teams, look, tried, first)
        if found:
            break
    if not found:
        reasons = "; ".join(
            f"{composite_name(team)} by {'channels' if split == 'channel' else 'samples'}: "
            f"{_reason(setting, team, split, max(sizes)) or 'no stage that it could hold fits'}"
            for team in teams
            for split in SPLITS
        )
        raise PlanError(f"merge={[list(team) for team in teams]} was asked for, but {reasons}. Merge others.")
    winner = _rebalanced(setting, min(found, key=_order))
    verdict = _price(setting, winner)
    if not setting.exact:
        verdict += ", and normalises by each device's own samples"
    return Merges([winner], [], verdict, setting.exact)


def _with_all(teams: Teams, look: Look, tried: Setting, first: str | None) -> list[Candidate]:
    """Candidates that have every team; where none would, the teams are put into the best order."""
    free, n = look(tried, None), len(teams)
    found = [each for each in free if len(_groups_of(each)) == n]
    if found or not free:
        return found
    names = [composite_name(group.devices) for group in tried.groups]
    stages = min(free, key=_order).plan.stages
    others = [stage.devices[0] for stage in stages if stage.split == "none"]
    last = tried.holder(first)
    for place in range(len(others) + 1):
        order = (*others[:place], *names, *others[place:])
        if last in (None, order[-1]) and len(order) <= len(tried.profile.graph):
            found += [each for each in look(tried, None, order) if len(_groups_of(each)) == n]
    return found


def _merged_if_possible(
    setting: Setting, teams: Teams, split: Split, size: int, first: str | None
) -> Setting | None:
    if any(_reason(setting, team, split, size) for team in teams):
        return None
    return merged(setting, teams, (split,) * len(teams), size, first)


def _reason(setting: Setting, team: Sequence[str], split: Split, size: int) -> str:
    """Why a team can share no stage at all; whether a batch split is exact depends on the stage."""
    whole = Stage(0, len(setting.profile.graph), tuple(team), (1 / len(team),) * len(team), split)
    return refusal(setting.profile, setting.cluster, whole, size, exact=False)


def _order(candidate: Candidate) -> tuple[float, int, int]:
    return candidate.order


def _groups_of(candidate: Candidate) -> list[Stage]:
    return [stage for stage in candidate.plan.stages if stage.split != "none"]


def _with_groups(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if _groups_of(candidate)]


def _rebalanced(setting: Setting, start: Candidate) -> Candidate:
    """The same stages with shares balanced over their own layers, if that is faster."""
    size = start.plan.micro_batch
    stages = [
        stage if stage.split == "none" else balanced(setting.profile, stage, size)
        for stage in start.plan.stages
    ]
    narrowed = replace(setting, schedules=(start.plan.schedule,))
    return min([start, *make_candidates(narrowed, stages, size)], key=_order)


def _rows(
    setting: Setting, best: Candidate | None, results: Sequence[Candidate], *, pays: bool
) -> list[Baseline]:
    rows = [_row(setting, "layers only", best)] if best is not None and pays else []
    for split in SPLITS:
        of_split = [each for each in results if {stage.split for stage in _groups_of(each)} == {split}]
        if of_split:
            fastest = min(of_split, key=_order)
            by = "channels" if split == "channel" else "samples"
            rows.append(_row(setting, f"merged {_named(fastest)} by {by}", fastest))
    return rows


def _row(setting: Setting, title: str, candidate: Candidate) -> Baseline:
    cost = PlanCost(candidate.plan, setting.profile, optimizer_copies=setting.optimizer_copies)
    plan = candidate.plan
    note = f"{len(plan.stages)} stages, micro-batch {plan.micro_batch}, {plan.schedule}"
    return Baseline(title, candidate.step_s, max(cost.memory_bytes()), note, candidate)


def _without(setting: Setting, winner: Candidate, look: Look, size: int) -> list[Baseline]:
    """What the devices that were merged are worth: the best plan of the others."""
    members = {name for group in _groups_of(winner) for name in group.devices}
    others = tuple(device.name for device in setting.cluster.devices if device.name not in members)
    if not others:
        return []
    rest = replace(setting, cluster=setting.cluster.subset(others))
    found = look(rest, tuple({size, winner.plan.micro_batch}))
    return [_row(rest, f"without {_named(winner)}", min(found, key=_order))] if found else []


def _named(candidate: Candidate) -> str:
    return ", ".join(composite_name(group.devices) for group in _groups_of(candidate))


def _verdict(setting: Setting, best: Candidate | None, winner: Candidate, *, pays: bool) -> str:
    """Keep, merge or drop, and the rule behind it."""
    if best is None:
        return f"only groups fit: {_named(winner)} {_price(setting, winner)}"
    gain = best.step_s / winner.step_s - 1
    group = max(_groups_of(winner), key=lambda group: len(group.devices))
    reached, needed = _efficiency(setting, best, winner, group)
    by = "channels" if group.split == "channel" else "samples"
    what = f"merging {_named(winner)} by {by}"
    slices = len(best.plan.slices(best.plan.batch_size))
    rule = f"efficiency {reached:.2f}"
    if len(best.plan.stages) > 1:
        rule += f", pays from {needed:.2f} on at {slices} micro-batches"
    used = {name for stage in best.plan.stages for name in stage.devices}
    otherwise = "keeping them apart" if set(group.devices) <= used else "leaving some of them out"
    if pays:
        return f"{what} gains {gain:.1%} over {otherwise} ({rule})"
    too_little = f": groups must save {GAIN:.0%} of the step" if gain > 0 else ""
    return f"{what} would change {gain:+.1%} ({rule}){too_little}, so layers only"


def _efficiency(setting: Setting, best: Candidate, winner: Candidate, group: Stage) -> tuple[float, float]:
    """What the group reaches of its members' speeds, and from where on merging pays."""
    plan = winner.plan
    cost = PlanCost(plan, setting.profile)
    together = sum(cost.stage_seconds(plan.stages.index(group), plan.micro_batch))

    def speed(name: str, run: slice, size: int) -> float:
        tables = setting.profile.device(name).layer_seconds(size)
        return 1 / max(sum(float(table[run].sum()) for table in tables), 1e-12)

    run, n = slice(group.start, group.stop), len(group.devices)
    reached = 1 / (together * sum(speed(name, run, plan.micro_batch) for name in group.devices))
    whole, size = slice(0, len(setting.profile.graph)), best.plan.micro_batch
    slow = sum(speed(name, whole, size) for name in group.devices) / n
    kept = [name for stage in best.plan.stages for name in stage.devices if name not in group.devices]
    others = sum(speed(name, whole, size) for name in kept) / slow
    hops = [sum(hop) / 2 for hop in PlanCost(best.plan, setting.profile).hops(size)]
    transfer = float(np.mean(hops)) * slow if hops else 0.0
    slices = len(best.plan.slices(best.plan.batch_size))
    return reached, break_even(n, others, slices, len(kept) + n, transfer)


def _price(setting: Setting, winner: Candidate) -> str:
    """What the exchange within each group takes."""
    plan = winner.plan
    cost = PlanCost(plan, setting.profile)
    parts = []
    for index, stage in enumerate(plan.stages):
        name = composite_name(stage.devices)
        if stage.split == "channel":
            seconds = sum(cost.stage_seconds(index, plan.micro_batch))
            exchange = cost.exchange_s(index) / max(seconds, 1e-12)
            parts.append(f"{name} by channels exchanges activations for {exchange:.0%} of its time")
        elif stage.split == "batch":
            step = cost.reduction_s(index) / winner.step_s
            parts.append(f"{name} by samples sums gradients for {step:.0%} of the step's length")
    return "; ".join(parts)
