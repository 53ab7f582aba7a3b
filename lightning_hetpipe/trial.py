"""Trains a network on random samples of its shapes: how ``hetpipe train`` tries a plan on this machine."""

from collections.abc import Sequence

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe.plans import Plan
from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
from lightning_hetpipe.timeline import Timeline


class _Classifier(L.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        *inputs, labels = batch
        return F.cross_entropy(self.network(*inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def train_on_random_samples(
    network: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    n_classes: int,
    plan: Plan,
    n_steps: int,
    *,
    progress_bar: bool = True,
) -> Timeline:
    """Runs ``n_steps`` optimizer steps of a classification under a plan, one process per device.

    Args:
        network: Takes one argument per shape, returns logits of shape ``[batch, n_classes]``.
        shapes: One sample of each argument, without the batch dimension.
        progress_bar: Whether Lightning shows one, on the standard output.

    Returns:
        The measured step.
    """
    inputs = [torch.randn(plan.batch_size, *shape) for shape in shapes]
    samples = TensorDataset(*inputs, torch.randint(n_classes, (plan.batch_size,)))
    strategy = HetPipeStrategy(cluster=plan.cluster, plan=plan, start_method=start_method())
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=len(plan.cluster.devices),
        max_epochs=n_steps,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=progress_bar,
        logger=False,
    )
    trainer.fit(_Classifier(network), DataLoader(samples, plan.batch_size))
    assert strategy.timeline is not None
    return strategy.timeline


def start_method() -> str:
    """How the ranks of a trial are started: by fork, which is quick, unless this process may have used a GPU.

    A forked process cannot use CUDA once its parent has, and where PyTorch sees a GPU it runs no backward
    once its parent has; profiling does both.
    """
    return "spawn" if torch.cuda.is_available() else "fork"
