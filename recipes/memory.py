"""python recipes/memory.py

How close the predicted peak memory of every rank is to the measured one: trains networks for a few steps on
three emulated devices under each schedule and micro-batch size, one process each, and prints a table.

    python recipes/memory.py --models resnet18 --schedules 1f1b --micro-batches 4 8
"""

import argparse
import itertools
import multiprocessing
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from resnet import small_picture_network
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetpipe as hp
from lightning_hetpipe.cluster import Cluster, Device, Emulation, Link
from lightning_hetpipe.units import format_bytes

Row = tuple[str, int, int]  # device, predicted and measured bytes
STEPS = 3


def vit_tiny() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=4, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=10
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": partial(small_picture_network, "resnet18"),
    "vgg11_bn": partial(small_picture_network, "vgg11_bn"),
    "vit_tiny": vit_tiny,
}


class Classifier(L.LightningModule):
    """Pictures and labels, Adam."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def cluster_of(n_devices: int) -> Cluster:
    devices = tuple(Device(f"d{i}", emulation=Emulation(1.0)) for i in range(n_devices))
    return Cluster("emulated", devices, (Link(1e-4, 1e9, emulated=True),))


def run(sender: Connection, model: str, schedule: str, micro_batch: int, args: argparse.Namespace) -> None:
    """One training; sends its rows."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    L.seed_everything(0, verbose=False)
    pictures = torch.randn(args.batch_size * STEPS, 3, 32, 32)
    samples = TensorDataset(pictures, torch.randint(10, (len(pictures),)))
    strategy = hp.HetPipeStrategy(
        cluster=cluster_of(args.devices),
        plan="even",
        micro_batch=micro_batch,
        schedule=schedule,
        start_method="fork",
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=args.devices,
        max_epochs=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Classifier(MODELS[model]()), DataLoader(samples, args.batch_size))
    plan, measured = strategy.plan, strategy.timeline
    assert plan is not None
    assert plan.prediction is not None
    assert measured is not None
    names = [device.name for device in plan.cluster.devices]
    sender.send(list(zip(names, plan.prediction.memory_bytes, measured.peak_memory_bytes)))


def rows_of(model: str, schedule: str, micro_batch: int, args: argparse.Namespace) -> list[Row]:
    """Runs one training in a process of its own, so that none finds what another left behind."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(sender, model, schedule, micro_batch, args))
    process.start()
    sender.close()
    try:
        rows: list[Row] = receiver.recv()
    finally:
        process.join()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--schedules", nargs="+", choices=("gpipe", "1f1b"), default=["gpipe", "1f1b"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--devices", type=int, default=3)
    args = parser.parse_args()
    worst = 0.0
    print("model      schedule micro-batch  device   predicted   measured  off")
    for case in itertools.product(args.models, args.schedules, args.micro_batches):
        for device, predicted, measured in rows_of(*case, args):
            off = predicted / measured - 1
            worst = max(worst, abs(off))
            figures = f"{format_bytes(predicted):>10s} {format_bytes(measured):>10s}  {off:+.1%}"
            print(f"{case[0]:10s} {case[1]:8s} {case[2]:11d}  {device:6s}  {figures}", flush=True)
    print(f"largest difference {worst:.1%}")


if __name__ == "__main__":
    main()
