"""Handwritten digits as small colour pictures; the images ship with scikit-learn, nothing is downloaded."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Subset, TensorDataset


class Digits(L.LightningDataModule):
    """1,797 digits, resized from 1x8x8 to 3x32x32: 1,437 to train, 360 to validate."""

    def __init__(self, batch_size: int = 64, size: int = 32, train_samples: int | None = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.size = size
        self.train_samples = train_samples

    def setup(self, stage: str) -> None:
        data = load_digits()
        images = torch.as_tensor(data.images, dtype=torch.float32)[:, None] / 16
        images = F.interpolate(images, size=(self.size, self.size), mode="bilinear", align_corners=False)
        images = ((images - images.mean()) / images.std()).expand(-1, 3, -1, -1).contiguous()
        self._split(TensorDataset(images, torch.as_tensor(data.target)), n_validation=360)

    def _split(self, dataset: Any, n_validation: int) -> None:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
        self.validation = Subset(dataset, order[:n_validation])
        self.training = Subset(dataset, order[n_validation:][: self.train_samples])

    def train_dataloader(self) -> DataLoader[Any]:
        # BatchNorm over 1x1 pictures cannot take a last micro-batch of one sample.
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.validation, self.batch_size)


class CIFAR10(Digits):
    """CIFAR-10 from a folder that holds it, or downloaded when asked to."""

    def __init__(self, root: str, download: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.root = Path(root).expanduser()
        self.download = download

    def prepare_data(self) -> None:
        if not self.download and not self.root.is_dir():
            raise FileNotFoundError(f"CIFAR-10 is not in {self.root}: set data.root, or data.download=true")
        self._pictures()

    def setup(self, stage: str) -> None:
        self._split(self._pictures(), n_validation=5000)

    def _pictures(self) -> Any:
        from torchvision.datasets import CIFAR10 as Pictures
        from torchvision.transforms import v2

        steps = [
            v2.ToImage(),
            v2.Resize(self.size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
        ]
        return Pictures(str(self.root), transform=v2.Compose(steps), download=self.download)
