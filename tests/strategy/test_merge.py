"""What the strategy makes of `merge` and of groups in a short plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe import Cluster, Device, HetPipeStrategy, Link, Profile
from lightning_hetpipe.engine.shares import sharing_of
from lightning_hetpipe.errors import PlanError, UnsupportedError
from lightning_hetpipe.plans import Plan, Stage
from lightning_hetpipe.profiles import DeviceProfile
from lightning_hetpipe.strategy import prepare
from lightning_hetpipe.strategy.options import read_plan
from lightning_hetpipe.tracing import trace
from tests.helpers.pipelines import trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's; those of this package are logged
CLUSTER = Cluster("pair", (Device("a"), Device("b")), (Link(1e-6, 1e10),))
SHORT = {"cuts": ["1"], "devices": [["b", "c"], "a"]}
SHARED = Plan(CLUSTER, ("0",), (Stage(0, 1, ("a", "b"), (0.5, 0.5), "batch"),), 4, 2, "1f1b", (1,))


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def profile_in_which_merging_pays() -> Profile:
    traced = trace(Module().net, (x := torch.randn(8, 4),), {})
    seconds = tuple((size / 10,) for size in (1.0, 0.1, 3.0))  # nowhere to cut well
    devices = tuple(DeviceProfile(name, (8,), seconds, seconds) for name in "ab")
    return Profile(traced.graph, devices, sharing=sharing_of(traced, traced.bind((x,), {}), 2))


def fit(folder: Path, module: type[Module] = Module, **options: Any) -> HetPipeStrategy:
    options = {"profile": profile_in_which_merging_pays()} | options
    strategy = HetPipeStrategy(cluster=CLUSTER, start_method="fork", timeout_s=60, **options)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4))
    run = trainer(strategy, 2, max_epochs=1, default_root_dir=folder)
    run.fit(module(), torch.utils.data.DataLoader(data, 8))
    return strategy


def splits(strategy: HetPipeStrategy) -> list[str]:
    return [stage.split for stage in strategy.plan.stages if stage.split != "none"]


def test_devices_share_a_stage_where_that_pays_unless_it_is_forbidden(tmp_path: Path) -> None:
    merged = fit(tmp_path)
    assert len(splits(merged)) == 1
    assert "gains" in merged.plan.why()
    assert not splits(fit(tmp_path, merge="never"))


def test_a_group_may_be_asked_for_in_an_even_split_that_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE_DIR", str(tmp_path))
    assert len(splits(fit(tmp_path, profile=None, plan="even", merge=[["a", "b"]]))) == 1


class Factored(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters())


def test_the_planner_s_groups_are_left_where_the_optimizer_needs_whole_weights(tmp_path: Path) -> None:
    made = profile_in_which_merging_pays()
    assert made.sharing is not None
    profile = replace(made, sharing=replace(made.sharing, coupled=(0, 1, 2)))  # never by samples
    assert splits(fit(tmp_path, profile=profile)) == ["channel"]
    assert not splits(fit(tmp_path, profile=profile, module=Factored))
    with pytest.raises(UnsupportedError, match="Adafactor cannot train weights that devices share"):
        fit(tmp_path, profile=profile, module=Factored, merge=[["a", "b"]])


def test_groups_that_the_model_does_not_allow_are_planned_again_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = prepare._groups

    def refusing(run: Any, name: str, traced: Any, plan: Any, captured: Any) -> Any:
        if any(stage.split != "none" for stage in plan.stages):
            raise PlanError("a weight is used elsewhere.")
        return groups(run, name, traced, plan, captured)

    monkeypatch.setattr(prepare, "_groups", refusing)
    assert not splits(fit(tmp_path))
    with pytest.raises(PlanError, match="a weight is used elsewhere"):
        fit(tmp_path, merge=[["a", "b"]])


def test_a_short_plan_names_its_groups() -> None:
    split = read_plan({"cuts": ["1"], "devices": [["b", "c"], "a"]})
    assert split.devices == ("b+c", "a")
    assert split.teams == (("b", "c"),)
    assert split.names == ("b", "c", "a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge": "often"}, "merge='often' is unknown"),
        ({"merge": ["a", "b"]}, "give a list of lists of device names"),
        ({"merge": [["a", "z"]], "cluster": CLUSTER}, "device 'z' is not in cluster 'pair'"),
        ({"merge": 5}, "merge=5 is unknown"),
        ({"merge": [["a"]]}, "is no group: name two or more"),
        ({"merge": [["a", "b"], ["b", "c"]]}, "names 'b' twice"),
        ({"merge": [["a", "b"]], "schedule": "interleaved"}, "the interleaved schedule were both asked for"),
        ({"plan": {"cuts": ["1"], "devices": [["a", "b"], "b"]}}, "name one twice"),
        ({"plan": {"cuts": ["1"], "devices": [["a", None], "b"]}}, "devices of the plan is"),
        ({"plan": {"cuts": ["1"], "devices": ["a", []]}}, "devices of the plan is"),
        ({"plan": {"cuts": [["1"]]}}, "cuts of the plan is"),
        ({"merge": "never", "plan": SHORT}, "merge='never', but plan= has groups of its own"),
        ({"merge": [["a", "b"]], "plan": SHORT}, "but plan= has groups of its own"),
        ({"merge": "never", "plan": SHARED}, "merge='never', but plan= has groups of its own"),
    ],
)
def test_groups_that_cannot_be_are_refused_before_anything_is_started(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HetPipeStrategy(**options)
