"""A pipeline over several kinds of device trains like one device, in double precision.

Ranks are spawned: a forked one could not use a GPU. The same runs on CPUs alone show that the rest of
the set-up is right where no GPU is at hand.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_hetpipe import Cluster, Device, HetPipeStrategy
from tests.helpers.pipelines import (
    BATCH,
    QUIET,
    Classifier,
    assert_same_weights,
    hand_plan,
    loader,
    trainer,
)

pytestmark = [pytest.mark.filterwarnings(each) for each in QUIET]
N_GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(N_GPUS < 1, reason="needs a CUDA device")
needs_two_gpus = pytest.mark.skipif(N_GPUS < 2, reason="needs two CUDA devices")
STEPS = 3

CPU = Device("cpu")
GPU = Device("gpu", kind="cuda", index=0)
CLUSTERS = {
    "a cpu and a cpu": (CPU, replace(CPU, name="cpu2")),
    "a gpu that reads, and a cpu": (GPU, CPU),
    "a cpu that reads, and a gpu": (CPU, GPU),
    "two ranks on one gpu": (GPU, replace(GPU, name="gpu2")),
    "a gpu, a cpu, and the gpu again": (GPU, CPU, replace(GPU, name="gpu2")),
    "two gpus": (GPU, replace(GPU, name="gpu2", index=1)),
}
MARKS = {"a cpu and a cpu": (), "two gpus": (needs_two_gpus,)}


def strategy_on(devices: tuple[Device, ...], module: Classifier) -> HetPipeStrategy:
    plan = hand_plan(module.net, (torch.zeros(BATCH, 8, dtype=torch.float64),), len(devices))
    names = [device.name for device in devices]
    stages = tuple(
        replace(stage, devices=(names[(index + 1) % len(names)],)) for index, stage in enumerate(plan.stages)
    )
    plan = replace(plan, cluster=Cluster("kinds", devices), stages=stages)
    return HetPipeStrategy(plan=plan, start_method="spawn", timeout_s=60)


def fit(strategy: Any, module: Classifier, devices: int, **options: Any) -> dict[str, float]:
    run = trainer(strategy, devices, max_epochs=1, **options)
    run.fit(module, loader(BATCH * STEPS), loader(20, seed=1))
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "devices",
    [pytest.param(CLUSTERS[name], id=name, marks=MARKS.get(name, (needs_gpu,))) for name in CLUSTERS],
)
def test_devices_of_any_kind_train_like_one_device(devices: tuple[Device, ...]) -> None:
    torch.manual_seed(1)
    one, many = Classifier(), Classifier()
    many.load_state_dict(one.state_dict())
    alone = fit("auto", one, 1)
    # "auto" is what a user with one GPU and a CPU would leave in place.
    together = fit(strategy_on(devices, many), many, len(devices), accelerator="auto")
    assert together == pytest.approx(alone, rel=1e-9)
    assert_same_weights(one, many)
