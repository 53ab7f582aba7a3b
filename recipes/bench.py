"""What the recipes that measure plans share: models and clusters by name, and a real run of a plan."""

from dataclasses import dataclass
from functools import cached_property

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

import lightning_hetpipe as hp
from lightning_hetpipe.profiling.device import Optimizer
from lightning_hetpipe.shipped import conf_dir
from lightning_hetpipe.trial import Trial, train_on_random_samples

EMULATED = ("lab4", "twins", "edge6", "whimpy5", "slowlink3")
SIDE = {"resnet18": 64, "resnet50": 64, "vgg11": 64, "vgg11_bn": 64, "vit_tiny": 32}  # pixels


@dataclass(frozen=True)
class Bench:
    """One model on one cluster.

    Attributes:
        model, cluster_name: As in ``conf/model`` and ``conf/cluster``.
        batch_size: Samples per optimizer step.
    """

    model: str
    cluster_name: str
    batch_size: int

    @cached_property
    def config(self) -> DictConfig:
        side = SIDE.get(self.model, 32)
        chosen = [f"model={self.model}", f"cluster={self.cluster_name}", f"model.inputs=[[3,{side},{side}]]"]
        with hydra.initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
            return hydra.compose("hetpipe", chosen)

    @cached_property
    def cluster(self) -> hp.Cluster:
        return hp.Cluster.from_mapping(OmegaConf.to_container(self.config.cluster, resolve=True))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self.config.model.inputs]

    def network(self) -> nn.Module:
        """The model, with the same weights every time."""
        torch.manual_seed(0)
        return hydra.utils.instantiate(self.config.model.module)

    @cached_property
    def profile(self) -> hp.Profile:
        """Measured here, or kept from an earlier measurement."""
        example = tuple(torch.randn(self.batch_size, *shape) for shape in self.shapes)
        sgd = Optimizer(torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9})  # that of a trial
        return hp.profile(self.network(), example, self.cluster, optimizer=sgd)

    def run(self, plan: hp.Plan, n_steps: int) -> Trial:
        """Trains under a plan, one process per device."""
        return train_on_random_samples(
            self.network(), self.shapes, int(self.config.model.classes), plan, n_steps
        )
