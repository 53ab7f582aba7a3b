"""python recipes/vgg.py

Trains VGG-11 with its full classifier (129 M weights) on handwritten digits over four unequal devices.

    python recipes/vgg.py cluster=twins max_epochs=2
    python recipes/vgg.py hetpipe.plan=even
    python recipes/vgg.py -m micro_batch=8,16,32 max_epochs=1
"""

import hydra
import torchvision
from classifier import Classifier
from common import train
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="../conf", config_name="vgg")
def main(config: DictConfig) -> dict[str, float]:
    network = getattr(torchvision.models, config.network)(num_classes=config.num_classes)
    return train(config, Classifier(network, lr=config.lr))


if __name__ == "__main__":
    main()
