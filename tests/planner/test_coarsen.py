import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lightning_hetpipe.planner.coarsen import coarsen, thin
from lightning_hetpipe.planner.cost import LayerCosts
from lightning_hetpipe.planner.placement import Budget, lower_bound_s, place, place_thinly
from lightning_hetpipe.planner.pools import make_chain, make_pools
from tests.helpers.synthetic import make_cluster, make_graph, make_profile


def make(layer_s, out, speeds=(1.0, 0.5, 0.25), memory=None):
    graph = make_graph(len(layer_s), out=list(out))
    profile = make_profile(graph, speeds, layer_s=layer_s)
    cluster = make_cluster(speeds, bandwidth_bytes_per_s=1e6, memory_bytes=memory)
    costs = LayerCosts(profile, 4)
    return make_chain(costs, cluster, make_pools(profile, cluster), batch_size=32)


def test_layers_without_time_are_merged_where_least_crosses() -> None:
    # Cuts 1..5 with 50, 10, 30, 40, 20 bytes; layers 1, 2 and 4 take no time.
    chain = make([0.01, 0.0, 0.0, 0.01, 0.0, 0.01], [50, 10, 30, 40, 20, 0])
    coarse, cuts = coarsen(chain, 0.0)
    assert cuts.tolist() == [0, 2, 5, 6]
    assert coarse.n_layers == 3
    assert place(coarse).found[0].objective_s == pytest.approx(place(chain).found[0].objective_s)


def test_nothing_is_dropped_where_every_layer_takes_its_time() -> None:
    chain = make([0.01] * 6, [50, 10, 30, 40, 20, 0])
    assert coarsen(chain, 0.004)[0] is chain


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6), st.booleans())
def test_what_coarsening_loses_stays_within_its_bound(seed: int, limited: bool) -> None:
    rng = np.random.default_rng(seed)
    times = rng.choice([0.0, 0.0002, 0.001, 0.01, 0.02], 12)
    times[0] = 0.01
    chain = make(times, rng.uniform(0, 2000, 12), memory=[60_000] * 3 if limited else None)
    tolerance = 0.01
    coarse, cuts = coarsen(chain, tolerance)
    fine, rough = place(chain), place(coarse)
    assume(fine.found)
    slack = tolerance / float((chain.available / chain.seconds[:, -1]).sum())
    allowed = 2 * (len(fine.found[0].starts) + chain.n_micro_batches - 1) * slack
    if chain.memory is None:
        assert rough.found[0].objective_s <= fine.found[0].objective_s + allowed + 1e-12
    assert not rough.found or rough.found[0].objective_s >= fine.found[0].objective_s * (1 - 1e-9)
    assert set(cuts) <= set(range(13))


def test_a_thin_chain_keeps_the_cuts_that_the_least_crosses() -> None:
    out = [900.0, 100.0, 900.0, 900.0, 100.0, 900.0, 900.0, 100.0]
    coarse, cuts = thin(make([0.01] * 9, [*out, 0.0]), 3)
    assert coarse.n_layers == 3
    assert cuts.tolist()[1:-1] == [2, 5]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6), st.booleans())
def test_the_bound_of_a_thin_search_holds_and_its_placements_are_real(seed: int, limited: bool) -> None:
    rng = np.random.default_rng(seed)
    memory = [60_000] * 3 if limited else None
    chain = make(rng.uniform(0.002, 0.02, 14), rng.uniform(0, 2000, 14), memory=memory)
    exact = place(chain)
    rough, bounded = place_thinly(chain, 5, tolerance=0.0, upper_s=np.inf, budget=Budget())
    assert not bounded
    if not rough.found:
        return
    best = rough.found[0]
    assert best.objective_s >= exact.found[0].objective_s * (1 - 1e-9)
    assert lower_bound_s(chain, best.objective_s) <= exact.found[0].objective_s * (1 + 1e-9)
    on_thin = place(thin(chain, 5)[0]).found[0]
    assert best.objective_s <= on_thin.objective_s * (1 + 1e-9)
