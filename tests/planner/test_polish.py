"""Cuts that move on finished plans."""

from lightning_hetpipe.planner.candidates import Setting, fastest, make_candidates
from lightning_hetpipe.planner.polish import polish
from lightning_hetpipe.plans import Stage
from tests.helpers.synthetic import make_cluster, make_graph, make_profile


def test_a_cut_jumps_over_layers_between_which_much_would_cross() -> None:
    block = [1e6, 1e6, 1e6, 1e6, 1e6, 1.0]  # bytes: only after six layers little crosses
    graph = make_graph(24, out=block * 4)
    profile, cluster = make_profile(graph, (1.0, 1.0)), make_cluster((1.0, 1.0), bandwidth_bytes_per_s=1e7)
    setting = Setting(profile, cluster, 8, ("1f1b",), 0.0)
    uneven = fastest(make_candidates(setting, (Stage(0, 6, ("d0",)), Stage(6, 24, ("d1",))), 2))
    even = fastest(make_candidates(setting, (Stage(0, 12, ("d0",)), Stage(12, 24, ("d1",))), 2))
    assert polish(setting, uneven, fixed=2, actions=10_000).plan.stages == even.plan.stages
    few = polish(setting, uneven, fixed=2, actions=100)  # for neighbours only
    assert few.plan.stages == uneven.plan.stages
