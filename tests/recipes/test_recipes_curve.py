"""The recipes' training in single precision, beside the same micro-batches on one device."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchvision

import lightning_hetpipe as hp
from tests.helpers.pipelines import QUIET
from tests.helpers.ranks import run_ranks

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS, BATCH, MICRO_BATCH = 20, 32, 8
pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]


class Curve(L.Callback):
    """Keeps each step's loss on rank 0."""

    def __init__(self, path: Path) -> None:
        self.path, self.losses = path, []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            torch.save(self.losses, self.path)


def batches() -> list[Any]:
    from digits import Digits

    data = Digits(BATCH)
    data.setup("fit")
    return [data.training[i] for i in range(STEPS * BATCH)]


def one_device(rank: int, network: torch.nn.Module, samples: list[Any]) -> list[float]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)
    losses = []
    for batch in torch.utils.data.DataLoader(samples, BATCH):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(*(part.split(MICRO_BATCH) for part in batch)):
            loss = F.cross_entropy(network(x), y) * (len(x) / BATCH)
            loss.backward()
            total += loss.item()
        optimizer.step()
        schedule.step()
        losses.append(total)
    return losses


@pytest.mark.timeout(240)
def test_the_loss_curve_of_twenty_steps_is_that_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(RECIPES), *sys.path])
    from classifier import Classifier

    samples = batches()
    torch.manual_seed(0)
    network = torchvision.models.resnet18(num_classes=10)
    (expected,) = run_ranks(1, one_device, network, samples, timeout_s=200)
    strategy = hp.HetPipeStrategy(
        cluster={"name": "pair", "devices": [{"name": "a"}, {"name": "b"}]},
        plan={"cuts": ["layer3.0.conv1"]},
        micro_batch=MICRO_BATCH,
        start_method="fork",
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[Curve(tmp_path / "losses.pt")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(Classifier(network, lr=0.05), torch.utils.data.DataLoader(samples, BATCH))
    losses = torch.load(tmp_path / "losses.pt")
    print("largest difference", max(abs(a - b) for a, b in zip(losses, expected)))
    assert losses == pytest.approx(expected, abs=1e-4)
