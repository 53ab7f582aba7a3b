"""A limit that the prediction keeps to is enough for the run; one below it is refused at planning."""

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetpipe as hp
from lightning_hetpipe.cluster import Cluster, Device, Emulation, Link
from lightning_hetpipe.errors import InfeasibleError, MemoryLimitError
from tests.helpers.pipelines import QUIET, trainer

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

BATCH = 16


class Pictures(L.LightningModule):
    """Convolutions with large activations, then layers with large weights; 20 to 60 MB on each rank."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 16, 3, padding=1),
            nn.Flatten(),
            nn.Linear(16 * 24 * 24, 256),
            nn.ReLU(),
            nn.Linear(256, 4),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=1e-4)
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def cluster_of(limits: list[int | None]) -> Cluster:
    devices = tuple(
        Device(f"d{i}", memory_bytes=limit, emulation=Emulation(1.0, limit)) for i, limit in enumerate(limits)
    )
    return Cluster("limited", devices, (Link(1e-4, 1e9, emulated=True),))


def fit(cluster: Cluster, schedule: str, optimizer: str, cuts: list[str]) -> hp.HetPipeStrategy:
    torch.manual_seed(0)
    strategy = hp.HetPipeStrategy(
        cluster=cluster,
        plan={"cuts": cuts, "devices": ["d1", "d0"]},
        schedule=schedule,
        micro_batch=4,
        start_method="fork",
        timeout_s=60,
    )
    samples = TensorDataset(torch.randn(3 * BATCH, 3, 48, 48), torch.randint(4, (3 * BATCH,)))
    trainer(strategy, 2, max_epochs=1).fit(Pictures(optimizer), DataLoader(samples, BATCH))
    return strategy


COUNTERS_BYTES = 2**20  # the kernel counts the pages of each thread in steps


@pytest.mark.parametrize(("schedule", "optimizer"), [("gpipe", "adam"), ("1f1b", "sgd")])
def test_a_run_needs_what_was_predicted_and_no_less_is_accepted(schedule: str, optimizer: str) -> None:
    cuts = ["4"]
    free = fit(cluster_of([None, None]), schedule, optimizer, cuts)
    assert free.plan is not None
    assert free.plan.prediction is not None
    assert free.timeline is not None
    predicted = free.plan.prediction.memory_bytes
    for need, used in zip(predicted, free.timeline.peak_memory_bytes):
        assert abs(need - used) <= 0.1 * used, (predicted, free.timeline.peak_memory_bytes)

    order = [device.name for device in free.plan.cluster.devices]
    limits = dict(zip(order, predicted))
    roomy = fit(cluster_of([round(1.05 * limits[f"d{i}"]) for i in range(2)]), schedule, optimizer, cuts)
    assert roomy.timeline is not None
    assert roomy.plan is not None
    for device, used in zip(roomy.plan.cluster.devices, roomy.timeline.peak_memory_bytes):
        assert used <= 1.05 * limits[device.name] + COUNTERS_BYTES

    tight = cluster_of([round(0.9 * limits["d0"]), None])
    with pytest.raises(InfeasibleError, match=r"(?s)no plan for a batch of 16 fits.*1\. more memory.*2\. an"):
        fit(tight, schedule, optimizer, cuts)


class Pooled(Pictures):
    """Hardly needs memory beside its batch."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.net = nn.Sequential(nn.AvgPool2d(64), nn.Flatten(), nn.Linear(3 * 4 * 4, 8), nn.Linear(8, 4))


def test_the_batch_counts_against_the_limit_of_the_rank_that_reads_it() -> None:
    samples = TensorDataset(
        torch.randn(BATCH, 3, 256, 256).repeat(4, 1, 1, 1), torch.randint(4, (4 * BATCH,))
    )

    def run(plan: Any, cluster: Cluster) -> hp.HetPipeStrategy:
        strategy = hp.HetPipeStrategy(plan=plan, cluster=cluster, start_method="fork", timeout_s=60)
        trainer(strategy, 2, max_epochs=2).fit(Pooled(), DataLoader(samples, 4 * BATCH))
        return strategy

    free = run({"cuts": ["2"], "devices": ["d1", "d0"]}, cluster_of([None, None])).plan
    assert free is not None
    limits = {"d0": 20 * 2**20, "d1": None}  # a batch has 48 MiB
    devices = tuple(
        replace(each, memory_bytes=limits[each.name], emulation=Emulation(1.0, limits[each.name]))
        for each in free.cluster.devices
    )
    limited = replace(free.cluster, devices=devices)
    with pytest.raises((MemoryLimitError, RuntimeError), match="allocate memory"):
        run(replace(free, cluster=limited, prediction=None), limited)
