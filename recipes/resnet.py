"""python recipes/resnet.py

Trains ResNet-18 on handwritten digits over four unequal devices, emulated on this CPU.

    python recipes/resnet.py cluster=twins max_epochs=3
    python recipes/resnet.py -m micro_batch=4,8,16 max_epochs=1
    python recipes/resnet.py data=cifar10 data.root=/data/cifar10
"""

import hydra
import torchvision
from classifier import Classifier
from common import train
from omegaconf import DictConfig
from torch import nn
from torchvision.models import ResNet


@hydra.main(version_base="1.3", config_path="../conf", config_name="resnet")
def main(config: DictConfig) -> dict[str, float]:
    network = getattr(torchvision.models, config.network)(num_classes=config.num_classes)
    if config.data.size <= 64:
        keep_resolution(network)
    return train(config, Classifier(network, lr=config.lr))


def small_picture_network(name: str, num_classes: int = 10) -> nn.Module:
    """A torchvision model for pictures of 32 pixels."""
    network: nn.Module = getattr(torchvision.models, name)(num_classes=num_classes)
    if isinstance(network, ResNet):
        keep_resolution(network)
    return network


def keep_resolution(network: ResNet) -> None:
    """Begins with a 3x3 convolution and no pooling, as is usual for small pictures.

    The stem for 224 pixels would leave one pixel per channel at the end of a picture of 32.
    """
    network.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    network.maxpool = nn.Identity()


if __name__ == "__main__":
    main()
