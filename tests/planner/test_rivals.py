from dataclasses import replace

import numpy as np
import pytest

from lightning_hetpipe.planner.microbatch import offered
from lightning_hetpipe.planner.rivals import rivals
from lightning_hetpipe.planner.search import make_plan
from lightning_hetpipe.planner.simulate import simulate
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.profiles import Profile
from tests.helpers.synthetic import make_cluster, make_graph, make_profile

SPEEDS = (0.6, 0.3, 0.3)


def planned(
    memory_bytes: int | None = None, batch_size: int = 24, n_layers: int = 9, **options
) -> tuple[Profile, Plan]:
    graph = make_graph(n_layers, out=2000.0, parameter_bytes=1000, saved=20_000.0)
    times = np.random.default_rng(3).uniform(0.002, 0.006, n_layers)
    profile = make_profile(graph, SPEEDS, layer_s=times, alpha_s=0.01)
    limits = None if memory_bytes is None else [memory_bytes] * len(SPEEDS)
    cluster = make_cluster(SPEEDS, bandwidth_bytes_per_s=1e8, latency_s=1e-4, memory_bytes=limits)
    return profile, make_plan(profile, cluster, batch_size, baselines=False, **options)


def order(plan: Plan) -> tuple[object, ...]:
    return plan.micro_batch, plan.schedule, plan.in_flight


def test_rivals_keep_the_stages_and_differ_in_the_order_of_work_or_the_next_sizes() -> None:
    profile, plan = planned()
    sizes = offered(24)
    place = sizes.index(plan.micro_batch)
    found = rivals(profile, plan, sizes=True)
    assert 3 <= len(found) <= 5
    assert {each.stages for each in found} == {plan.stages}
    assert {each.cluster for each in found} == {plan.cluster}
    assert len({order(each) for each in (plan, *found)}) == len(found) + 1
    assert {each.micro_batch for each in found} == {sizes[place + step] for step in (-1, 0, 1)}
    for each in found:
        assert each.prediction.step_s == simulate(each, profile).step_s


def test_rivals_of_a_prime_batch_are_ragged_sizes() -> None:
    profile, plan = planned(batch_size=23)
    sizes = {each.micro_batch for each in rivals(profile, plan, sizes=True)} - {plan.micro_batch}
    assert sizes
    assert all(23 % size and size in offered(23) for size in sizes - {1, 23})


def test_without_sizes_only_the_order_of_work_differs() -> None:
    profile, plan = planned()
    found = rivals(profile, plan, sizes=False)
    assert {each.micro_batch for each in found} == {plan.micro_batch}
    assert {each.schedule for each in found} == {"gpipe", "1f1b"}


def test_a_schedule_that_was_asked_for_is_kept() -> None:
    profile, plan = planned(schedule="1f1b")
    found = rivals(profile, plan, sizes=True, schedule="1f1b")
    assert {each.schedule for each in found} == {"1f1b"}
    assert any(
        each.micro_batch == plan.micro_batch and sum(each.in_flight) > sum(plan.in_flight) for each in found
    )


def test_a_stage_alone_has_no_other_order_of_work() -> None:
    profile, _ = planned()
    cluster = make_cluster(SPEEDS[:1])
    plan = make_plan(profile, cluster, 24, baselines=False)
    assert rivals(profile, plan, sizes=False) == ()


@pytest.mark.parametrize("factor", [1.0, 1.1, 1.5, 4.0])
def test_no_rival_takes_more_than_the_plan_or_four_fifths_of_the_memory(factor: float) -> None:
    profile, free = planned()
    limit = round(factor * max(free.prediction.memory_bytes))
    profile, plan = planned(limit)
    found = rivals(profile, plan, sizes=True)
    for each in found:
        for ours, theirs in zip(plan.prediction.memory_bytes, each.prediction.memory_bytes):
            assert theirs <= max(ours, 0.8 * limit)
    free_devices = tuple(replace(device, memory_bytes=None) for device in plan.cluster.devices)
    roomy = rivals(profile, replace(plan, cluster=replace(plan.cluster, devices=free_devices)), sizes=True)
    left_out = {order(each) for each in roomy} - {order(each) for each in found}
    assert left_out if factor <= 1.1 else factor < 4.0 or not left_out


def test_an_interleaved_plan_is_tried_in_other_sizes_only() -> None:
    profile, plan = planned(n_layers=24, schedule="interleaved")
    assert plan.schedule == "interleaved"
    found = rivals(profile, plan, sizes=True, schedule="interleaved")
    assert {each.schedule for each in found} == {"interleaved"}
    assert plan.micro_batch not in {each.micro_batch for each in found}
    assert rivals(profile, plan, sizes=False) == ()
