"""Whole networks, shared by channels, train as on one device: outputs, gradients, buffers, three steps."""

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

from tests.helpers.ranks import run_ranks
from tests.stage.parity import free_communication, parity


def _bottlenecks() -> nn.Module:
    return ResNet(Bottleneck, [2, 1, 1, 1], num_classes=5, width_per_group=16)


def _group_norm_resnet() -> nn.Module:
    return ResNet(
        torchvision.models.resnet.BasicBlock,
        [1, 1, 1, 1],
        5,
        norm_layer=lambda channels: nn.GroupNorm(8, channels),
    )


def _vgg() -> nn.Module:
    vgg = torchvision.models.vgg
    features = vgg.make_layers(vgg.cfgs["A"], batch_norm=True)
    classifier = [nn.Linear(512 * 7 * 7, 24), nn.ReLU(True), nn.Dropout(), nn.Linear(24, 16), nn.ReLU(True)]
    net = vgg.VGG(features, init_weights=False)
    net.classifier = nn.Sequential(*classifier, nn.Dropout(), nn.Linear(16, 5))
    return net


def _mobilenet() -> nn.Module:
    return torchvision.models.mobilenet_v2(width_mult=0.35, num_classes=5)


def _efficientnet() -> nn.Module:
    """The blocks of efficientnet_b0, narrower and fewer."""
    efficientnet = torchvision.models.efficientnet
    settings, last = efficientnet._efficientnet_conf("efficientnet_b0", width_mult=0.35, depth_mult=0.5)
    return efficientnet.EfficientNet(settings, 0.2, num_classes=5, last_channel=last)


def _vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=8, hidden_dim=32, mlp_dim=48, num_classes=5
    )


# network -> how it is made, its image size, the shares it is tried with
NETS = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=5), 40, (5, 2, 1)),
    "bottlenecks": (_bottlenecks, 40, (7, 1)),
    "vgg11_bn": (_vgg, 32, (5, 2, 1)),
    "mobilenet_v2": (_mobilenet, 40, (7, 1)),
    "efficientnet_b0": (_efficientnet, 40, (1, 1)),
    "group_norm_resnet": (_group_norm_resnet, 32, (5, 2, 1)),
    "vit": (_vit, 16, (5, 2, 1)),
}


def _train(rank: int, name: str, shares: tuple[int, ...]) -> tuple[dict[str, float], str]:
    make, size, _ = NETS[name]
    x = torch.randn(4, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = tuple(share / sum(shares) for share in shares)
    errors, layout = parity(rank, make, (x,), parts, free_communication(parts))
    return errors, layout.describe()


@pytest.mark.parametrize("name", NETS)
def test_a_shared_network_trains_as_on_one_device(name: str):
    shares = NETS[name][2]
    for errors, listing in run_ranks(len(shares), _train, name, shares, timeout_s=100):
        assert max(errors.values()) < 1e-9, f"{errors}\n{listing}"
        assert listing.count("local") + listing.count("column") + listing.count("heads") > 5, listing
