"""python recipes/one_stage.py

What the strategy itself costs: ResNet-18 on one device, as one stage of a pipeline and as plain Lightning
with the same micro-batches (gradient accumulation). Runs take turns; prints the ratio of
each pair and the median.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning as L
import torch
import torchvision
from classifier import Classifier
from digits import Digits

import lightning_hetpipe as hp


class Stopwatch(L.Callback):
    """Seconds from the second optimizer step of a run to its last."""

    seconds = 0.0

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1 and not self.seconds:
            self.seconds = -time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.seconds += time.perf_counter()


def run(samples: int, batch: int, **settings: Any) -> float:
    """Trains for one epoch and returns its seconds."""
    L.seed_everything(0, verbose=False)
    stopwatch = Stopwatch()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[stopwatch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=tempfile.gettempdir(),
        **settings,
    )
    network = torchvision.models.resnet18(num_classes=10)
    trainer.fit(Classifier(network, lr=0.05), Digits(batch, train_samples=samples))
    return stopwatch.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    samples, slices = options.steps * options.batch, options.batch // options.micro_batch

    ratios = []
    for pair in range(options.pairs):
        plain_s = run(samples, options.micro_batch, accumulate_grad_batches=slices)
        stage_s = run(samples, options.batch, strategy=hp.HetPipeStrategy(micro_batch=options.micro_batch))
        ratios.append(stage_s / plain_s)
        print(f"pair {pair}: plain {plain_s:.2f} s, one stage {stage_s:.2f} s, ratio {ratios[-1]:.3f}")
    print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
