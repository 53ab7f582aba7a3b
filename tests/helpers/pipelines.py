"""Runs of the strategy on forked ranks, with plans written by hand, beside runs on one device."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.plans import Plan, Stage
from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
from lightning_hetpipe.tracing import trace

# What Lightning warns about in any tiny run.
QUIET = (
    "ignore:.*does not have many workers",
    "ignore:.*isinstance.treespec, LeafSpec.*",
    "ignore:.*sampler has shuffling enabled",
    "ignore:You defined a .validation_step. but have no",
    "ignore:The number of training batches",
    "ignore:.*exists and is not empty",
    "ignore:.*fork.*may lead to deadlocks",
)
BATCH = 16


class Classifier(L.LightningModule):
    """Four linear layers over 8 features, four classes, float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16),
            nn.Tanh(),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, 12),
            nn.Tanh(),
            nn.Linear(12, 4),
        ).double()

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def samples(n: int = 44, seed: int = 0) -> TensorDataset:
    """``n`` samples of 8 features with a label each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(4, (n,), generator=generator))


def loader(n: int = 44, *, shuffle: bool = False, seed: int = 0) -> DataLoader[Any]:
    """Batches of 16; the last one is smaller."""
    return DataLoader(samples(n, seed), BATCH, shuffle=shuffle)


def hand_plan(
    module: nn.Module, example: tuple[Any, ...], n_ranks: int, micro_batch: int = 4, schedule: str = "1f1b"
) -> Plan:
    """Equal runs of layers; rank 0 holds the last one."""
    with torch.random.fork_rng(devices=[]):
        graph = trace(module, example, {}).graph
    n_layers, names = len(graph), tuple(f"d{rank}" for rank in range(n_ranks))
    cuts = [round(i * n_layers / n_ranks) for i in range(n_ranks + 1)]
    devices_in_order = (*names[1:], names[0])
    stages = tuple(Stage(start, stop, (name,)) for start, stop, name in zip(cuts, cuts[1:], devices_in_order))
    return Plan(
        cluster=Cluster("hand", tuple(map(Device, names))),
        layer_names=tuple(layer.name for layer in graph.layers),
        stages=stages,
        batch_size=example[0].shape[0],
        micro_batch=micro_batch,
        schedule=schedule,
        in_flight=tuple(range(n_ranks, 0, -1)),
        graph_fingerprint=graph.fingerprint,
    )


def pipeline(trained: L.LightningModule, n_ranks: int, **options: Any) -> HetPipeStrategy:
    """A forked strategy with a plan by hand for ``trained.net`` on 8 features."""
    example = torch.zeros(BATCH, 8, dtype=torch.float64)
    plan_options = {key: options.pop(key) for key in ("micro_batch", "schedule") if key in options}
    plan = hand_plan(trained.net, (example,), n_ranks, **plan_options)  # type: ignore[arg-type]
    return HetPipeStrategy(plan=plan, start_method="fork", timeout_s=30, **options)


def trainer(strategy: Any = "auto", devices: int = 1, **options: Any) -> L.Trainer:
    """A Trainer that writes nothing, on the CPU."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(strategy=strategy, devices=devices, **(quiet | options))


def fit_both(
    make: Callable[[], L.LightningModule],
    n_ranks: int,
    train: Any = None,
    val: Any = None,
    *,
    strategy: dict[str, Any] | None = None,
    callbacks: Callable[[], list[Any]] = list,
    **options: Any,
) -> tuple[L.Trainer, L.Trainer]:
    """The same training on one device and on a pipeline; the trainers hold modules and metrics."""
    runs = []
    for n in (None, n_ranks):
        torch.manual_seed(1)
        module = make()
        chosen: Any = "auto" if n is None else pipeline(module, n, **(strategy or {}))
        run = trainer(chosen, n or 1, callbacks=callbacks(), **options)
        torch.manual_seed(2)
        train = loader(shuffle=True) if train is None else train
        run.fit(module, train, loader(20, seed=1) if val is None else val)
        runs.append(run)
    return runs[0], runs[1]


def assert_same_weights(one: L.LightningModule, other: L.LightningModule) -> None:
    """Equal to float64 rounding."""
    theirs = other.state_dict()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(
            theirs[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


class Witness(L.Callback):
    """Writes what each rank sees at the end of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
        seen |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        (self.folder / f"{trainer.state.fn.value}-{trainer.global_rank}.json").write_text(json.dumps(seen))

    def seen(self, stage: str, n_ranks: int) -> list[dict[str, float]]:
        """By rank."""
        return [json.loads((self.folder / f"{stage}-{rank}.json").read_text()) for rank in range(n_ranks)]
