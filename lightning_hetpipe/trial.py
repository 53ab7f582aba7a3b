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
        step_s: Median time of a step, all included but the first steps; from one step's start to the next
            one's, or where trials took turns, of ``turns_s``.
        timeline: The last step, and the peak memory of each rank.
        turns_s: Where trials took turns: seconds per step in each round that counts.
    """

    step_s: float
    timeline: Timeline
    turns_s: tuple[float, ...] = ()


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

    Where several plans are to be compared, `turns.take_turns` runs them in turn.

    Args:
        network: Takes one argument per shape, returns logits of shape ``[batch, n_classes]``.
        shapes: One sample of each argument, without the batch dimension.
        n_steps: Two at least: a step lasts until the next one starts. Of five or more, three warm up.
        progress_bar: Whether Lightning shows one, on the standard output.
    """
    if n_steps < 2:
        raise ValueError(f"steps={n_steps}: give at least 2, a step lasts until the next one starts")
    strategy = HetPipeStrategy(cluster=plan.cluster, plan=plan, start_method=start_method())
    monitor = PipelineStatsMonitor(tolerance=float("inf"))
    batches = random_batches(shapes, n_classes, plan.batch_size, n_steps)
    trainer = fit(network, strategy, batches, [monitor], progress_bar=progress_bar)
    assert strategy.timeline is not None
    return Trial(float(trainer.callback_metrics["hetpipe/step_s"]), strategy.timeline)


def random_batches(
    shapes: Sequence[tuple[int, ...]], n_classes: int, batch_size: int, n_batches: int
) -> DataLoader[Sample]:
    """The same random batch so many times: one argument per shape, and labels."""
    inputs = [torch.randn(batch_size, *shape) for shape in shapes]
    labels = torch.randint(n_classes, (batch_size,))
    return DataLoader(_Repeated([*inputs, labels], n_batches * batch_size), batch_size)


def fit(
    network: nn.Module,
    strategy: HetPipeStrategy,
    batches: DataLoader[Sample],
    callbacks: list[L.Callback],
    *,
    progress_bar: bool = False,
) -> L.Trainer:
    """Trains a classifier for one epoch with a strategy that knows its cluster; writes nothing that stays."""
    cluster = strategy.options.known_cluster
    assert cluster is not None
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=len(cluster.devices),
            max_epochs=1,
            callbacks=callbacks,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=progress_bar,
            logger=False,
        )
        trainer.fit(_Classifier(network), batches)
    return trainer


def start_method() -> str:
    """How the ranks of a trial are started: by fork, which is quick, unless this process may have used a GPU.

    A forked process cannot use CUDA once its parent has, and where PyTorch sees a GPU it runs no backward
    once its parent has; profiling does both.
    """
    return "spawn" if torch.cuda.is_available() else "fork"
