"""Devices that share a stage train as one device does, in double precision.

A run of the suite covers each pair of settings at least once; ``HETPIPE_PARITY=all`` runs the product, with
all of torchvision's networks that `tests.stage.test_group_parity` tries without processes.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe import Cluster, Device, HetPipeStrategy, Plan
from lightning_hetpipe.plans import Split, Stage
from lightning_hetpipe.strategy import groups
from lightning_hetpipe.tracing import trace
from tests.helpers.models import Classifier, build, images, loader
from tests.helpers.parity import Recorder, assert_equal, assert_same_gradients, one_device, pairwise_cover
from tests.helpers.ranks import run_ranks
from tests.helpers.zoo import ZOO, network
from tests.stage.parity import free_communication

ALL = os.environ.get("HETPIPE_PARITY") == "all"
MODELS = ("encoder", *ZOO) if ALL else ("encoder", "resnet18", "vgg11_bn")
SPLITS: tuple[Split, ...] = ("channel", "batch")
POSITIONS = ("first", "middle", "last")
SHARES = ((1, 1), (7, 1), (5, 2, 1))
SCHEDULES = ("gpipe", "1f1b")
PRODUCT = list(itertools.product(MODELS, SPLITS, POSITIONS, SHARES, SCHEDULES))
CASES = PRODUCT if ALL else list(pairwise_cover(PRODUCT))
TIED: list[Any] = [("tied", "channel", "first", (1, 1), "1f1b"), ("tied", "batch", "last", (5, 2, 1), "1f1b")]
# With two samples of four pixels, fifty BatchNorms in a row make 1e-7 of the rounding. And steps that are too
# long make much of little: at 0.05, one device that takes the samples of its micro-batches in another order
# differs from itself by 4e-9 in the third step of mobilenet_v2; at 0.01 by 2e-11.
DEEP = ("resnet50", "mobilenet_v2", "efficientnet_b0")
BATCH, MICRO_BATCH, SAMPLES = 8, 3, 21  # micro-batches of 3, 3, 2; the last batch has 3, 2


@pytest.fixture
def free_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets channel groups share all that they can, however small it is; the ranks are forked."""

    def cost(plan: Plan, index: int) -> Any:
        return free_communication(plan.stages[index].shares)

    monkeypatch.setattr(groups, "_cost", cost)


def shared_plan(
    net: nn.Module, x: Tensor, split: Split, position: str, shares: tuple[int, ...], schedule: str
) -> Plan:
    """A group at a place of the pipeline; it holds the larger part of the model."""
    graph = trace(net, (x,), {}).graph
    n = len(graph)
    cuts = {"first": [0, 2 * n // 3, n], "middle": [0, n // 4, 3 * n // 4, n], "last": [0, n // 3, n]}
    names = iter([f"d{i}" for i in range(1, 9)])
    stages = []
    for index, (start, stop) in enumerate(itertools.pairwise(cuts[position])):
        last = stop == n
        if index == ("first", "middle", "last").index(position) - (position == "last"):
            members = [next(names) for _ in shares[last:]]
            members = [members[0], "d0", *members[1:]] if last else members
            parts = tuple(share / sum(shares) for share in shares)
            stages.append(Stage(start, stop, tuple(members), parts, split))
        else:
            stages.append(Stage(start, stop, ("d0" if last else next(names),)))
    devices = sorted(name for stage in stages for name in stage.devices)
    return Plan(
        cluster=Cluster("plain", tuple(map(Device, devices))),
        layer_names=tuple(layer.name for layer in graph.layers),
        stages=tuple(stages),
        batch_size=BATCH,
        micro_batch=MICRO_BATCH,
        schedule=schedule,
        in_flight=tuple(range(len(stages), 0, -1)),
    )


def run(plan: Plan, module: pl.LightningModule, data: Any, folder: Path, **options: Any) -> pl.Trainer:
    norm = options.pop("norm", "keep")
    trainer = pl.Trainer(
        strategy=HetPipeStrategy(plan=plan, start_method="fork", timeout_s=60, norm=norm),
        accelerator="cpu",
        devices=len(plan.cluster.devices),
        precision="64-true",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **({"max_epochs": 1, "enable_checkpointing": False} | options),
    )
    trainer.fit(module, data)
    return trainer


def made(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A network in double precision, and what it is trained with."""
    if name in ZOO:
        net = network(name)
        x, y = images(SAMPLES, 160 if name in DEEP else ZOO[name][1])
        return net, (x.double(), y)
    net, data = build(name)
    return net, data(SAMPLES)


@pytest.mark.timeout(600 if ALL else 180)
@pytest.mark.parametrize(("name", "split", "position", "shares", "schedule"), CASES + TIED)
def test_a_shared_stage_trains_as_one_device(
    name: str,
    split: Split,
    position: str,
    shares: tuple[int, ...],
    schedule: str,
    tmp_path: Path,
    free_links: None,
) -> None:
    net, samples = made(name)
    lr = 0.01 if name in DEEP else 0.05
    plan = shared_plan(net, samples[0][:MICRO_BATCH], split, position, shares, schedule)
    batches = list(zip(samples[0].split(BATCH), samples[1].split(BATCH)))
    ((losses, gradients, expected_state),) = run_ranks(
        1, one_device, net, batches, MICRO_BATCH, 1, lr, timeout_s=300
    )

    module = Classifier(net, lr)
    # Each member of a group that splits by samples has statistics of its own unless they are synchronised.
    norm = "sync" if split == "batch" else "keep"
    run(plan, module, loader(samples, BATCH), tmp_path, callbacks=[Recorder(tmp_path)], norm=norm)

    paths = [tmp_path / f"rank{i}.pt" for i in range(len(plan.cluster.devices))]
    ranks = [torch.load(path, weights_only=False) for path in paths]
    for rank_losses, _, _ in ranks:
        assert rank_losses == pytest.approx(losses, abs=1e-9)
    owners = ranks[0][2]
    assert bool(owners.shards) == (split == "channel")
    assert_same_gradients([recorded for _, recorded, _ in ranks], owners, gradients)
    state = module.state_dict()
    assert state.keys() == expected_state.keys()
    for key in state:
        assert_equal(key, state[key], expected_state[key])
