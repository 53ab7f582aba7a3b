"""Runs in which a rank holds several stages: weights, clipping, checkpoints, evaluation, BatchNorm."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.plans import Plan, Stage
from lightning_hetpipe.report.table import measured_table
from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
from lightning_hetpipe.timeline import Timeline
from lightning_hetpipe.tracing import trace
from tests.helpers.pipelines import QUIET, Classifier, assert_same_weights, loader, trainer

pytestmark = [
    pytest.mark.filterwarnings(each)
    for each in (*QUIET, "ignore:Be aware that when using .ckpt_path., callbacks")
]

# Devices in the order of stages; d0 is rank 0.
PLACES = {"a b a b": "d1 d0 d1 d0", "a b a": "d0 d1 d0", "a b c a": "d0 d1 d2 d0", "a b a c": "d2 d1 d2 d0"}


class Normalised(Classifier):
    """With BatchNorm, whose buffers must follow."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16).double())
        self.net.insert(4, nn.BatchNorm1d(16).double())


def plan_of(net: nn.Module, place: str, micro_batch: int = 6) -> Plan:
    with torch.random.fork_rng(devices=[]):
        graph = trace(net, (torch.zeros(16, 8, dtype=torch.float64),), {}).graph
    names = PLACES[place].split()
    edges = [round(i * len(graph) / len(names)) for i in range(len(names) + 1)]
    return Plan(
        cluster=Cluster("hand", tuple(Device(name) for name in sorted(set(names)))),
        layer_names=tuple(layer.name for layer in graph.layers),
        stages=tuple(Stage(a, b, (name,)) for a, b, name in zip(edges, edges[1:], names)),
        batch_size=16,
        micro_batch=micro_batch,
        schedule="interleaved",
        in_flight=(3, 3, 2, 1)[-len(names) :],
    )


def fit(module: Classifier, place: str, *, ckpt: Any = None, **options: Any) -> L.Trainer:
    micro_batch = options.pop("micro_batch", 6)
    plan = plan_of(module.net, place, micro_batch)
    strategy = HetPipeStrategy(plan=plan, start_method="fork", timeout_s=30)
    run = trainer(strategy, len(plan.cluster.devices), **options)
    run.fit(module, loader(), loader(20, seed=1), ckpt_path=ckpt)
    return run


def fit_one(module: Classifier, *, ckpt: Any = None, **options: Any) -> L.Trainer:
    run = trainer(**options)
    run.fit(module, loader(), loader(20, seed=1), ckpt_path=ckpt)
    return run


@pytest.mark.parametrize("micro_batch", [6, 8], ids=["ragged", "few"])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_of_several_stages_trains_as_one_device(place: str, micro_batch: int) -> None:
    torch.manual_seed(0)
    whole, split = Classifier(), Classifier()
    split.load_state_dict(whole.state_dict())
    one = fit_one(whole, gradient_clip_val=0.05)
    run = fit(split, place, micro_batch=micro_batch, gradient_clip_val=0.05)
    assert_same_weights(whole, split)
    for name in ("train_loss_epoch", "val_loss"):
        torch.testing.assert_close(run.callback_metrics[name], one.callback_metrics[name], rtol=1e-6, atol=0)


def test_running_statistics_of_both_stages_of_a_rank_come_home() -> None:
    torch.manual_seed(0)
    whole, split = Normalised(), Normalised()
    split.load_state_dict(whole.state_dict())
    fit_one(whole)
    fit(split, "a b a", micro_batch=16)
    assert_same_weights(whole, split)


def test_a_checkpoint_of_interleaved_stages_goes_on_under_one_device_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second, third = Classifier(), Classifier(), Classifier()
    start = {name: value.clone() for name, value in first.state_dict().items()}
    save = ModelCheckpoint(tmp_path, "end", save_last=False)
    fit(first, "a b a b", max_epochs=1, enable_checkpointing=True, callbacks=[save])
    fit_one(second, ckpt=tmp_path / "end.ckpt", max_epochs=2)
    third.load_state_dict(start)
    fit_one(third, max_epochs=2)
    assert_same_weights(third, second)
    fit(first, "a b c a", ckpt=tmp_path / "end.ckpt", max_epochs=2)
    assert_same_weights(third, first)


def test_the_report_has_a_row_for_each_stage_and_the_measurement_one_for_each_rank() -> None:
    plan = plan_of(Classifier().net, "a b a")
    assert plan.table().count("d0 (rank 0)") == 2
    timeline = Timeline((), 2, "simulated", peak_memory_bytes=(1, 2))
    names = list(measured_table(plan, timeline, timeline).columns[0].cells)
    assert [name for name in names if "busy" in name] == ["stages 0, 2 on d0: busy", "stage 1 on d1: busy"]
