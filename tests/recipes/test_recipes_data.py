import sys
from pathlib import Path

import pytest
import torch

import lightning_hetpipe as hp

RECIPES = Path(hp.__file__).parent.parent / "recipes"


@pytest.fixture
def recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    yield
    for name in ("digits", "classifier"):
        sys.modules.pop(name, None)


def test_digits_are_colour_pictures_whose_split_does_not_overlap_and_does_not_change(recipes):
    from digits import Digits

    first, second = Digits(train_samples=100), Digits()
    for data in (first, second):
        data.setup("fit")
    images, labels = next(iter(first.val_dataloader()))
    assert images.shape == (64, 3, 32, 32)
    assert labels.max() < 10
    assert len(first.training) == 100
    assert len(second.training) == 1437
    assert not set(second.training.indices) & set(second.validation.indices)
    assert first.validation.indices == second.validation.indices


def test_cifar10_is_never_downloaded_unasked(recipes, tmp_path):
    from digits import CIFAR10

    with pytest.raises(FileNotFoundError, match=r"CIFAR-10 is not in .*data.download=true"):
        CIFAR10(root=str(tmp_path / "none")).prepare_data()


def test_the_recipe_s_classifier_learns_digits_on_one_device(recipes):
    import lightning as L
    from classifier import Classifier
    from digits import Digits
    from torch import nn

    L.seed_everything(0, verbose=False)
    network = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, 10))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(network, lr=0.02), Digits())
    assert trainer.callback_metrics["val_acc"] > torch.tensor(0.9)
