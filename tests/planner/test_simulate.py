import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetpipe.errors import PlanError, ScheduleError
from lightning_hetpipe.graph import Route
from lightning_hetpipe.planner.cost import (
    SAMPLE_BYTES,
    gpipe_step_s,
    lower_bound_s,
    one_f_one_b_step_s,
    safe_k,
)
from lightning_hetpipe.planner.simulate import simulate, simulate_schedule, step_seconds
from lightning_hetpipe.plans import Plan, Stage
from lightning_hetpipe.schedule import Action, Kind, Schedule, make_schedule
from tests.helpers.synthetic import make_cluster, make_graph, make_profile


def chain(n: int) -> tuple[Route, ...]:
    routes = [Route(-1, 0, ("x",), ())] + [Route(s, s + 1, ("v",), ("v",)) for s in range(n - 1)]
    return tuple(routes)


def run(name, forward, backward, transfers, m, in_flight, latency=0.0, sent=0.0) -> float:
    """Simulated seconds of a pipeline; ``transfers`` are one direction's link times per cut."""
    n = len(forward)
    schedule = make_schedule(
        name,
        ranks_of_stage=[*((s + 1,) for s in range(n - 1)), (0,)],
        n_ranks=n,
        n_micro_batches=m,
        in_flight=in_flight,
        routes=chain(n),
    )

    def seconds(action: Action) -> float:
        if action.stage < 0:
            return 0.0
        return forward[action.stage] if action.kind is Kind.F else backward[action.stage]

    def transfer(action: Action, source: int, target: int) -> tuple[float, float, float]:
        if action.stage < 0:
            return 0.0, 0.0, 0.0
        return sent, transfers[min(action.stage, action.peer)], latency

    timeline = simulate_schedule(schedule, seconds, transfer)
    assert timeline.step_s == step_seconds(schedule, seconds, transfer)
    return timeline.step_s


@st.composite
def pipelines(draw, slowest_link: float):
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    n, m = draw(st.integers(2, 7)), draw(st.sampled_from([1, 2, 4, 8, 16]))
    t = rng.uniform(1, 8, n)
    ratio = rng.uniform(1.8, 2.6, n)
    forward, backward = t / (1 + ratio), t * ratio / (1 + ratio)
    links = rng.uniform(0, slowest_link * t.max(), n - 1)
    return forward.tolist(), backward.tolist(), links.tolist(), m


@settings(max_examples=80, deadline=None)
@given(pipelines(slowest_link=0.0))
def test_gpipe_takes_what_its_closed_form_says(pipeline) -> None:
    forward, backward, _, m = pipeline
    links = [0.9 * min(forward)] * (len(forward) - 1)  # shorter than any stage: links never queue
    hops = [2 * link for link in links]
    simulated = run("gpipe", forward, backward, links, m, [m] * len(forward))
    assert simulated == pytest.approx(gpipe_step_s(forward, backward, hops, m))


@settings(max_examples=80, deadline=None)
@given(pipelines(slowest_link=1.0))
def test_no_schedule_beats_the_lower_bound_and_safe_k_stays_near_the_closed_form(pipeline) -> None:
    forward, backward, links, m = pipeline
    t, hops = np.add(forward, backward).tolist(), [2 * link for link in links]
    counts = safe_k(t, hops, m)
    simulated = run("1f1b", forward, backward, links, m, counts)
    bound = lower_bound_s(t, hops, m)
    assert simulated >= bound * (1 - 1e-9)
    assert run("gpipe", forward, backward, links, m, [m] * len(t)) >= bound * (1 - 1e-9)
    assert simulated <= 1.35 * one_f_one_b_step_s(t, hops, m)


def test_safe_k_counts_from_the_end_when_links_are_free() -> None:
    assert safe_k([2.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0], 8) == (4, 3, 2, 1)
    assert safe_k([2.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0], 2) == (2, 2, 2, 1)
    assert safe_k([2.0, 2.0], [3.0], 8) == (4, 1)


def test_messages_of_one_link_queue_and_latency_does_not() -> None:
    # Two forwards of 1 s each sent over a link that takes 3 s: usable at 1 + 3 + 5 and 4 + 3 + 5.
    step = run("gpipe", [1.0, 1.0], [0.0, 0.0], [3.0], 2, [2, 2], latency=5.0)
    last_forward_ends = 4.0 + 3.0 + 5.0 + 1.0
    assert step == last_forward_ends + 3.0 + 3.0 + 5.0


def test_a_group_starts_together_and_ends_together() -> None:
    schedule = make_schedule(
        "1f1b",
        ranks_of_stage=((1, 2), (0,)),
        n_ranks=3,
        n_micro_batches=2,
        in_flight=(2, 1),
        routes=chain(2),
        reduce=(0,),
    )
    timeline = simulate_schedule(
        schedule, lambda action: 1.0, lambda action, source, target: (0.0, 0.25 * target, 0.0)
    )
    times = [
        [
            (span.action, span.start_s, span.end_s)
            for span in timeline.spans
            if span.rank == rank and "RECV" not in span.action
        ]
        for rank in (1, 2)
    ]
    assert times[0] == times[1]
    assert times[0][-1][0] == "0REDUCE_GRAD"


def test_a_deadlock_is_an_error() -> None:
    actions = ((Action.parse("0RECV_F0:1"),), (Action.parse("1RECV_F0"),))
    schedule = Schedule("broken", actions, ((0,), (1,)), 1)
    with pytest.raises(ScheduleError, match="deadlocks at 0RECV_F0:1, 1RECV_F0"):
        simulate_schedule(schedule, lambda action: 1.0, lambda *_: (0.0, 0.0, 0.0))


def hand_plan(graph, cluster, cuts, devices, **options) -> Plan:
    stops = (*cuts[1:], len(graph))
    stages = tuple(Stage(a, b, (d,)) for a, b, d in zip(cuts, stops, devices))
    order = [devices[-1], *devices[:-1]]
    rest = [device.name for device in cluster.devices if device.name not in order]
    options = {"batch_size": 8, "micro_batch": 2, "schedule": "1f1b", "in_flight": (2, 1)} | options
    names = tuple(layer.name for layer in graph.layers)
    permuted = dataclasses.replace(cluster, devices=tuple(map(cluster.device, (*order, *rest))))
    return Plan(cluster=permuted, layer_names=names, stages=stages, **options)


def test_a_hand_written_plan_is_simulated_with_its_memory() -> None:
    graph = make_graph(4, parameter_bytes=1000, saved=500.0, out=100.0)
    cluster = make_cluster([1.0, 0.5, 0.5])
    profile = make_profile(graph, [1.0, 0.5, 0.5], layer_s=0.01)
    plan = hand_plan(graph, cluster, (0, 1), ("d1", "d0"))
    timeline = simulate(plan, profile, optimizer_copies=1.0)
    # Stage 0: 1 layer at half speed and 2 samples = 0.04 s; stage 1: 3 layers = 0.06 s; 4 micro-batches.
    assert timeline.step_s == pytest.approx(0.04 + 4 * 0.06, rel=1e-3)
    assert timeline.n_ranks == 3
    assert timeline.busy[2] == 0
    # Weights, gradients, state; what is in flight; what is received; the last layer's backward; the batch.
    last = 3 * 1000 * 3 + (3 * 500 * 2 + 20) + 2 * 200 + (200 + 1000) + 8 * (50 + SAMPLE_BYTES)
    first = 1000 * 3 + 2 * (500 * 2 + 200) + 2 * 100 + 200 + 1000 + 200
    assert timeline.peak_memory_bytes == (last, first, 0)


def test_a_ragged_last_slice_costs_less() -> None:
    graph = make_graph(4)
    cluster, profile = make_cluster([1.0, 1.0]), make_profile(graph, [1.0, 1.0])
    whole = simulate(
        hand_plan(graph, cluster, (0, 2), ("d1", "d0"), batch_size=8, micro_batch=4), profile
    ).step_s
    ragged = simulate(
        hand_plan(graph, cluster, (0, 2), ("d1", "d0"), batch_size=7, micro_batch=4), profile
    ).step_s
    # A sample less: 0.02 s on each stage, of which the pipeline shows one or both.
    assert 0.02 * (1 - 1e-9) <= whole - ragged <= 0.04 * (1 + 1e-9)


def test_a_skip_loads_the_link_it_takes_and_no_other() -> None:
    plain, skipping = make_graph(3, out=1e6), make_graph(3, out=1e6, skips=[(0, 2)])
    speeds = [1.0, 1.0, 1.0]
    cluster = make_cluster(speeds, bandwidth_bytes_per_s=1e9)
    steps = []
    for graph in (plain, skipping):
        plan = hand_plan(graph, cluster, (0, 1, 2), ("d1", "d2", "d0"), in_flight=(3, 2, 1))
        steps.append(simulate(plan, make_profile(graph, speeds)).step_s)
    assert steps[1] == pytest.approx(steps[0], rel=0.02)


def test_a_plan_of_another_model_is_refused() -> None:
    graph = make_graph(4)
    plan = hand_plan(graph, make_cluster([1.0, 1.0]), (0, 2), ("d1", "d0"))
    with pytest.raises(PlanError, match="another model"):
        simulate(plan, make_profile(make_graph(5), [1.0, 1.0]))


def test_tied_layers_on_two_stages_reduce_their_gradients() -> None:
    graph = make_graph(4, tied=((0, 3),))
    cluster, profile = make_cluster([1.0, 1.0]), make_profile(graph, [1.0, 1.0])
    texts = {span.action for span in simulate(hand_plan(graph, cluster, (0, 2), ("d1", "d0")), profile).spans}
    assert {"0REDUCE_GRAD", "1REDUCE_GRAD"} <= texts


@pytest.mark.parametrize("split", ["channel", "batch"])
def test_a_plan_whose_last_stage_is_shared_is_simulated_with_its_loss_stage(split) -> None:
    graph, cluster = make_graph(4), make_cluster((1.0, 1.0, 1.0))
    plan = Plan(
        cluster=cluster,
        layer_names=tuple(layer.name for layer in graph.layers),
        stages=(Stage(0, 2, ("d2",)), Stage(2, 4, ("d1", "d0"), (0.5, 0.5), split)),
        batch_size=8,
        micro_batch=2,
        schedule="1f1b",
        in_flight=(2, 1),
    )
    timeline = simulate(plan, make_profile(graph, (1.0, 1.0, 1.0)))
    of_rank_0 = {span.action for span in timeline.spans if span.rank == 0}
    assert {"1F0", "2F0", "2B0", "1B0"} <= of_rank_0
    assert timeline.step_s > 0
