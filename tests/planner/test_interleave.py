import dataclasses

import numpy as np
import pytest

from lightning_hetpipe.errors import InfeasibleError, PlanError
from lightning_hetpipe.planner.plan_cost import PlanCost
from lightning_hetpipe.planner.search import make_plan
from lightning_hetpipe.planner.simulate import simulate
from lightning_hetpipe.plans import Plan
from tests.helpers.synthetic import make_cluster, make_graph, make_profile


def problem(speeds=(0.5, 0.5, 0.5), n_layers=24, *, bandwidth=1e9, memory=None):
    """Equal devices; with few micro-batches, filling the pipeline takes long."""
    times = np.random.default_rng(1).uniform(0.002, 0.004, n_layers)
    graph = make_graph(n_layers, out=2000.0, parameter_bytes=1000, saved=2000.0)
    profile = make_profile(graph, speeds, layer_s=times, alpha_s=0.004)
    return profile, make_cluster(speeds, bandwidth_bytes_per_s=bandwidth, memory_bytes=memory)


def test_rounds_are_taken_where_filling_the_pipeline_takes_long() -> None:
    plan = make_plan(*problem(), 8, micro_batch=2)
    once = make_plan(*problem(), 8, micro_batch=2, schedule="1f1b")
    assert plan.schedule == "interleaved"
    assert len(plan.stages) > len({stage.devices for stage in plan.stages}) == 3
    assert plan.prediction.step_s < 0.99 * once.prediction.step_s
    assert plan.prediction.lower_bound_s <= plan.prediction.step_s
    assert Plan.from_json(plan.to_json()) == plan


def test_rounds_are_left_where_their_messages_cost_more() -> None:
    assert make_plan(*problem(bandwidth=1e5), 8, micro_batch=2).schedule != "interleaved"


def test_the_schedule_can_be_forced_and_its_prediction_is_the_simulated_step() -> None:
    profile, cluster = problem(bandwidth=1e5)
    plan = make_plan(profile, cluster, 8, schedule="interleaved", pinned_last="d2", device_order=("d0", "d2"))
    assert plan.schedule == "interleaved"
    assert plan.cluster.devices[0].name == plan.stages[-1].devices[0] == "d2"
    assert plan.prediction.step_s == simulate(plan, profile).step_s
    assert "stages " in plan.reason
    assert plan.table().count("(rank 0)") == len(plan.stages_of_rank[0])


def test_memory_of_a_rank_is_that_of_all_its_stages_and_stays_within_the_limit() -> None:
    profile, cluster = problem()
    free = make_plan(profile, cluster, 8, micro_batch=1, schedule="interleaved", baselines=False)
    limit = int(0.8 * max(free.prediction.memory_bytes))
    tight = make_plan(*problem(memory=[limit] * 3), 8, micro_batch=1, schedule="interleaved", baselines=False)
    assert max(tight.prediction.memory_bytes) <= limit
    assert sum(tight.in_flight) < sum(free.in_flight)
    alone = [
        PlanCost(dataclasses.replace(free, in_flight=counts), profile).memory_bytes()[0]
        for counts in (free.in_flight, tuple(k + 1 for k in free.in_flight))
    ]
    assert alone[0] < alone[1]


def test_what_cannot_be_cut_into_rounds_is_refused() -> None:
    with pytest.raises(PlanError, match="together with given stages"):
        make_plan(*problem(), 8, schedule="interleaved", stages=2)
    with pytest.raises(InfeasibleError, match="cut into rounds"):
        make_plan(*problem((0.5,)), 8, schedule="interleaved")


def test_a_plan_by_hand_needs_the_schedule_and_no_neighbours_on_one_device() -> None:
    plan = make_plan(*problem(), 8, micro_batch=2, schedule="interleaved", baselines=False)
    with pytest.raises(PlanError, match="make the schedule interleaved"):
        dataclasses.replace(plan, schedule="1f1b")
    stages = (dataclasses.replace(plan.stages[0], devices=plan.stages[1].devices), *plan.stages[1:])
    with pytest.raises(PlanError, match="are neighbours, both on"):
        dataclasses.replace(plan, stages=stages)
