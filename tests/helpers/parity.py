"""What tests of equal training share: the run on one device, and a record of a run by many."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hetpipe.plans import micro_batch_sizes
from lightning_hetpipe.strategy.partition import OwnerMap
from tests.helpers.models import Classifier


def pairwise_cover(product: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """Few of the cases, in which each pair of settings occurs."""
    open_pairs = {pair for case in product for pair in itertools.combinations(enumerate(case), 2)}
    while open_pairs:
        case = max(product, key=lambda c: len(open_pairs & set(itertools.combinations(enumerate(c), 2))))
        open_pairs -= set(itertools.combinations(enumerate(case), 2))
        yield case


class Recorder(pl.Callback):
    """Keeps each step's loss and gradients; ranks write what they hold to files of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        held = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        self.gradients.append(held)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        owners = trainer.strategy._owners()
        torch.save((self.losses, self.gradients, owners), self.folder / f"rank{trainer.global_rank}.pt")


def one_device(
    rank: int,
    net: torch.nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    micro_batch: int,
    accumulate: int,
    lr: float = 0.05,
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """The same micro-batches, one after the other, on one device.

    Runs in a process of its own: autograd that ran in the parent cannot be used in forked ranks.

    Returns:
        Losses by batch, gradients by optimizer step, and the state dict at the end.
    """
    module = Classifier(net, lr)
    optimizer = module.configure_optimizers()
    losses, gradients = [], []
    for index, (x, y) in enumerate(batches):
        total = 0.0
        sizes = micro_batch_sizes(len(x), micro_batch)
        for xs, ys in zip(x.split(sizes), y.split(sizes)):
            loss = F.cross_entropy(net(xs), ys) * (len(xs) / len(x))
            (loss / accumulate).backward()
            total += loss.item()
        losses.append(total)
        if (index + 1) % accumulate == 0 or index + 1 == len(batches):
            gradients.append(
                {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
            )
            optimizer.step()
            optimizer.zero_grad()
    return losses, gradients, module.state_dict()


def assert_equal(name: str, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0, msg=lambda text: f"{name}: {text}")


def assert_same_gradients(
    ranks: Sequence[Sequence[Mapping[str, Tensor]]],
    owners: OwnerMap,
    expected: Sequence[Mapping[str, Tensor]],
) -> None:
    """Every owner of a parameter has the expected gradient at every step, or its part of it."""
    for step, whole in enumerate(expected):
        for key, gradient in whole.items():
            held = [ranks[rank][step][key] for rank in owners.of(key)]
            if key in owners.shards:
                held = [owners.shards[key].join(held)]
            for found in held:
                assert_equal(key, found, gradient)
