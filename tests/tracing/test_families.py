"""Every torchvision classification family is cut at every legal place and stays what it was."""

from collections.abc import Callable

import pytest
import torch
import torchvision.models as tv
from torch import nn

from tests.helpers.models import narrow_vgg
from tests.helpers.staged import assert_parity


def small_alexnet() -> nn.Module:
    net = tv.AlexNet(num_classes=5)
    net.classifier[1], net.classifier[4] = nn.Linear(256 * 6 * 6, 16), nn.Linear(16, 16)
    net.classifier[6] = nn.Linear(16, 5)
    return net


FAMILIES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "alexnet": (lambda: small_alexnet(), 64),
    "convnext": (
        lambda: tv.ConvNeXt([tv.convnext.CNBlockConfig(8, 16, 2), tv.convnext.CNBlockConfig(16, None, 1)]),
        32,
    ),
    "densenet": (lambda: tv.DenseNet(8, (3, 3, 2), 16, num_classes=5), 32),
    "efficientnet_b0": (lambda: tv.efficientnet_b0(num_classes=5), 32),
    "googlenet": (lambda: tv.googlenet(num_classes=5, aux_logits=False, init_weights=False), 32),
    "googlenet with auxiliary heads": (lambda: tv.googlenet(num_classes=5, init_weights=False), 64),
    "inception_v3": (lambda: tv.inception_v3(num_classes=5, aux_logits=False, init_weights=False), 75),
    "maxvit": (
        lambda: tv.MaxVit((64, 64), 8, 2, [8, 16], [1, 1], 4, 0.1, num_classes=5),
        64,
    ),
    "mnasnet0_5": (lambda: tv.mnasnet0_5(num_classes=5), 32),
    "mobilenet_v2": (lambda: tv.mobilenet_v2(num_classes=5, width_mult=0.25), 32),
    "mobilenet_v3": (lambda: tv.mobilenet_v3_small(num_classes=5), 32),
    "regnet_y_400mf": (lambda: tv.regnet_y_400mf(num_classes=5), 32),
    "resnet18": (lambda: tv.resnet18(num_classes=5), 32),
    "resnext50": (lambda: tv.ResNet(tv.resnet.Bottleneck, [1, 1, 1, 1], 5, groups=4, width_per_group=4), 32),
    "shufflenet": (lambda: tv.shufflenet_v2_x0_5(num_classes=5), 32),
    "squeezenet1_1": (lambda: tv.squeezenet1_1(num_classes=5), 64),
    "swin": (
        lambda: tv.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.1),
        32,
    ),
    "swin_v2": (
        lambda: tv.SwinTransformer(
            [4, 4], 8, [2, 1], [2, 2], [4, 4], num_classes=5,
            block=tv.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=tv.swin_transformer.PatchMergingV2,
        ),
        32,
    ),
    "vgg11_bn": (narrow_vgg, 32),
    "vit": (lambda: tv.VisionTransformer(32, 16, 2, 2, 16, 32, dropout=0.1, num_classes=5), 32),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_a_family_cut_everywhere_computes_what_it_does_uncut(family: str) -> None:
    make, size = FAMILIES[family]
    traced = assert_parity(make, (torch.randn(2, 3, size, size, dtype=torch.float64),), modes=(True,))
    names = [layer.name for layer in traced.graph.layers]
    assert len(set(names)) == len(names)
    used = traced.parameters_of(0, len(names)) | traced.buffers_of(0, len(names))
    assert used == set(traced.module.state_dict())


@pytest.mark.parametrize(
    "family", ["googlenet with auxiliary heads", "mobilenet_v3", "vit", "swin", "maxvit"]
)
@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_evaluation_equals_the_module_in_evaluation(family: str) -> None:
    make, size = FAMILIES[family]
    args = (torch.randn(2, 3, size, size, dtype=torch.float64),)
    assert_parity(make, args, modes=(False,), partitions=[(0.3, 0.7)])


@pytest.mark.parametrize("family", ["resnet18", "densenet", "swin"])
def test_a_few_stages_equal_uncut(family: str) -> None:
    make, size = FAMILIES[family]
    args = (torch.randn(3, 3, size, size, dtype=torch.float64),)
    partitions = [(0.5,), (0.2, 0.45), (0.1, 0.55, 0.8)]
    assert_parity(make, args, modes=(True,), partitions=partitions, everywhere=False)
