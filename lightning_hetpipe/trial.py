"""Trains a network on random samples of its shapes: how a plan is tried on this machine."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetpipe.callbacks import PipelineStatsMonitor
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
from lightning_hetpipe.timeline import Timeline

Sample = tuple[Tensor, ...]


@dataclass(frozen=True)
class Trial:
    """What a plan did.

    Attributes:
        step_s: Median time from one step's start to the next one's, all included but the first steps.
        timeline: The last step.
    """

    step_s: float
    timeline: Timeline


class _Classifier(L.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        *inputs, labels = batch
        return F.cross_entropy(self.network(*inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class _Repeated(Dataset[Sample]):
    """The same few samples, again and again."""

    def __init__(self, samples: Sequence[Tensor], length: int) -> None:
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return tuple(column[index % len(column)] for column in self._samples)


def train_on_random_samples(
    network: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    n_classes: int,
    plan: Plan,
    n_steps: int,
    *,
    progress_bar: bool = True,
) -> Trial:
    """Runs ``n_steps`` optimizer steps of a classification under a plan, one process per device.

    Args:
        network: Takes one argument per shape, returns logits of shape ``[batch, n_classes]``.
        shapes: One sample of each argument, without the batch dimension.
        n_steps: Two at least: a step lasts until the next one starts. Of five or more, three warm up.
        progress_bar: Whether Lightning shows one, on the standard output.
    """
    if n_steps < 2:
        raise ValueError(f"steps={n_steps}: give at least 2, a step lasts until the next one starts")
    inputs = [torch.randn(plan.batch_size, *shape) for shape in shapes]
    labels = torch.randint(n_classes, (plan.batch_size,))
    strategy = HetPipeStrategy(cluster=plan.cluster, plan=plan, start_method=start_method())
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=len(plan.cluster.devices),
            max_epochs=1,
            callbacks=[PipelineStatsMonitor(tolerance=float("inf"))],
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=progress_bar,
            logger=False,
        )
        samples = _Repeated([*inputs, labels], n_steps * plan.batch_size)
        trainer.fit(_Classifier(network), DataLoader(samples, plan.batch_size))
    assert strategy.timeline is not None
    return Trial(float(trainer.callback_metrics["hetpipe/step_s"]), strategy.timeline)


def start_method() -> str:
    """How the ranks of a trial are started: by fork, which is quick, unless this process may have used a GPU.

    A forked process cannot use CUDA once its parent has, and where PyTorch sees a GPU it runs no backward
    once its parent has; profiling does both.
    """
    return "spawn" if torch.cuda.is_available() else "fork"
