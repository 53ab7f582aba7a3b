"""Small models of the shapes that pipelines stumble over, and a module that trains any of them."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18, vgg
from torchvision.models.resnet import BasicBlock, ResNet

CLASSES = 7
WORDS = 11


class DenseSkips(nn.Module):
    """Every block reads all earlier ones, so that most cuts are crossed by several skips."""

    def __init__(self, channels: int = 4, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels * (i + 1)),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels * (i + 1), channels, 3, padding=1),
            )
            for i in range(blocks)
        )
        self.head = nn.Linear(channels * (blocks + 1), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for block in self.blocks:
            features.append(block(torch.cat(features, 1)))
        out: Tensor = self.head(torch.cat(features, 1).mean((2, 3)))
        return out


class Encoder(nn.Module):
    """Token and position embeddings, attention blocks, one class per sequence."""

    def __init__(self, width: int = 12, length: int = 5, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(torch.randn(1, length, width) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 3, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


class Tied(nn.Module):
    """A language model whose first and last layer are one parameter."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, WORDS)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.words(tokens)).mean(1))
        return out


def narrow_resnet() -> nn.Module:
    """ResNet-18's graph with a hundredth of its weights."""
    net = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=CLASSES)
    return narrowed(net, 8)


def narrow_vgg() -> nn.Module:
    """VGG-11's graph, with BatchNorm, at a sixteenth of its width."""
    widths = [c if c == "M" else c // 16 for c in vgg.cfgs["A"]]  # type: ignore[operator]
    net = vgg.VGG(vgg.make_layers(widths, batch_norm=True), CLASSES, dropout=0.0)  # type: ignore[arg-type]
    net.avgpool = nn.AdaptiveAvgPool2d(1)
    net.classifier[0] = nn.Linear(32, 24)
    net.classifier[3] = nn.Linear(24, 24)
    net.classifier[6] = nn.Linear(24, CLASSES)
    return net


def narrowed(net: nn.Module, factor: int) -> nn.Module:
    """Divides every channel count but the image's and the classes' by ``factor``."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                inputs = child.in_channels if child.in_channels == 3 else child.in_channels // factor
                new: nn.Module = nn.Conv2d(
                    inputs,
                    child.out_channels // factor,
                    child.kernel_size,  # type: ignore[arg-type]
                    child.stride,  # type: ignore[arg-type]
                    child.padding,  # type: ignore[arg-type]
                    bias=False,
                )
            elif isinstance(child, nn.BatchNorm2d):
                new = nn.BatchNorm2d(child.num_features // factor)
            elif isinstance(child, nn.GroupNorm):
                new = nn.GroupNorm(child.num_groups, child.num_channels // factor)
            elif isinstance(child, nn.Linear):
                new = nn.Linear(child.in_features // factor, child.out_features)
            else:
                continue
            setattr(module, name, new)
    return net


def images(n: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, size, size), torch.randint(0, CLASSES, (n,))


def sentences(n: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, WORDS, (n, 5)), torch.randint(0, classes, (n,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    # 64 pixels leave four per channel at the end: two samples of one pixel make batch norm ill-conditioned.
    "resnet18": (narrow_resnet, lambda n: images(n, 64)),
    "vgg11_bn": (narrow_vgg, lambda n: images(n, 32)),
    "skips": (DenseSkips, lambda n: images(n, 6)),
    "encoder": (Encoder, lambda n: sentences(n, CLASSES)),
    "tied": (Tied, lambda n: sentences(n, WORDS)),
}
FULL_SIZE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "resnet18": (lambda: resnet18(num_classes=CLASSES), lambda n: images(n, 64)),
    "vgg11_bn": (
        lambda: vgg.VGG(vgg.make_layers(vgg.cfgs["A"], batch_norm=True), CLASSES, dropout=0.0),
        lambda n: images(n, 32),
    ),
}


class Classifier(pl.LightningModule):
    """What a user writes; nothing in it knows of pipelines."""

    def __init__(self, net: nn.Module, lr: float = 0.05) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-3)


def loader(data: tuple[Tensor, Tensor], batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data), batch_size=batch_size, shuffle=False)


def build(name: str, full_size: bool = False) -> tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]]]:
    """The named model with weights that depend on its name only, in double precision."""
    make, data = (FULL_SIZE if full_size else MODELS)[name]
    torch.manual_seed(len(name))
    net = make().double()

    def doubled(n: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(n)
        x, y = data(n)
        return (x.double() if x.is_floating_point() else x), y

    return net, doubled
