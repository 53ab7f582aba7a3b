"""Real Trainers: what is written under one plan goes on under another, or without this package."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.plans import Plan, Stage
from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
from lightning_hetpipe.tracing import trace

BATCH = 8


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers: list[nn.Module] = [nn.Linear(5, 12)]
        for _ in range(3):
            layers += [nn.Tanh(), nn.Linear(12, 12)]
        self.net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(12, 3)).double()
        self.temperature = nn.Parameter(torch.ones(()).double())  # trains on rank 0, outside the pipeline
        self.save_hyperparameters()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) * self.temperature, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def data() -> DataLoader[Any]:
    torch.manual_seed(5)
    return DataLoader(TensorDataset(torch.randn(28, 5).double(), torch.randint(0, 3, (28,))), BATCH)


def plan(n: int) -> Plan:
    """The model in ``n`` stages of about as many layers; rank 0 holds the last one."""
    graph = trace(Model().net, (torch.zeros(BATCH, 5).double(),), {}).graph
    starts = [len(graph) * stage // n for stage in range(n)]
    return Plan(
        cluster=Cluster("test", tuple(Device(f"d{rank}") for rank in range(n))),
        layer_names=tuple(layer.name for layer in graph.layers),
        stages=tuple(
            Stage(start, stop, (f"d{(stage + 1) % n}",))
            for stage, (start, stop) in enumerate(zip(starts, [*starts[1:], len(graph)]))
        ),
        batch_size=BATCH,
        micro_batch=3,
        schedule="1f1b",
        in_flight=tuple(range(n, 0, -1)),
    )


def trainer(n: int, folder: Path, epochs: int, callbacks: tuple[Any, ...] = (), **options: Any) -> pl.Trainer:
    """A Trainer of ``n`` stages; of one ordinary device for 0."""
    strategy: Any = "auto"
    if n:
        form = options.pop("checkpoint", "file")
        strategy = HetPipeStrategy(plan=plan(n), start_method="fork", timeout_s=30, checkpoint=form)
    return pl.Trainer(
        accelerator="cpu",
        devices=max(n, 1),
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.3,
        **options,
    )


def fit(
    n: int, folder: Path, epochs: int, *, resume: Path | None = None, **more: Any
) -> tuple[Model, pl.Trainer]:
    model, run = Model(), trainer(n, folder, epochs, **more)
    run.fit(model, data(), data(), ckpt_path=resume)
    return model, run


def assert_close(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=lambda text: f"{path}: {text}")
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_close(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_close(left, right, f"{path}.{index}")
    elif isinstance(one, float):
        assert one == pytest.approx(other), path
    else:
        assert one == other, path


pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's; those of this package are logged


@pytest.mark.parametrize("ema", [False, True])
def test_training_goes_on_from_four_stages_to_two_to_one_device_and_back(tmp_path, ema):
    def callbacks() -> tuple[Any, ...]:
        return (EMAWeightAveraging(decay=0.7),) if ema else ()

    alone = tmp_path / "alone"
    expected, reference = fit(0, alone, 4, callbacks=callbacks())
    resume = None
    for epochs, n in enumerate((4, 2, 0, 3), start=1):
        folder = tmp_path / f"{epochs}"
        model, run = fit(n, folder, epochs, resume=resume, callbacks=callbacks())
        resume = folder / f"epoch={epochs - 1}.ckpt"
        assert [each.name for each in folder.iterdir()] == [resume.name]
        saved = torch.load(resume, weights_only=True)
        saved.pop("hetpipe_rng", None)
        saved.pop("callbacks")
        wanted = torch.load(alone / resume.name, weights_only=True)
        wanted.pop("callbacks")
        assert_close(saved, wanted)
    assert_close(dict(model.state_dict()), dict(expected.state_dict()))
    assert_close(dict(run.callback_metrics), dict(reference.callback_metrics))
