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


@hydra.main(version_base="1.3", config_path="../conf", config_name="resnet")
def main(config: DictConfig) -> dict[str, float]:
    network = getattr(torchvision.models, config.network)(num_classes=config.num_classes)
    return train(config, Classifier(network, lr=config.lr))


if __name__ == "__main__":
    main()
