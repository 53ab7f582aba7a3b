"""What messages and collectives cost in software, as the planner counts it: against sums made by hand."""

from dataclasses import replace

import pytest

from lightning_hetpipe.cluster import Cluster, Link
from lightning_hetpipe.planner.candidates import Setting, draft
from lightning_hetpipe.planner.channel import channel_run, layout_of
from lightning_hetpipe.planner.groups import composite_name, make_group, reduced_cluster
from lightning_hetpipe.planner.plan_cost import PlanCost
from lightning_hetpipe.planner.search import make_plan
from lightning_hetpipe.planner.simulate import simulate
from lightning_hetpipe.plans import Pace, Plan, Stage
from lightning_hetpipe.profiles import Profile, Software
from lightning_hetpipe.stage.layout import SMALL_BYTES, n_operations
from tests.helpers.synthetic import make_cluster, make_graph, make_profile, make_sharing

FREE = Software()
DEAR = Software(send_s=2e-3, send_s_per_byte=3e-9, collective_s=5e-3, collective_s_per_byte=4e-9)
PACE = Pace(1e9, 1e-4, 1e8)


def problem(
    speeds: tuple[float, ...], software: Software = FREE, *, out: float = 1e5
) -> tuple[Profile, Cluster]:
    graph = make_graph(6, out=out)
    profile = make_profile(graph, speeds)
    cluster = make_cluster(speeds, latency_s=1e-4, bandwidth_bytes_per_s=1e8)
    return replace(profile, sharing=make_sharing(graph, work=1e7), software=software), cluster


def shared(stage: Stage, software: Software, n: int) -> float:
    profile, cluster = problem((0.2,) * n, software)
    run = channel_run(profile, cluster, stage, PACE, 4, 4)
    assert run.exchange_s < float(run.forward_s.sum() + run.backward_s.sum())
    return run.exchange_s


@pytest.mark.parametrize(("n", "times"), [(2, 1), (3, 2), (4, 3)])
def test_every_collective_adds_its_fixed_cost_once_per_operation_and_its_bytes(n: int, times: int) -> None:
    group = Stage(0, 4, tuple(f"d{i}" for i in range(n)), (1 / n,) * n, "channel", PACE)
    layout = layout_of(problem((0.2,) * n)[0], group, PACE, 4)
    spoken = [(kind, 4 * per_sample) for _, kind, per_sample in (*layout.forward, *layout.backward)]
    assert [kind for kind, _ in spoken] == ["all_reduce"] * 3
    extra = shared(group, DEAR, n) - shared(group, FREE, n)
    assert extra == pytest.approx(3 * times * 5e-3 + sum(size for _, size in spoken) * 4e-9)


def test_two_more_layers_with_one_more_collective_each_way_cost_that_much_more() -> None:
    run = {stop: Stage(0, stop, ("d0", "d1"), (0.5, 0.5), "channel", PACE) for stop in (2, 4)}
    extra = {stop: shared(run[stop], DEAR, 2) - shared(run[stop], FREE, 2) for stop in run}
    assert extra[4] - extra[2] == pytest.approx(2 * (5e-3 + 4e5 * 4e-9))


def test_operations_of_a_collective_follow_how_it_is_performed() -> None:
    large = SMALL_BYTES + 1
    assert [n_operations("all_reduce", large, n) for n in (2, 3, 4)] == [1, 2, 3]
    assert [n_operations("all_gather", large, n) for n in (2, 3)] == [2, 3]
    assert [n_operations("all_gather", SMALL_BYTES, n) for n in (2, 3)] == [1, 1]
    assert n_operations("reduce_scatter", large, 3) == 1


def two_stages(profile: Profile, cluster: Cluster, batch_size: int = 4) -> Plan:
    setting = Setting(profile, cluster, batch_size, ("gpipe",), 2.0)
    return draft(setting, [Stage(0, 3, ("d0",)), Stage(3, 6, ("d1",))], 4)


def test_a_step_is_the_sum_of_its_computations_sends_and_links() -> None:
    profile, cluster = problem((0.5, 0.5), DEAR)
    boundary, inputs = 4e5, 4 * 50
    computing = 2 * 4 * 3 * 0.01 / 0.5

    def way(size: float) -> float:
        return 2e-3 + size * 3e-9 + 1e-4 + size / 1e8

    expected = computing + way(inputs) + 2 * way(boundary)
    assert simulate(two_stages(profile, cluster), profile).step_s == pytest.approx(expected)


def test_a_rank_that_sends_computes_later() -> None:
    profile, cluster = problem((0.5, 0.5), Software(send_s=2e-3))
    spans = simulate(two_stages(profile, cluster, 8), profile).spans
    first, second = (next(s for s in spans if s.action == f"0F{m}" and s.rank == 1) for m in (0, 1))
    assert second.start_s - first.end_s == pytest.approx(2e-3)


def test_no_simulated_step_is_faster_than_the_bound_with_software_counted() -> None:
    for software in (FREE, DEAR):
        profile, cluster = problem((0.5, 0.5, 0.2), software)
        plan = make_plan(profile, cluster, 16, merge="never")
        cost = PlanCost(plan, profile)
        assert cost.lower_bound_s() <= simulate(plan, profile).step_s * (1 + 1e-9)


def test_a_measured_way_has_its_sender_in_it() -> None:
    profile, cluster = problem((0.5, 0.5))
    ends = [("d0", "d1"), ("d1", "d0")]
    links = tuple(DEAR.before(Link(1e-4, 1e8, *pair)) for pair in ends)
    measured = replace(profile, links=links, software=DEAR)
    declared = replace(profile, software=DEAR)
    steps = [simulate(two_stages(each, cluster), each).step_s for each in (measured, declared)]
    assert steps[0] == pytest.approx(steps[1])


def test_collectives_take_what_was_measured_on_a_real_link_and_what_is_declared_of_an_emulated_one() -> None:
    profile, cluster = problem((0.5, 0.5), DEAR)
    measured = replace(profile, links=(Link(7e-3, 1e6, "d0", "d1"),))
    assert measured.collective_link(cluster, "d0", "d1") == (measured.links[0], FREE)
    assert measured.collective_link(cluster, "d1", "d0") == (cluster.link("d1", "d0"), DEAR)
    emulated = replace(cluster, links=(replace(cluster.links[0], emulated=True),))
    assert measured.collective_link(emulated, "d0", "d1") == (emulated.link("d0", "d1"), DEAR)


def test_the_link_of_a_composite_counts_the_sender_once() -> None:
    profile, cluster = problem((0.5, 0.2, 0.2), DEAR)
    group = make_group(profile, cluster, ("d1", "d2"), "batch", 4)
    reduced = reduced_cluster(profile, cluster, [group], 4)
    way = profile.link(reduced, "d0", composite_name(group.devices))
    assert way.latency_s == pytest.approx(profile.link(cluster, "d0", "d1").latency_s)
    assert way.transfer_s(1e6) == pytest.approx(profile.link(cluster, "d0", "d1").transfer_s(0.5e6))


def test_the_sum_of_a_batch_groups_gradients_is_a_collective() -> None:
    profile, cluster = problem((0.2, 0.2, 0.5))
    group = make_group(profile, cluster, ("d0", "d1"), "batch", 4)
    setting = Setting(profile, cluster, 8, ("gpipe",), 2.0)
    plan = draft(setting, [replace(group, stop=4), Stage(4, 6, ("d2",))], 4)
    seconds = [PlanCost(plan, replace(profile, software=each)).reduction_s(0) for each in (FREE, DEAR)]
    assert seconds[0] == pytest.approx(2 * (1e-4 + 4 * 1000 / 2 / 1e8))
    assert seconds[1] - seconds[0] == pytest.approx(5e-3 + 4000 * 4e-9)


def test_devices_share_a_stage_where_collectives_are_cheap_and_not_where_they_are_dear() -> None:
    speeds = (0.6, 0.15, 0.15, 0.15, 0.15)
    profile, cluster = problem(speeds, out=100.0)
    plan = make_plan(profile, cluster, 32)
    assert any(stage.split != "none" for stage in plan.stages)
    dear = replace(profile, software=Software(collective_s=0.3))
    apart = make_plan(dear, cluster, 32)
    assert all(stage.split == "none" for stage in apart.stages)
    assert simulate(plan, dear).step_s > simulate(apart, dear).step_s
