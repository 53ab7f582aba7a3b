"""What is no profile, cluster, plan or number gives one clear error that names the argument."""

from typing import Any

import pytest

import lightning_hetpipe as hp
from lightning_hetpipe.errors import ClusterError, HetPipeError, PlanError, ProfileError
from tests.helpers.synthetic import make_cluster, make_graph, make_profile

PROFILE, CLUSTER = make_profile(make_graph(4), [1.0, 0.5], layer_s=0.01), make_cluster([1.0, 0.5])


@pytest.mark.parametrize("function", [hp.plan, hp.compare], ids=["plan", "compare"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"profile": "p.json"}, ProfileError, "profile='p.json' was asked for: give a Profile"),
        ({"cluster": 5}, ClusterError, "cluster=5 was asked for: give a Cluster"),
        ({"batch_size": "8"}, PlanError, "batch_size='8' was asked for: give samples, a whole number from 1"),
        ({"batch_size": 0}, PlanError, "batch_size=0 was asked for"),
        ({"micro_batch": 2.5}, PlanError, "micro_batch=2.5 was asked for: give samples, .* or 'auto'"),
        ({"micro_batch": None}, PlanError, "micro_batch=None was asked for"),
        ({"schedule": 7}, PlanError, "schedule 7 is unknown"),
        ({"stages": 1.5}, PlanError, "stages=1.5 was asked for: give a whole number"),
        ({"optimizer_copies": "adam"}, PlanError, "optimizer_copies='adam' was asked for: give a number"),
        ({"cuts": "l1"}, PlanError, "cuts='l1' was asked for: give a list of names"),
        ({"device_order": [0, 1]}, PlanError, r"device_order=\[0, 1\] was asked for: give a list of names"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_plan_and_compare_name_the_argument_of_the_wrong_type(
    function: Any, change: dict[str, Any], error: type[HetPipeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        function(**({"profile": PROFILE, "cluster": CLUSTER, "batch_size": 8} | change))


def test_simulate_names_the_argument_of_the_wrong_type() -> None:
    with pytest.raises(PlanError, match=r"plan='plan.json' was asked for: give a Plan"):
        hp.simulate("plan.json", PROFILE)  # type: ignore[arg-type]
    plan = hp.plan(PROFILE, CLUSTER, 8, baselines=False)
    with pytest.raises(ProfileError, match="profile=None was asked for: give a Profile"):
        hp.simulate(plan, None)  # type: ignore[arg-type]


def test_profile_names_the_argument_of_the_wrong_type() -> None:
    torch = pytest.importorskip("torch")
    for change, message in (
        ({"module": len}, "module=<built-in function len> was asked for: give a torch.nn.Module"),
        ({"cluster": "lab4"}, "cluster='lab4' was asked for: give a Cluster"),
        ({"origin": "guessed"}, "origin='guessed' was asked for: give measured or analytic"),
    ):
        right = {"module": torch.nn.Linear(2, 2), "example": torch.zeros(2, 2), "cluster": CLUSTER}
        with pytest.raises(HetPipeError, match=message):
            hp.profile(**(right | change))
