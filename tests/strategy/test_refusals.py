"""Wrong input is one clear error, before any process is started."""

import dataclasses
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_hetpipe as hp
from lightning_hetpipe.errors import ClusterError, GraphError, PlanError, ProfileError, UnsupportedError
from lightning_hetpipe.strategy.options import SplitByHand, read_plan
from lightning_hetpipe.strategy.refusals import refuse_optimizers
from tests.helpers.pipelines import QUIET, Classifier, hand_plan, loader, pipeline, trainer
from tests.helpers.synthetic import make_cluster, make_graph, make_profile

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]
TWO = {"name": "pair", "devices": [{"name": "a", "speed": 0.5}, {"name": "b", "speed": 0.5}]}


@pytest.fixture(autouse=True)
def no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    started: list[str] = []
    start = multiprocessing.Process.start
    monkeypatch.setattr(
        multiprocessing.Process, "start", lambda self: (started.append(self.name), start(self))
    )
    yield
    assert not started


class _Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _Iterates(Classifier):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    ("kind", "message"),
    [(_Manual, "uses manual optimisation"), (_Iterates, r"_Iterates.training_step takes dataloader_iter")],
)
def test_modules_that_drive_the_loop_themselves_are_refused(kind: type[Classifier], message: str) -> None:
    module = kind()
    with pytest.raises(UnsupportedError, match=message):
        trainer(pipeline(module, 2), 2).fit(module, loader())


@pytest.mark.parametrize(
    "callback",
    [
        L.pytorch.callbacks.StochasticWeightAveraging(1e-2),
        L.pytorch.callbacks.ModelPruning("l1_unstructured"),
        L.pytorch.callbacks.BackboneFinetuning(),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_that_need_the_whole_model_are_refused(callback: L.Callback) -> None:
    module = Classifier()
    with pytest.raises(UnsupportedError, match=f"{type(callback).__name__} cannot work in a pipeline"):
        trainer(pipeline(module, 2), 2, callbacks=[callback]).fit(module, loader())


def test_a_cluster_of_another_size_than_the_trainers_is_refused() -> None:
    module = Classifier()
    strategy = hp.HetPipeStrategy(TWO, start_method="fork")
    with pytest.raises(ClusterError, match=r"has 2 devices \(a, b\), but 3 processes were asked for"):
        trainer(strategy, 3).fit(module, loader())


@pytest.mark.parametrize(("name", "value"), [("micro_batch", 3), ("schedule", "interleaved")])
def test_what_contradicts_a_plan_beside_it_is_refused(name: str, value: Any) -> None:
    plan = hand_plan(Classifier().net, (torch.zeros(16, 8, dtype=torch.float64),), 2)
    hp.HetPipeStrategy(plan=plan, **{name: getattr(plan, name)})
    own = getattr(plan, name)
    with pytest.raises(PlanError, match=f"{name}={value} was asked for, but plan= has {name} {own}: leave"):
        hp.HetPipeStrategy(plan=plan, **{name: value})


def test_a_plan_for_another_cluster_is_refused() -> None:
    plan = hand_plan(Classifier().net, (torch.zeros(16, 8, dtype=torch.float64),), 2)
    with pytest.raises(PlanError, match="made for another cluster: it uses device 'd0'"):
        hp.HetPipeStrategy(TWO, plan=plan)


def test_a_plan_for_a_cluster_with_other_links_is_refused() -> None:
    plan = hand_plan(Classifier().net, (torch.zeros(16, 8, dtype=torch.float64),), 2)
    slow = dataclasses.replace(plan.cluster, links=(hp.Link(1e-3, 1e6, emulated=True),))
    with pytest.raises(PlanError, match="the link d0 -> d1 of cluster 'hand' has other figures"):
        hp.HetPipeStrategy(slow, plan=plan)


def test_a_plan_made_from_another_profile_than_the_given_one_is_refused() -> None:
    profile = make_profile(make_graph(4), [1.0, 0.5], layer_s=0.01)
    plan = hp.plan(profile, make_cluster([1.0, 0.5]), 8, baselines=False)
    assert hp.HetPipeStrategy(plan=plan, profile=profile).options.plan == plan
    with pytest.raises(PlanError, match=f"made from another profile .hash {plan.profile_hash}"):
        hp.HetPipeStrategy(plan=plan, profile=dataclasses.replace(profile, step_forward_s=1.0))


def test_a_submodule_that_is_not_there_is_refused_with_the_names_that_are() -> None:
    module = Classifier()
    with pytest.raises(GraphError, match=r"module='nett' was asked for.*children are net"):
        trainer(pipeline(module, 2, module="nett"), 2).fit(module, loader())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cluster": "lab44"}, ClusterError, "neither a file nor a shipped one; shipped are .*lab4"),
        ({"cluster": {"devices": [{"name": "a", "speed": 2}]}}, ClusterError, "speed=2.0 was asked for"),
        ({"plan": "nowhere.json"}, PlanError, "nowhere.json cannot be read"),
        ({"schedule": "zigzag"}, PlanError, "schedule='zigzag' is unknown; known are auto, gpipe, 1f1b"),
        ({"norm": "batch"}, PlanError, "norm='batch' is unknown"),
        ({"loss_reduction": "median"}, PlanError, "loss_reduction='median' is unknown"),
        ({"micro_batch": 0}, PlanError, "micro_batch=0 was asked for"),
        ({"micro_batch": "some"}, PlanError, "micro_batch='some' was asked for: give samples"),
        ({"start_method": "thread"}, ValueError, "start_method='thread' is unknown"),
        ({"timeout_s": 0}, PlanError, "timeout_s=0 was asked for"),
        ({"timeout_s": "x"}, PlanError, "timeout_s='x' was asked for: give seconds > 0"),
        ({"timeout_s": float("inf")}, PlanError, "timeout_s=inf was asked for"),
        ({"cluster": 5}, ClusterError, "cluster=5 was asked for: give a Cluster, a mapping, a YAML file or"),
        ({"cluster": {"devices": 5}}, ClusterError, "devices must be a list, not int"),
        ({"cluster": {"devices": [5]}}, ClusterError, "device 0 must be a mapping, not int"),
        ({"plan": 3.5}, PlanError, "plan=3.5 was asked for: give a Plan, a mapping, a plan file or 'even'"),
        ({"profile": 7}, ProfileError, "profile=7 was asked for: give a Profile or a file"),
        ({"profile": "nowhere.json"}, ProfileError, "nowhere.json cannot be read"),
        ({"micro_batch": 2.5}, PlanError, "micro_batch=2.5 was asked for: give samples"),
        ({"micro_batch": True}, PlanError, "micro_batch=True was asked for"),
        ({"micro_batch": None}, PlanError, "micro_batch=None was asked for"),
        ({"norm": None}, PlanError, "norm=None is unknown; known are keep, deferred"),
        ({"schedule": 7}, PlanError, "schedule=7 is unknown"),
        ({"module": 3}, GraphError, "module=3 was asked for: give a dotted name"),
        ({"blocks": ["a"]}, GraphError, r"blocks=\['a'\] was asked for"),
        ({"run_dir": 3}, PlanError, "run_dir=3 was asked for: give the path of a folder"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_option_that_means_nothing_is_named_with_what_it_takes(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hp.HetPipeStrategy(**options)


class _OneLayer(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4).double()  # type: ignore[assignment]


def test_a_pipelined_module_that_is_one_layer_is_refused() -> None:
    with pytest.raises(GraphError, match=r"'net' of _OneLayer is one layer \(Linear\), which cannot be cut"):
        trainer(hp.HetPipeStrategy(TWO, start_method="fork"), 2).fit(_OneLayer(), loader())


def test_shipped_clusters_are_known_by_name() -> None:
    cluster = hp.HetPipeStrategy("lab4").options.cluster
    assert cluster is not None
    assert len(cluster.devices) == 4


def test_several_nodes_without_a_launcher_for_them_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="start the script with torchrun or SLURM"):
        trainer(hp.HetPipeStrategy(), 2, num_nodes=2)


def test_an_optimizer_that_evaluates_the_step_itself_is_refused() -> None:
    class Searches(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    module = Searches()
    with pytest.raises(UnsupportedError, match="LBFGS cannot work in a pipeline"):
        trainer(pipeline(module, 1)).fit(module, loader())


def test_a_plan_for_another_model_is_refused() -> None:
    plan = hand_plan(nn.Sequential(nn.Linear(8, 4).double()), (torch.zeros(16, 8, dtype=torch.float64),), 1)
    module = Classifier()
    with pytest.raises(PlanError, match="made for another model"):
        trainer(hp.HetPipeStrategy(plan=plan)).fit(module, loader())


def test_a_batch_without_tensors_is_refused(tmp_path: Path) -> None:
    module = Classifier()
    with pytest.raises(hp.HetPipeError, match="holds no tensor with a first dimension"):
        trainer(pipeline(module, 1)).fit(module, [["a", "b"]])


def test_a_plan_that_gives_only_the_stages_is_read(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("cuts: [a.b, c]\ndevices: [x, y, z]\n")
    split = SplitByHand(("a.b", "c"), ("x", "y", "z"))
    assert read_plan(tmp_path / "plan.yaml") == split
    assert read_plan({"cuts": ["a.b", "c"], "devices": ["x", "y", "z"]}) == split
    assert read_plan("even") == SplitByHand()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"cuts": ["a"], "devices": ["x"]}, "1 cuts make 2 stages, but 1 devices are named: x"),
        ({"cuts": "a"}, "cuts of the plan is 'a': give a list of names"),
        ({"cuts": ["a"], "devises": ["x"]}, "unknown keys devises"),
    ],
)
def test_malformed_stages_are_refused(plan: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_plan(plan)


class Lamb(torch.optim.SGD):
    """Stands for what packages call so."""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(torch.optim.Adafactor, "rows, columns and norms"), (Lamb, "norms of whole weights")],
)
def test_optimizers_of_whole_weights_where_channels_are_shared(kind: Any, reason: str) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    refuse_optimizers([optimizer])
    with pytest.raises(
        UnsupportedError, match=rf"{kind.__name__} cannot train weights.*{reason}.*AdamW or SGD"
    ):
        refuse_optimizers([optimizer], shared_by_channels=True)
