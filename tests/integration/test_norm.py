"""Running statistics after a run whose batches come in micro-batches, measuring and planning included."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.plans import micro_batch_sizes
from tests.helpers.models import CLASSES, Classifier, images, loader
from tests.helpers.pipelines import trainer

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


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, CLASSES)
    ).double()


def run(folder: Path, net: nn.Module, epochs: int, norm: str, *, resume: Path | None = None, **more) -> None:
    """Trains on 14 samples in batches of 8: micro-batches of 3 leave slices of 3, 3 and 2."""
    x, y = images(14, 6)
    options = {"plan": {"cuts": ["2"]}, "micro_batch": 3} | more
    trainer = pl.Trainer(
        strategy=HetPipeStrategy(cluster=CLUSTER, norm=norm, start_method="fork", timeout_s=60, **options),
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        precision="64-true",
        logger=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    torch.manual_seed(4)
    trainer.fit(Classifier(net), loader((x.double(), y), 8), ckpt_path=resume)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_whose_batchnorm_became_groupnorm_goes_on_from_its_own_file(tmp_path: Path) -> None:
    torch.manual_seed(9)
    whole, rest = small_net(), small_net()
    torch.manual_seed(9)
    run(tmp_path / "whole", whole, 2, "group")
    torch.manual_seed(9)
    run(tmp_path / "rest", rest, 2, "group", resume=tmp_path / "whole" / "epoch=0.ckpt")
    assert type(rest[1]) is nn.GroupNorm
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(rest.state_dict()[name], value, atol=1e-9, rtol=0)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_groupnorm_takes_up_a_file_that_was_written_with_batchnorm(tmp_path: Path) -> None:
    torch.manual_seed(9)
    run(tmp_path / "first", small_net(), 1, "keep")
    net = small_net()
    run(tmp_path / "rest", net, 1, "group", resume=tmp_path / "first" / "epoch=0.ckpt")
    saved = torch.load(tmp_path / "first" / "epoch=0.ckpt", weights_only=True)["state_dict"]
    assert type(net[1]) is nn.GroupNorm
    torch.testing.assert_close(net[1].weight, saved["net.1.weight"])


@pytest.mark.parametrize("micro_batch", [2, 3, 4])
def test_a_batch_that_is_not_a_multiple_leaves_batchnorm_no_single_sample(
    micro_batch: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    x, y = torch.randn(13, 3, dtype=torch.float64), torch.randint(0, CLASSES, (13,))
    strategy = HetPipeStrategy(
        cluster=CLUSTER, plan={"cuts": ["2"]}, micro_batch=micro_batch, start_method="fork", timeout_s=60
    )
    data = loader((x, y), 13)  # 13 = 1 modulo each of the sizes
    trainer(strategy, 2, max_epochs=1, default_root_dir=tmp_path).fit(Classifier(net), data)
    assert int(net[1].num_batches_tracked) == len(micro_batch_sizes(13, micro_batch))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(
        ValueError, match="norm='share' is unknown; known are keep, deferred, sync, group, freeze"
    ):
        HetPipeStrategy(norm="share")  # type: ignore[arg-type]
