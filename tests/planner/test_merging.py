import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.planner import merging
from lightning_hetpipe.planner.candidates import ONE_STAGE, Setting, make_candidates
from lightning_hetpipe.planner.channel import channel_run, layout_of
from lightning_hetpipe.planner.groups import balanced, make_group
from lightning_hetpipe.planner.merging import GAIN, break_even
from lightning_hetpipe.planner.plan_cost import PlanCost
from lightning_hetpipe.planner.search import make_plan
from lightning_hetpipe.planner.simulate import simulate
from lightning_hetpipe.planner.teams import teams_to_try
from lightning_hetpipe.plans import Pace, Plan, Stage
from lightning_hetpipe.schedule import SCHEDULES
from lightning_hetpipe.stage.layout import GroupCost
from tests.helpers.synthetic import make_cluster, make_graph, make_profile, make_sharing

WHIMPY = (0.6, 0.15, 0.15, 0.15, 0.15)


def problem(
    speeds, n_layers=6, *, out=100.0, bandwidth=1e8, memory=None, sharing=None, rough=False, **profile
):
    graph = make_graph(n_layers, out=out)
    rng = np.random.default_rng(1)
    layer_s = rng.uniform(0.005, 0.015, n_layers) if rough else 0.01
    made = make_profile(graph, speeds, layer_s=layer_s, **profile)
    made = replace(made, sharing=make_sharing(graph, work=1e7, **(sharing or {})))
    cluster = make_cluster(speeds, latency_s=1e-4, bandwidth_bytes_per_s=bandwidth, memory_bytes=memory)
    return made, cluster


def groups(plan: Plan) -> list[Stage]:
    return [stage for stage in plan.stages if stage.split != "none"]


def rows(plan: Plan) -> dict[str, float]:
    return {row.name: row.step_s for row in plan.alternatives}


def test_weak_devices_on_fast_links_share_a_stage_and_the_reason_says_what_that_gains() -> None:
    profile, cluster = problem(WHIMPY)
    apart = make_plan(profile, cluster, 32, merge="never")
    plan = make_plan(profile, cluster, 32)
    assert not groups(apart)
    assert groups(plan)
    assert plan.prediction.step_s < (1 - GAIN) * apart.prediction.step_s
    assert "gains" in plan.reason
    assert "efficiency" in plan.reason
    assert rows(plan)["layers only"] == pytest.approx(apart.prediction.step_s, rel=0.01)
    assert plan.prediction.step_s == simulate(plan, profile).step_s
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("size", [4, 8])
def test_a_plan_with_groups_keeps_the_micro_batch_that_was_asked_for(size: int) -> None:
    profile, cluster = problem(WHIMPY)
    plan = make_plan(profile, cluster, 32, micro_batch=size)
    assert groups(plan)
    assert plan.micro_batch == size


def test_devices_stay_apart_where_their_link_is_slow() -> None:
    profile, cluster = problem((0.6, 0.2, 0.2), out=1e6, bandwidth=2e6, sharing={"coupled": (0, 3, 5)})
    plan = make_plan(profile, cluster, 16)
    assert not groups(plan)
    assert "so layers only" in plan.reason
    assert "groups must save" not in plan.reason  # they would lose
    assert any(name.startswith("merged ") for name in rows(plan))
    assert plan.stages == make_plan(profile, cluster, 16, merge="never").stages


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("GAIN", 0.95, ": groups must save 95% of the step, so layers only"),
        ("_TOO_LARGE", 10, "groups were not tried for 6 layers on 5 devices: name them"),
    ],
    ids=["too small a gain", "too long a search"],
)
def test_groups_that_are_left_out_are_said_to_be(monkeypatch, limit, value, said) -> None:
    monkeypatch.setattr(merging, limit, value)
    profile, cluster = problem(WHIMPY)
    plan = make_plan(profile, cluster, 32, baselines=False)
    assert not groups(plan)
    assert said in plan.reason


def test_without_measured_shares_nothing_is_merged() -> None:
    profile, cluster = problem(WHIMPY)
    profile = replace(profile, sharing=None)
    assert make_plan(profile, cluster, 32) == make_plan(profile, cluster, 32, merge="never")


def test_samples_are_not_divided_where_a_layer_normalises_by_them_unless_that_is_asked_for() -> None:
    sharing = {"most": 1, "coupled": tuple(range(6))}  # nothing has channels
    profile, cluster = problem((0.5, 0.5), sharing=sharing)
    assert not groups(make_plan(profile, cluster, 32))
    forced = make_plan(profile, cluster, 32, merge=[["d0", "d1"]])
    assert [stage.split for stage in groups(forced)] == ["batch"]


@pytest.mark.parametrize("bandwidth", [2e6, 1e4])
def test_a_named_group_is_taken_even_where_it_costs_and_its_price_is_told(bandwidth) -> None:
    profile, cluster = problem((0.6, 0.2, 0.2), out=1e5, bandwidth=bandwidth)
    plan = make_plan(profile, cluster, 16, merge=[["d1", "d2"]])
    (group,) = groups(plan)
    assert set(group.devices) == {"d1", "d2"}
    assert "exchanges activations for" in plan.reason or "sums gradients for" in plan.reason


def test_a_group_that_reads_the_data_holds_the_last_stage_and_lists_the_reader_first() -> None:
    profile, cluster = problem((0.2, 0.6, 0.2))
    plan = make_plan(profile, cluster, 32, merge=[["d0", "d2"]], pinned_last="d2")
    assert plan.stages[-1].devices == ("d2", "d0")
    assert plan.cluster.devices[0].name == "d2"


@pytest.mark.parametrize(
    ("merge", "problem_of", "message"),
    [
        ("often", {}, "merge='often' is unknown"),
        (None, {}, "merge=None is unknown"),
        ([1], {}, r"merge=\[1\] is unknown"),
        ([], {}, r"merge=\[\] is unknown"),
        (iter([["d1", "d2"]]), {}, "merge=<list_iterator .* is unknown"),
        ([["d1"]], {}, r"\['d1'\] is no group"),
        ([["d1", "z"]], {}, "device 'z' is not in cluster"),
        ([["d1", "d2"], ["d2", "d3"]], {}, "names 'd2' twice"),
        (
            [["d1", "d2"]],
            {"sharing": {"most": 1, "rowless": ("x", "v0", "v1", "v2", "v3", "v4", "v5")}},
            "no operation",
        ),
    ],
)
def test_a_group_that_cannot_work_is_refused_with_the_reason(merge, problem_of, message) -> None:
    profile, cluster = problem(WHIMPY, **problem_of)
    with pytest.raises(ValueError, match=message):
        make_plan(profile, cluster, 32, merge=merge)


@pytest.mark.parametrize(("n", "batch_size"), [(3, 8), (5, 32), (9, 32)])
def test_a_group_that_needs_larger_micro_batches_than_the_search_begins_with_is_found(n, batch_size) -> None:
    profile, cluster = problem((0.1,) * n, sharing={"most": 1})
    plan = make_plan(profile, cluster, batch_size, merge=[[f"d{i}" for i in range(n)]])
    assert [(stage.split, len(stage.devices)) for stage in groups(plan)] == [("batch", n)]
    assert plan.micro_batch >= n


def test_groups_under_the_interleaved_schedule_are_refused_in_words() -> None:
    profile, cluster = problem((0.6, 0.2, 0.2))
    with pytest.raises(PlanError, match="and the interleaved schedule were both asked for"):
        make_plan(profile, cluster, 16, schedule="interleaved", merge=[["d1", "d2"]])


def test_the_largest_batch_is_not_looked_for_with_an_unknown_merge() -> None:
    profile, cluster = problem((0.6, 0.2, 0.2))
    with pytest.raises(PlanError, match="merge='often' is unknown"):
        make_plan(profile, cluster, "max", merge="often")


def test_more_members_than_a_micro_batch_has_samples_is_refused_in_words() -> None:
    profile, cluster = problem((0.3, 0.3, 0.3), sharing={"most": 1})
    with pytest.raises(PlanError, match="a micro-batch of 2 has no sample for some of 3 devices"):
        make_plan(profile, cluster, 8, micro_batch=2, merge=[["d0", "d1", "d2"]])


def test_cuts_by_hand_may_name_a_group() -> None:
    profile, cluster = problem((0.6, 0.2, 0.2))
    plan = make_plan(
        profile, cluster, 16, merge=[["d1", "d2"]], cuts=["layer2"], device_order=["d1+d2", "d0"]
    )
    assert [(stage.start, stage.stop, stage.devices) for stage in plan.stages] == [
        (0, 2, ("d1", "d2")),
        (2, 6, ("d0",)),
    ]


def test_a_model_that_fits_no_devices_apart_fits_a_group() -> None:
    graph = make_graph(2, parameter_bytes=[1000, 100_000], saved=1.0, out=1.0)
    profile = replace(make_profile(graph, (0.5, 0.5)), sharing=make_sharing(graph, work=1e7))
    cluster = make_cluster((0.5, 0.5), memory_bytes=[300_000, 300_000])
    with pytest.raises(PlanError, match="no plan for a batch"):
        make_plan(profile, cluster, 4, merge="never")
    plan = make_plan(profile, cluster, 4)
    assert [stage.split for stage in groups(plan)] == ["channel"]
    assert "only groups fit" in plan.reason
    assert max(plan.prediction.memory_bytes) <= 300_000


def every_grouping(names: tuple[str, ...]):
    """All ways to put some of the devices into disjoint units."""
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    yield from every_grouping(rest)  # idle
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = tuple(name for name in rest if name not in others)
            for units in every_grouping(left):
                yield ((first, *others), *units)


def best_of_all(profile, cluster, batch_size: int) -> float:
    """The fastest simulated step over all groups, splits, orders, cuts and micro-batch sizes."""
    setting = Setting(profile, cluster, batch_size, ONE_STAGE, 2.0)
    n, best = len(profile.graph), np.inf
    names = tuple(device.name for device in cluster.devices)
    for size in setting.sizes:
        for units in every_grouping(names):
            kinds = [("channel", "batch") if len(unit) > 1 else ("none",) for unit in units]
            for splits in itertools.product(*kinds) if units else ():
                held = [
                    make_group(profile, cluster, unit, split, size) if len(unit) > 1 else Stage(0, n, unit)
                    for unit, split in zip(units, splits)
                ]
                for order in itertools.permutations(held):
                    for cuts in itertools.combinations(range(1, n), len(order) - 1):
                        edges = itertools.pairwise((0, *cuts, n))
                        stages = [replace(g, start=a, stop=b) for g, (a, b) in zip(order, edges)]
                        for candidate in make_candidates(setting, stages, size):
                            best = min(best, candidate.step_s)
    return best


@pytest.mark.parametrize(
    ("speeds", "options"),
    [
        ((0.6, 0.2, 0.2), {}),
        ((0.6, 0.2, 0.2), {"out": 2e4, "alpha_s": 0.004}),
        ((0.5, 0.5), {"out": 1e5}),
        ((0.4, 0.3, 0.1), {"out": 2e4, "sharing": {"coupled": (2,)}}),
    ],
)
def test_the_plan_is_as_fast_as_the_best_of_all_groupings(speeds, options) -> None:
    profile, cluster = problem(speeds, 4, rough=True, **options)
    plan = make_plan(profile, cluster, 8, baselines=False)
    optimum = best_of_all(profile, cluster, 8)
    shared = any(stage.split != "none" for stage in plan.stages)
    left = 1.0 if shared else 1 - GAIN  # groups that save less are left
    assert plan.prediction.step_s <= optimum / left * 1.02
    assert plan.schedule == "interleaved" or plan.prediction.step_s >= optimum * (1 - 1e-9)


def test_shares_are_balanced_by_measured_times() -> None:
    profile, cluster = problem((0.4, 0.2))
    table = tuple((0.7,) for _ in range(6))  # half of the channels takes 70 % of the seconds
    slow = replace(profile.devices[1], fractions=(0.5,), forward_factors=table, backward_factors=table)
    fast = replace(profile.devices[0], fractions=(0.5,), forward_factors=table, backward_factors=table)
    profile = replace(profile, devices=(fast, slow))
    group = make_group(profile, cluster, ("d0", "d1"), "channel", 8)
    taken = [
        sum(float(t @ f) for t, f in zip(device.layer_seconds(8), device.share_factors(share)))
        for device, share in zip((fast, slow), group.shares)
    ]
    assert sum(group.shares) == pytest.approx(1)
    assert taken[0] == pytest.approx(taken[1], rel=0.02)
    assert balanced(profile, replace(group, split="batch"), 9).shares == pytest.approx((2 / 3, 1 / 3))


def test_a_channel_stage_costs_its_slowest_shares_and_its_collectives() -> None:
    profile, cluster = problem((0.2, 0.2, 0.6), out=1e5)
    pace = Pace(1e9, 1e-4, 1e8)
    group = Stage(0, 4, ("d0", "d1"), (0.75, 0.25), "channel", pace)
    layout = layout_of(profile, group, pace, 4)
    assert layout.parts.tolist() == [1.0] * 4  # two pairs of column and row
    spoken = [*layout.forward, *layout.backward]
    assert sorted(kind for _, kind, _ in spoken) == ["all_reduce"] * 3  # x has no gradient
    run = channel_run(profile, cluster, group, pace, 4, 4)
    cost = GroupCost(group.shares, latency_s=1e-4, bandwidth_bytes_per_s=1e8)
    exchange_s = sum(cost.collective_s(kind, 4 * size) for _, kind, size in spoken)
    compute_s = 4 * 4 * 0.01 / 0.2 * 0.75
    assert run.exchange_s == pytest.approx(exchange_s)
    assert run.forward_s.sum() + run.backward_s.sum() == pytest.approx(compute_s + exchange_s)


def test_members_of_a_channel_group_each_need_all_samples_and_send_their_part() -> None:
    profile, cluster = problem((0.2, 0.2, 0.6), out=1e5)
    group = make_group(profile, cluster, ("d0", "d1"), "channel", 4)
    setting = Setting(profile, cluster, 8, ("gpipe",), 2.0)
    first = next(make_candidates(setting, [replace(group, stop=3), Stage(3, 6, ("d2",))], 4))
    last = next(make_candidates(setting, [Stage(0, 3, ("d2",)), replace(group, start=3)], 4))
    lists = {each: each.plan.action_lists(each.plan.routes(profile.graph), 2) for each in (first, last)}

    def sent(candidate, sender, receiver, text):
        cost = PlanCost(candidate.plan, profile)
        action = next(a for a in lists[candidate].actions[sender] if str(a) == text)
        return cost.transfer(action, sender, receiver)[1]

    whole_s = 4 * 1e5 / 1e8
    assert sent(first, 1, 0, "0SEND_F0") == pytest.approx(whole_s / 2)
    assert sent(first, 0, 1, "1SEND_B0") == pytest.approx(whole_s)
    assert sent(last, 2, 0, "0SEND_F0") == pytest.approx(whole_s)


def test_merging_pays_from_the_efficiency_at_which_both_formulas_are_equal() -> None:
    n, others, m, stages, transfer = 3, 4.0, 8, 5, 0.05
    needed = break_even(n, others, m, stages, transfer)
    keep = (m + stages - 1) / (others + n) + 2 * transfer * (stages - 1)
    merge = (m + stages - n) / (others + n * needed) + 2 * transfer * (stages - n)
    assert merge == pytest.approx(keep)
    assert break_even(n, others, 64, stages, transfer) > needed


def test_teams_are_disjoint_and_of_at_least_two() -> None:
    profile, cluster = problem((0.5, 0.25, 0.25, 0.1, 0.1, 0.1))
    tried = list(teams_to_try(Setting(profile, cluster, 8, SCHEDULES, 2.0)))
    assert (("d3", "d4", "d5"),) in tried
    assert (("d3", "d4", "d5"), ("d1", "d2")) in tried
    for teams in tried:
        names = [name for team in teams for name in team]
        assert len(names) == len(set(names))
        assert min(map(len, teams)) > 1
