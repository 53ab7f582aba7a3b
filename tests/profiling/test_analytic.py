import pytest

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.graph import Layer, LayerGraph, Value
from lightning_hetpipe.profiling.analytic import OVERHEAD_S, analytic_profile

GRAPH = LayerGraph(
    layers=(
        Layer("conv", "Conv2d", ("conv.weight",), parameter_bytes=1000, flops_per_sample=1e9),
        Layer("fc", "Linear", ("fc.weight",), parameter_bytes=300_000_000, flops_per_sample=1e6),
    ),
    values=(
        Value("x", -1, (0,), 4000.0),
        Value("conv", 0, (1,), 8000.0),
        Value("fc", 1, (), 40.0, output=True),
    ),
)


def device(name, **changes):
    return {"name": name, "flops_per_s": 1e12, "memory_bandwidth": "100GB/s"} | changes


def test_a_layer_with_many_flops_takes_half_of_the_peak_and_one_with_many_weights_the_memory_s_time():
    cluster = Cluster.from_mapping({"name": "one", "devices": [device("gpu")]})
    forward, backward = analytic_profile(GRAPH, cluster, (1, 8)).device("gpu").layer_seconds(8)
    assert forward[0] == pytest.approx(OVERHEAD_S + 8e9 / 0.5e12)
    assert forward[1] == pytest.approx(OVERHEAD_S + 300_000_000 / 75e9, rel=0.01)
    assert list(backward) == pytest.approx(list(2 * forward))


def test_twice_the_peak_is_twice_as_fast_where_compute_binds():
    cluster = Cluster.from_mapping(
        {"name": "two", "devices": [device("slow"), device("fast", flops_per_s=2e12)]}
    )
    profile = analytic_profile(GRAPH, cluster, (64,))
    slow, fast = (profile.device(name).layer_seconds(64)[0][0] - OVERHEAD_S for name in ("slow", "fast"))
    assert slow == pytest.approx(2 * fast)
    assert profile.origin == "analytic"


def test_a_device_without_published_figures_is_refused_by_name():
    cluster = Cluster.from_mapping({"name": "lab", "devices": [{"name": "board"}]})
    with pytest.raises(ProfileError, match=r"'board' has no published figures.*say profile=auto"):
        analytic_profile(GRAPH, cluster, (1,))
