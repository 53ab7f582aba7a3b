"""A script that trains a tiny module on three ranks, one of which kills itself or raises.

    python doomed.py FOLDER START_METHOD RANK PHASE HOW

Phases: training, validation, checkpointing. Each rank that ends by an exception writes its message to
``FOLDER/rank<i>.txt``. The pipeline has one checkpoint before anything happens.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
from tests.helpers.pipelines import BATCH, Classifier, hand_plan, loader, trainer

torch.set_num_threads(1)


class Recording(HetPipeStrategy):
    """Writes what each rank ends by."""

    folder: Path

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._engine is not None:  # a rank, not the process that forked it
            text = f"{type(exception).__name__}: {exception}"
            (self.folder / f"rank{self.global_rank}.txt").write_text(text)


class Doom(L.Callback):
    """Strikes in the second epoch, on one rank."""

    def __init__(self, rank: int, phase: str, how: str) -> None:
        self.rank, self.phase, self.how = rank, phase, how

    def strike(self, trainer: L.Trainer, phase: str) -> None:
        if (phase, trainer.global_rank, trainer.current_epoch) != (self.phase, self.rank, 1):
            return
        if self.how == "raise":
            raise ZeroDivisionError("the user's fault")
        os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.strike(trainer, "training")

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.strike(trainer, "validation")

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        self.strike(trainer, "checkpointing")


def main(folder: str, start_method: str, rank: str, phase: str, how: str) -> None:
    torch.manual_seed(0)
    module = Classifier()
    plan = hand_plan(module.net, (torch.zeros(BATCH, 8, dtype=torch.float64),), 3)
    strategy = Recording(plan=plan, start_method=start_method, timeout_s=60)
    strategy.folder = Path(folder)
    save = L.pytorch.callbacks.ModelCheckpoint(folder, save_last=True, every_n_epochs=1)
    trainer(
        strategy,
        int(os.environ.get("LOCAL_WORLD_SIZE", 3)),
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=[Doom(int(rank), phase, how), save],
        default_root_dir=folder,
    ).fit(module, loader(), loader(20, seed=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
