"""Running statistics after a run whose batches come in micro-batches, measuring and planning included."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_hetpipe import HetPipeStrategy
from tests.helpers.models import CLASSES, Classifier, images, loader

CLUSTER = {"name": "pair", "devices": [{"name": "a", "speed": 0.5}, {"name": "b", "speed": 0.5}]}


def test_deferred_statistics_are_those_of_whole_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.BatchNorm2d(3, dtype=torch.float64),
        nn.Conv2d(3, 4, 3, dtype=torch.float64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 16, CLASSES, dtype=torch.float64),
    )
    x, y = images(22, 6)
    samples = (x.double() * 2 + 1, y)
    trainer = pl.Trainer(
        strategy=HetPipeStrategy(
            cluster=CLUSTER,
            plan={"cuts": ["1"]},
            micro_batch=3,
            norm="deferred",
            start_method="fork",
            timeout_s=60,
        ),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Classifier(net), loader(samples, 8))

    whole = nn.BatchNorm2d(3, dtype=torch.float64)
    for batch in samples[0].split(8):
        whole(batch)
    assert type(net[0]) is nn.BatchNorm2d
    assert int(net[0].num_batches_tracked) == 3
    torch.testing.assert_close(net[0].running_mean, whole.running_mean, atol=1e-10, rtol=0)
    torch.testing.assert_close(net[0].running_var, whole.running_var, atol=1e-10, rtol=0)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(
        ValueError, match="norm='share' is unknown; known are keep, deferred, sync, group, freeze"
    ):
        HetPipeStrategy(norm="share")  # type: ignore[arg-type]
