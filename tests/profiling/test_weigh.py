import pytest
import torch
from torch import nn

from lightning_hetpipe.profiling.measure import measure_device
from lightning_hetpipe.profiling.weigh import OptimizerNeeds, Weights, through, weigh_optimizer
from lightning_hetpipe.tracing import trace

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("make", "settings", "needs"),
    [
        (torch.optim.SGD, {"lr": 0.1}, OptimizerNeeds(0, 0, 0)),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, OptimizerNeeds(1, 0, 0)),
        (torch.optim.Adam, {"lr": 0.1}, OptimizerNeeds(2, 2, 0)),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}, OptimizerNeeds(3, 2, 0)),
        (torch.optim.Adam, {"lr": 0.1, "foreach": True}, OptimizerNeeds(2, 0, 1)),
    ],
)
def test_an_optimizer_is_seen_to_keep_and_need(make, settings, needs):
    state = torch.get_rng_state()
    found = weigh_optimizer(make, settings, CPU)
    assert found.copies == needs.copies
    assert found.of_largest == pytest.approx(needs.of_largest, abs=0.5)
    assert found.of_all == pytest.approx(needs.of_all, abs=0.5)
    assert torch.equal(state, torch.get_rng_state())


def test_a_layer_needs_its_gradients_and_results_in_passing():
    net = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024))
    traced = trace(net, (torch.zeros(4, 1024),), {})
    profile = measure_device(traced, {"input": torch.ones(4, 1024)}, (256, 1024), "cpu", budget_s=0.0)
    weights, result = 4 * 2048 * 1024, 4 * 1024
    for fixed, per_sample in profile.backward_peak_bytes:
        assert fixed == pytest.approx(weights, rel=0.25)
        assert per_sample < 2.5 * result
    assert profile.forward_peak_bytes[0][1] == pytest.approx(2 * result, rel=0.25)


def test_weights_at_two_sizes_make_lines_and_one_size_keeps_gradients_fixed():
    small, large = Weights([10.0], [30.0]), Weights([30.0], [40.0])
    assert through([small, large], [2, 4], [16.0]) == [((0.0, 10.0),), ((20.0, 5.0),)]
    assert through([small], [2], [16.0]) == [((0.0, 5.0),), ((16.0, 7.0),)]
