import dataclasses

import numpy as np
import pytest

from lightning_hetpipe.errors import InfeasibleError, PlanError, ProfileError
from lightning_hetpipe.planner.baselines import Alone
from lightning_hetpipe.planner.candidates import Setting
from lightning_hetpipe.planner.comparison import compare
from lightning_hetpipe.planner.cost import SAMPLE_BYTES, LayerCosts
from lightning_hetpipe.planner.microbatch import best_size, neighbours, offered
from lightning_hetpipe.planner.placement import Budget, place
from lightning_hetpipe.planner.pools import make_chain, make_pools
from lightning_hetpipe.planner.search import make_plan
from lightning_hetpipe.planner.simulate import simulate
from lightning_hetpipe.plans import Plan
from tests.helpers.synthetic import make_cluster, make_graph, make_profile

SPEEDS = (0.6, 0.3, 0.3, 0.15)


def problem(speeds=SPEEDS, n_layers=12, *, cluster=None, profile=None, **graph):
    rng = np.random.default_rng(3)
    made = make_graph(n_layers, **({"out": 2000.0, "parameter_bytes": 100_000, "saved": 20_000.0} | graph))
    times = rng.uniform(0.002, 0.006, n_layers)
    return (
        make_profile(made, speeds, layer_s=times, alpha_s=0.002, **(profile or {})),
        make_cluster(speeds, **({"bandwidth_bytes_per_s": 1e8, "latency_s": 1e-4} | (cluster or {}))),
    )


def devices(plan: Plan) -> list[str]:
    return [stage.devices[0] for stage in plan.stages]


def test_the_prediction_is_the_simulated_step() -> None:
    profile, cluster = problem()
    plan = make_plan(profile, cluster, 32)
    assert plan.prediction is not None
    assert plan.prediction.step_s == simulate(plan, profile).step_s
    assert plan.prediction.lower_bound_s <= plan.prediction.step_s
    assert plan.prediction.images_per_s < plan.prediction.images_per_s_bound
    assert plan.profile_hash == profile.content_hash
    assert Plan.from_json(plan.to_json()) == plan


def test_the_search_beats_every_even_split_and_says_so() -> None:
    profile, cluster = problem()
    plan = make_plan(profile, cluster, 32)
    rows = {row.name: row for row in plan.alternatives}
    assert {"fastest single device", "data-parallel, even", "data-parallel, uneven"} <= set(rows)
    for even in ("layers", "time"):
        assert plan.prediction.step_s < rows[f"even split by {even}"].step_s
        again = make_plan(profile, cluster, 32, even=even)
        assert again.prediction.step_s <= rows[f"even split by {even}"].step_s * (1 + 1e-9)
    assert "sets the pace" in plan.reason
    assert "next best" in plan.reason


def test_a_useless_device_is_left_idle() -> None:
    profile, cluster = problem((1.0, 1.0, 0.001))
    plan = make_plan(profile, cluster, 32)
    assert "d2" not in devices(plan)
    assert len(plan.cluster.devices) == 3
    assert "1 device idle" in plan.reason


def test_a_pipeline_that_is_not_worth_it_is_refused_in_words() -> None:
    profile, cluster = problem((1.0, 0.02), cluster={"bandwidth_bytes_per_s": 1e4})
    plan = make_plan(profile, cluster, 16)
    assert devices(plan) == ["d0"]
    assert plan.reason.startswith("a pipeline is not worth it: d0 alone is fastest")


def test_the_pinned_device_holds_the_last_stage_and_its_price_is_told() -> None:
    profile, cluster = problem()
    plan = make_plan(profile, cluster, 32, pinned_last="d3")
    assert devices(plan)[-1] == "d3"
    assert plan.cluster.devices[0].name == "d3"
    free = next(row for row in plan.alternatives if row.name == "last stage anywhere")
    assert free.step_s <= plan.prediction.step_s * (1 + 1e-9)
    assert "instead of d3" in free.note


def test_options_fix_what_they_name() -> None:
    profile, cluster = problem()
    plan = make_plan(profile, cluster, 32, micro_batch=4, schedule="gpipe", stages=3, baselines=False)
    assert (plan.micro_batch, plan.schedule, len(plan.stages)) == (4, "gpipe", 3)
    ordered = make_plan(profile, cluster, 32, device_order=("d3", "d0", "d1"), baselines=False)
    assert devices(ordered) == ["d3", "d0", "d1"]
    even = make_plan(profile, cluster, 32, even="layers", baselines=False)
    assert [stage.stop - stage.start for stage in even.stages] == [3, 3, 3, 3]
    assert devices(even) == ["d0", "d1", "d2", "d3"]


def test_an_ordered_plan_is_no_worse_than_any_cut_of_that_order() -> None:
    profile, cluster = problem(n_layers=7)
    options = {"micro_batch": 4, "schedule": "1f1b", "baselines": False}
    plan = make_plan(profile, cluster, 32, device_order=("d0", "d1", "d2"), **options)
    for a in range(1, 6):
        for b in range(a + 1, 7):
            stages = tuple(
                dataclasses.replace(stage, start=start, stop=stop)
                for stage, start, stop in zip(plan.stages, (0, a, b), (a, b, 7))
            )
            other = dataclasses.replace(plan, stages=stages, in_flight=(8, 8, 1), prediction=None)
            assert plan.prediction.step_s <= simulate(other, profile).step_s * 1.03


def test_cuts_by_name_are_kept_and_predicted() -> None:
    profile, cluster = problem()
    names = [layer.name for layer in profile.graph.layers]
    plan = make_plan(profile, cluster, 32, cuts=(names[2], names[5]), device_order=("d2", "d0", "d1"))
    assert plan.starts == (0, 2, 5)
    assert [stage.devices for stage in plan.stages] == [("d2",), ("d0",), ("d1",)]
    assert plan.prediction.step_s == pytest.approx(simulate(plan, profile).step_s, rel=0.05)


def test_memory_limits_hold_in_the_plan_and_cut_what_is_in_flight() -> None:
    profile, cluster = problem(cluster={"memory_bytes": [2_500_000] * 4})
    plan = make_plan(profile, cluster, 32, baselines=False)
    assert max(plan.prediction.memory_bytes) <= 2_500_000
    roomy = make_plan(*problem(), 32, baselines=False)
    assert plan.prediction.step_s >= roomy.prediction.step_s * (1 - 1e-9)
    assert max(roomy.prediction.memory_bytes) > 2_500_000


def test_nothing_fits_lists_numbered_remedies_with_todays_values() -> None:
    profile, cluster = problem(cluster={"memory_bytes": [300_000] * 4})
    with pytest.raises(InfeasibleError, match="a batch of 32 fits cluster 'synthetic'") as caught:
        make_plan(profile, cluster, 32, schedule="gpipe", stages=2)
    text = str(caught.value)
    for remedy in ("1. more memory", "2. an optimizer", "3. a smaller batch", "2 now", "schedule 1f1b"):
        assert remedy in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 64}, "micro_batch 64 must lie between 1 and the batch size 32"),
        ({"schedule": "zb"}, "schedule 'zb' is unknown"),
        ({"stages": 5}, "5 stages were asked for"),
        ({"pinned_last": "d9"}, "device 'd9' is not in cluster"),
        ({"device_order": ("d0", "d0")}, "must name each device once"),
        ({"device_order": ("d0", "d1"), "stages": 3}, "names 2 devices for 3 stages"),
        ({"device_order": ("d0", "d1"), "pinned_last": "d0"}, "'d0' must be last"),
        ({"even": "speed"}, "even 'speed' is unknown"),
        ({"cuts": ("layer1",), "even": True}, "give one of them"),
        ({"cuts": ("layer1",), "stages": 3}, "1 cuts make 2 stages, not 3"),
        ({"cuts": ("layer1", "nowhere")}, "'nowhere', which is no layer; did you mean"),
        ({"cuts": ("layer2", "layer1")}, "name them in the model's order"),
    ],
)
def test_contradicting_options_are_refused(options, message) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(*problem(), 32, **options)


def test_a_device_that_was_not_profiled_is_named() -> None:
    profile, _ = problem()
    with pytest.raises(ProfileError, match="device 'd4' was not profiled"):
        make_plan(profile, make_cluster([*SPEEDS, 1.0]), 32)


def test_a_prime_batch_is_sliced_unevenly_rather_than_by_one() -> None:
    profile, cluster = problem()
    plan = make_plan(profile, cluster, 31, baselines=False)
    assert 1 < plan.micro_batch < 31
    assert sum(plan.slices(31)) == 31


def test_devices_with_links_of_their_own_are_told_apart() -> None:
    profile, cluster = problem((0.5, 0.5, 0.5), out=50_000.0)
    link = cluster.links[0]
    slow = dataclasses.replace(link, bandwidth_bytes_per_s=1e5)
    links = (link, dataclasses.replace(slow, source="d1"), dataclasses.replace(slow, target="d1"))
    plan = make_plan(profile, dataclasses.replace(cluster, links=links), 16, baselines=False)
    assert set(devices(plan)) == {"d0", "d2"}


def test_the_bound_is_the_sum_of_what_each_device_reaches_alone() -> None:
    profile, cluster = problem((1.0, 0.5))
    alone = Alone(Setting(profile, cluster, 32, ("1f1b",), 2.0))
    rates = [32 / alone.best(name, 32)[0] for name in ("d0", "d1")]
    assert rates[0] == pytest.approx(2 * rates[1])
    assert alone.bound_images_per_s() == pytest.approx(sum(rates))
    rows = compare(profile, cluster, 32)
    assert rows[-1].images_per_s == pytest.approx(sum(rates))
    assert all(row.images_per_s <= rows[-1].images_per_s * (1 + 1e-9) for row in rows)


def test_the_square_root_rule_minimises_its_own_model() -> None:
    alpha, beta, hops = [3.0, 1.0, 2.0], [0.5, 0.2, 0.4], 0.1

    def figures(size: int):
        return size, [a + b * size for a, b in zip(alpha, beta)], hops * size

    best = best_size(64, figures(2), figures(4))

    def step(size: float) -> float:
        t = [a + b * size for a, b in zip(alpha, beta)]
        return (64 / size - 1) * t[0] + sum(t) + hops * size

    assert step(best) <= min(step(best * 0.95), step(best * 1.05))


def test_sizes_on_offer_are_divisors_and_what_lies_between_them() -> None:
    assert offered(8) == (1, 2, 3, 4, 8)
    assert offered(13) == (1, 2, 3, 4, 5, 7, 13)
    assert offered(12, smallest=4) == (4, 6, 12)
    assert offered(3, smallest=4) == (3,)
    assert neighbours((1, 2, 4, 8, 16), 5.0) == (4, 8, 2)


def test_a_large_cluster_is_placed_within_a_few_percent_of_its_bound() -> None:
    speeds = [speed for speed in (0.8, 0.4, 0.2, 0.1) for _ in range(6)]
    profile, cluster = problem(speeds, n_layers=60)
    pools = make_pools(profile, cluster)
    chain = make_chain(LayerCosts(profile, 2), cluster, pools, batch_size=64)
    result = place(chain, tolerance=0.01, budget=Budget(labels=250, searches=4, slack=0.01))
    assert pools.sizes == (6, 6, 6, 6)
    assert result.gap < 0.05
    assert len(result.found[0].starts) > 4


def test_a_profile_of_other_numbers_has_another_hash() -> None:
    profile, _ = problem()
    device = dataclasses.replace(profile.devices[0], optimizer_s_per_byte=1e-9)
    other = dataclasses.replace(profile, devices=(device, *profile.devices[1:]))
    assert profile.content_hash == problem()[0].content_hash
    assert profile.content_hash != other.content_hash
    assert profile.content_hash != dataclasses.replace(profile, step_forward_s=1.0).content_hash


def test_the_readers_batch_counts_in_the_last_stages_memory() -> None:
    graph = make_graph(1, parameter_bytes=1000, saved=100.0)
    profile = make_profile(graph, [1.0])
    # Parameter, gradient and two states; a slice's activations and output; the gradient that its backward
    # makes; two inputs ahead of their turn; the whole batch.
    need = 4 * 1000 + 2 * 100 + 2 * 10 + 1000 + 2 * 2 * 50 + 8 * (50 + SAMPLE_BYTES)
    options = {"micro_batch": 2, "schedule": "1f1b", "baselines": False}
    plan = make_plan(profile, make_cluster([1.0], memory_bytes=[need]), 8, **options)
    assert plan.prediction.memory_bytes == (need,)
    with pytest.raises(InfeasibleError, match="no plan for a batch of 8 fits"):
        make_plan(profile, make_cluster([1.0], memory_bytes=[need - 1]), 8, **options)
