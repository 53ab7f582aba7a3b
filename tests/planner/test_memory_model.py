"""What a stage is predicted to hold, beside sums over moments that are written out."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetpipe.graph import LayerGraph
from lightning_hetpipe.planner.cost import LayerCosts
from lightning_hetpipe.planner.memory import Share
from lightning_hetpipe.planner.pools import make_chain, make_pools
from lightning_hetpipe.profiles import Profile
from tests.helpers.synthetic import make_cluster, make_graph, make_profile


def random_costs(seed: int) -> LayerCosts:
    """Seven layers with skips, values that several layers keep, and weighed kernels."""
    rng = np.random.default_rng(seed)
    n = 7
    graph = make_graph(
        n,
        parameter_bytes=[int(size) for size in rng.integers(0, 900, n)],
        saved=[float(size) for size in rng.integers(0, 200, n)],
        out=[float(size) for size in rng.integers(1, 300, n)],
        skips=((0, 3), (1, 5)),
    )
    values = []
    for value in graph.values:
        users = [layer for layer in (value.producer, *value.consumers) if layer >= 0]
        values.append(replace(value, kept_by=tuple(layer for layer in users if rng.random() < 0.5)))
    profile = make_profile(LayerGraph(graph.layers, tuple(values), fingerprint="random"), [1.0, 0.5])
    weighed = tuple((float(a), float(b)) for a, b in rng.integers(0, 500, (n, 2)))
    device = replace(
        profile.devices[0],
        forward_peak_bytes=weighed,
        backward_peak_bytes=weighed[::-1],
        optimizer_peak=(2.0, 0.5),
    )
    return LayerCosts(Profile(graph=profile.graph, devices=(device, profile.devices[1])), 2, 1.0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("copied", [False, True])
def test_the_tables_of_the_search_say_what_single_runs_need(seed: int, copied: bool) -> None:
    costs = random_costs(seed)
    n_layers = len(costs.graph)
    for name in ("d0", "d1"):
        tables = costs.memory(name).tables(copied=copied)
        for in_flight, m in ((1, 1), (1, 4), (3, 4), (4, 4)):
            table = tables.peak(in_flight, m)
            for start in range(n_layers):
                for stop in range(start + 1, n_layers + 1):
                    need = costs.memory_bytes(name, start, stop, in_flight, n_micro_batches=m, copied=copied)
                    assert table[start, stop] == pytest.approx(need)


def test_a_value_that_several_layers_keep_is_held_once() -> None:
    graph = make_graph(4, saved=0.0, out=100.0)
    values = [replace(v, kept_by=(0, 1, 3)) if v.name == "v0" else v for v in graph.values]
    costs = LayerCosts(make_profile(replace(graph, values=tuple(values)), [1.0]), 1)
    held = {run: costs.activations.held(*run).kept for run in ((0, 4), (0, 1), (1, 2), (2, 3), (2, 4))}
    assert held == {
        (0, 4): 100 + 10,  # with the model's output
        (0, 1): 100,
        (1, 2): 100 + 100,  # with v1, which it sends on
        (2, 3): 100,  # v2 only
        (2, 4): 100 + 10,
    }


def test_what_arrives_with_something_that_is_kept_is_held_too() -> None:
    graph = make_graph(4, saved=0.0, out=100.0, skips=((0, 2),))
    values = [replace(v, kept_by=(2,)) if v.name == "s0_2" else v for v in graph.values]
    costs = LayerCosts(make_profile(replace(graph, values=tuple(values)), [1.0]), 1)
    assert costs.activations.held(2, 4).kept == 100 + 100 + 10  # the skip, v1 of the same message, the output
    assert costs.activations.held(3, 4).kept == 10


def test_gpipe_makes_gradients_while_activations_go() -> None:
    graph = make_graph(3, parameter_bytes=[100, 100, 10_000], saved=[50_000.0, 10.0, 10.0], out=1.0)
    profile = make_profile(graph, [1.0])
    costs = LayerCosts(profile, 1, 0.0)
    # The last layer's gradient is made first; then what one micro-batch held is gone.
    weights, kept = 10_200, 50_020 + 10
    all_in_flight = costs.memory_bytes("d0", 0, 3, 4, n_micro_batches=4)
    assert all_in_flight == pytest.approx(weights + 4 * kept + 10_200, abs=50)
    assert costs.memory_bytes("d0", 0, 3, 4) > all_in_flight  # gradients stand while the fourth arrives


def test_an_optimizer_that_needs_much_in_passing_decides_alone() -> None:
    graph = make_graph(2, parameter_bytes=[1000, 5000], saved=1.0, out=1.0)
    device = replace(make_profile(graph, [1.0]).devices[0], optimizer_peak=(2.0, 0.5))
    costs = LayerCosts(Profile(graph, (device,)), 1, 2.0)
    assert costs.memory_bytes("d0", 0, 2, 1) == 6000 * (4 + 0.5) + 2 * 5000


def test_a_share_of_the_samples_keeps_all_weights() -> None:
    costs = random_costs(0)
    whole = costs.memory_bytes("d0", 0, 7, 2)
    halves = [costs.memory_bytes("d0", 0, 7, 2, share=share) for share in (Share(0.5), Share(0.5, 0.5))]
    assert halves[1] == pytest.approx(whole / 2)
    assert halves[1] < halves[0] < whole


def test_the_search_is_spared_tables_that_cannot_bind() -> None:
    graph = make_graph(4)
    profile = make_profile(graph, [1.0, 1.0])

    def chain(limit: int | None):
        cluster = make_cluster([1.0, 1.0], memory_bytes=[limit, limit])
        return make_chain(LayerCosts(profile, 2), cluster, make_pools(profile, cluster), batch_size=8)

    assert chain(None).memory is None
    assert chain(10**9).memory is None
    assert chain(20_000).memory is not None
