"""What the recipes that measure plans share: models and clusters by name, and real runs of plans in turn."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

import lightning_hetpipe as hp
from lightning_hetpipe.errors import InfeasibleError
from lightning_hetpipe.planner.plan_cost import PlanCost
from lightning_hetpipe.profiling.device import Optimizer
from lightning_hetpipe.shipped import conf_dir
from lightning_hetpipe.trial import Trial
from lightning_hetpipe.turns import step_ratios, take_turns

EMULATED = ("lab4", "twins", "edge6", "whimpy5", "slowlink3")
SIDE = {"resnet18": 64, "resnet50": 64, "vgg11": 32, "vgg11_bn": 32, "vit_tiny": 32}  # pixels
AT_ONCE, WEIGHTS_AT_ONCE = 12, 800_000_000  # plans whose ranks are there at the same time; what they train


@dataclass(frozen=True)
class Measured:
    """What a plan did beside others.

    Attributes:
        trial: Its own steps.
        ratios: How long they took in each round, in steps of the first plan.
    """

    trial: Trial
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.ratios)

    @property
    def step_s(self) -> float:
        return self.trial.step_s


@dataclass(frozen=True)
class Bench:
    """One model on one cluster.

    Attributes:
        model, cluster_name: As in ``conf/model`` and ``conf/cluster``.
        batch_size: Samples per optimizer step.
        norm: What becomes of BatchNorm, as for ``hp.convert_norm``.
        profiled_samples: The largest micro-batch that is measured; 0: the batch.
    """

    model: str
    cluster_name: str
    batch_size: int
    norm: str = "keep"
    profiled_samples: int = 0

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

    @property
    def n_classes(self) -> int:
        return int(self.config.model.classes)

    def network(self) -> nn.Module:
        """The model, with the same weights every time."""
        torch.manual_seed(0)
        return hp.convert_norm(hydra.utils.instantiate(self.config.model.module), self.norm)

    @cached_property
    def profile(self) -> hp.Profile:
        """Measured here, or kept from an earlier measurement."""
        samples = self.profiled_samples or self.batch_size
        return profile(self.network(), self.shapes, self.cluster, samples)

    def run_in_turn(self, plans: Sequence[hp.Plan], rounds: int, steps: int = 2) -> list[Measured]:
        """`run_in_turn` with this model."""
        return run_in_turn(self.network(), self.shapes, self.n_classes, plans, rounds, steps)


def profile(
    network: nn.Module, shapes: Sequence[tuple[int, ...]], cluster: hp.Cluster, samples: int
) -> hp.Profile:
    """With the optimizer of a trial, for micro-batches of up to so many samples."""
    example = tuple(torch.randn(samples, *shape) for shape in shapes)
    sgd = Optimizer(torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9})
    return hp.profile(network, example, cluster, optimizer=sgd)


def run_in_turn(
    network: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    n_classes: int,
    plans: Sequence[hp.Plan],
    rounds: int,
    steps: int,
) -> list[Measured]:
    """Trains under each plan, one process per device, all in turn; equal plans are run once.

    Where there are more plans than may be there at once, they run in batches that all have the first plan.

    Returns:
        In the order of ``plans``, relative to the first one.
    """
    different: dict[object, hp.Plan] = {}
    for plan in plans:
        different.setdefault(identity(plan), plan)
    first, *others = different.values()
    found: dict[object, Measured] = {}
    n_weights = sum(each.numel() for each in network.parameters())
    room = max(1, min(AT_ONCE, WEIGHTS_AT_ONCE // max(1, n_weights)) - 1)
    for start in range(0, max(1, len(others)), room):
        batch = [first, *others[start : start + room]]
        trials = take_turns(network, shapes, n_classes, batch, rounds, steps)
        for plan, trial in zip(batch, trials, strict=True):
            found.setdefault(identity(plan), Measured(trial, step_ratios(trial, trials[0])))
    return [found[identity(plan)] for plan in plans]


def identity(plan: hp.Plan) -> object:
    """Equal for plans that do the same."""
    return plan.stages, plan.schedule, plan.in_flight, plan.micro_batch


def predicted_s(plan: hp.Plan, profile: hp.Profile) -> float:
    """The step that is predicted, optimizer included; of a plan by hand as well."""
    if plan.prediction is not None:
        return plan.prediction.step_s
    return hp.simulate(plan, profile).step_s + PlanCost(plan, profile).optimizer_s()


def alone(profile: hp.Profile, cluster: hp.Cluster, batch_size: int, **options: object) -> Iterator[hp.Plan]:
    """The whole model on each device on which it fits."""
    for device in cluster.devices:
        try:
            yield hp.plan(
                profile, cluster, batch_size, device_order=[device.name], baselines=False, **options
            )
        except InfeasibleError:
            continue
