"""The graphs of torchvision's networks, with few channels and small images, without randomness."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer, efficientnet, mobilenet_v2
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from tests.helpers.models import CLASSES, images, narrow_resnet, narrow_vgg, narrowed


def _resnet50() -> nn.Module:
    return narrowed(ResNet(Bottleneck, [3, 4, 6, 3], num_classes=CLASSES), 16)


def _group_norm_resnet() -> nn.Module:
    """ResNet-18 with four groups of channels in every normalisation."""
    net = ResNet(BasicBlock, [2, 2, 2, 2], CLASSES, norm_layer=lambda channels: nn.GroupNorm(4, channels))
    return narrowed(net, 8)


def _mobilenet() -> nn.Module:
    return mobilenet_v2(width_mult=0.25, num_classes=CLASSES, dropout=0.0)


def _efficientnet() -> nn.Module:
    settings, last = efficientnet._efficientnet_conf("efficientnet_b0", width_mult=0.2, depth_mult=1.0)
    return efficientnet.EfficientNet(
        settings, 0.0, stochastic_depth_prob=0.0, num_classes=CLASSES, last_channel=last
    )


def _vit() -> nn.Module:
    net = VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=6, hidden_dim=48, mlp_dim=40, num_classes=CLASSES
    )
    nn.init.normal_(net.heads.head.weight, std=0.1)  # zero at first: nothing behind it would learn
    return net


# Name -> how it is made, and the size of its images. Networks with BatchNorm keep four pixels at the end.
ZOO: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (narrow_resnet, 64),
    "resnet50": (_resnet50, 64),
    "vgg11_bn": (narrow_vgg, 32),
    "mobilenet_v2": (_mobilenet, 64),
    "efficientnet_b0": (_efficientnet, 64),
    "group_norm_resnet": (_group_norm_resnet, 32),
    "vit": (_vit, 16),
}


def pictures(name: str) -> Callable[[int], tuple[Tensor, Tensor]]:
    """What makes so many images and labels for a network."""
    return lambda n: images(n, ZOO[name][1])


def network(name: str) -> nn.Module:
    """The named one in double precision, with weights that depend on its name only."""
    torch.manual_seed(len(name))
    return ZOO[name][0]().double()
