"""Real Trainers: what is written under one plan goes on under another, or without this package."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.plans import Plan, Stage
from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
from lightning_hetpipe.tracing import trace
from tests.helpers.ranks import run_ranks

BATCH = 8


class Model(pl.LightningModule):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers: list[nn.Module] = [nn.Linear(5, width)]
        for _ in range(3):
            layers += [nn.Tanh(), nn.Linear(width, width)]
        self.net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, 3)).double()
        self.temperature = nn.Parameter(torch.ones(()).double())  # trains on rank 0, outside the pipeline
        self.save_hyperparameters()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) * self.temperature, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def data(shuffle: bool = False, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    torch.manual_seed(5)
    dataset = TensorDataset(torch.randn(28, 5).to(dtype), torch.randint(0, 3, (28,)))
    return DataLoader(dataset, BATCH, shuffle=shuffle)


def plan(n: int) -> Plan:
    """The model in ``n`` stages of about as many layers; rank 0 holds the last one."""
    graph = trace(Model().net, (torch.zeros(BATCH, 5).double(),), {}).graph
    starts = [len(graph) * stage // n for stage in range(n)]
    return Plan(
        cluster=Cluster("test", tuple(Device(f"d{rank}") for rank in range(n))),
        layer_names=tuple(layer.name for layer in graph.layers),
        stages=tuple(
            Stage(start, stop, (f"d{(stage + 1) % n}",))
            for stage, (start, stop) in enumerate(zip(starts, [*starts[1:], len(graph)]))
        ),
        batch_size=BATCH,
        micro_batch=3,
        schedule="1f1b",
        in_flight=tuple(range(n, 0, -1)),
    )


def trainer(n: int, folder: Path, epochs: int, callbacks: tuple[Any, ...] = (), **options: Any) -> pl.Trainer:
    """A Trainer of ``n`` stages; of one ordinary device for 0."""
    strategy: Any = "auto"
    if n:
        strategy = HetPipeStrategy(
            plan=plan(n),
            start_method="fork",
            timeout_s=30,
            checkpoint=options.pop("checkpoint", "file"),
            cluster_environment=options.pop("environment", None),
        )
    return pl.Trainer(
        accelerator="cpu",
        devices=max(n, 1),
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"gradient_clip_val": 0.3} | options),
    )


def fit(
    n: int, folder: Path, epochs: int, *, resume: Path | None = None, shuffle: bool = False, **more: Any
) -> tuple[Model, pl.Trainer]:
    model, run = Model(), trainer(n, folder, epochs, **more)
    run.fit(model, data(shuffle), data(), ckpt_path=resume)
    return model, run


def assert_close(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=lambda text: f"{path}: {text}")
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_close(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_close(left, right, f"{path}.{index}")
    elif isinstance(one, float):
        assert one == pytest.approx(other), path
    else:
        assert one == other, path


pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's; those of this package are logged


@pytest.mark.parametrize("ema", [False, True])
def test_training_goes_on_from_four_stages_to_two_to_one_device_and_back(tmp_path, ema):
    def callbacks() -> tuple[Any, ...]:
        return (EMAWeightAveraging(decay=0.7),) if ema else ()

    alone = tmp_path / "alone"
    expected, reference = fit(0, alone, 4, callbacks=callbacks())
    resume = None
    for epochs, n in enumerate((4, 2, 0, 3), start=1):
        folder = tmp_path / f"{epochs}"
        model, run = fit(n, folder, epochs, resume=resume, callbacks=callbacks())
        resume = folder / f"epoch={epochs - 1}.ckpt"
        assert [each.name for each in folder.iterdir()] == [resume.name]
        saved = torch.load(resume, weights_only=True)
        saved.pop("hetpipe_rng", None)
        saved.pop("callbacks")
        wanted = torch.load(alone / resume.name, weights_only=True)
        wanted.pop("callbacks")
        assert_close(saved, wanted)
    assert_close(dict(model.state_dict()), dict(expected.state_dict()))
    assert_close(dict(run.callback_metrics), dict(reference.callback_metrics))


def test_a_directory_of_three_stages_goes_on_with_two(tmp_path):
    expected, _ = fit(0, tmp_path / "alone", 2)
    fit(3, tmp_path / "first", 1, checkpoint="directory")
    assert (tmp_path / "first" / "epoch=0.ckpt").is_dir()
    model, _ = fit(2, tmp_path / "rest", 2, resume=tmp_path / "first" / "epoch=0.ckpt")
    assert_close(dict(model.state_dict()), dict(expected.state_dict()))


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["lightning_hetpipe"] = None  # importing it fails
import torch
import lightning.pytorch as pl
from torch import nn

class Model(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        layers = [nn.Linear(5, width)]
        for _ in range(3):
            layers += [nn.Tanh(), nn.Linear(width, width)]
        self.net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, 3)).double()
        self.temperature = nn.Parameter(torch.ones(()).double())

model = Model.load_from_checkpoint(sys.argv[1], weights_only=True)
print(sum(float(parameter.sum()) for parameter in model.parameters()))
"""


def test_a_checkpoint_loads_where_the_package_is_not_installed(tmp_path):
    model, _ = fit(3, tmp_path, 1)
    script = tmp_path / "load.py"
    script.write_text(WITHOUT_THE_PACKAGE)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "epoch=0.ckpt")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    assert float(printed) == pytest.approx(sum(float(each.detach().sum()) for each in model.parameters()))


class Forked(LightningEnvironment):
    """Processes that exist already, as under torchrun."""

    def __init__(self, rank: int, n: int) -> None:
        super().__init__()
        self._rank, self._n = rank, n

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return self._rank

    def global_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._n


def _several_runs(rank: int, folder: Path) -> dict[str, Any]:
    model = Model()
    run = trainer(2, folder, 1, environment=Forked(rank, 2))
    run.fit(model, data(), data())
    assert not any(each.is_meta for each in model.state_dict().values())
    run.save_checkpoint(folder / "after.ckpt")
    before = run.validate(model, data(), verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(model, data(), data(), ckpt_path=folder / "after.ckpt")
    after = run.validate(model, data(), verbose=False)
    return {"before": before, "after": after, "weights": dict(model.state_dict())}


def test_fit_save_validate_fit_in_one_process_per_rank(tmp_path):
    expected, reference = fit(0, tmp_path / "alone", 2)
    results = run_ranks(2, _several_runs, tmp_path / "two")
    for result in results:
        assert_close(result["weights"], dict(expected.state_dict()))
        assert result["after"] == [pytest.approx({"val_loss": float(reference.callback_metrics["val_loss"])})]
    saved, wanted = (
        torch.load(each, weights_only=True)
        for each in (tmp_path / "two" / "after.ckpt", tmp_path / "alone" / "epoch=0.ckpt")
    )
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_close(saved[key], wanted[key])


class Dice(pl.Callback):
    """Notes the random-number state of this rank when a run starts and when it saves."""

    def __init__(self) -> None:
        self.at_start: Tensor | None = None
        self.at_save: Tensor | None = None

    def on_train_start(self, *_: Any) -> None:
        self.at_start = torch.get_rng_state()

    def on_save_checkpoint(self, *_: Any) -> None:
        self.at_save = torch.get_rng_state()


def _dice(rank: int, folder: Path) -> list[bool]:
    environment, first, second = Forked(rank, 2), Dice(), Dice()
    torch.manual_seed(10 + rank)
    fit(2, folder / "first", 1, shuffle=True, environment=environment, callbacks=(first,))
    torch.rand(7)
    resume = folder / "first" / "epoch=0.ckpt"
    fit(2, folder / "rest", 2, shuffle=True, environment=environment, callbacks=(second,), resume=resume)
    return [torch.equal(first.at_save, second.at_start), torch.equal(first.at_start, second.at_start)]


def test_every_rank_draws_random_numbers_from_where_it_wrote_the_file(tmp_path):
    results = run_ranks(2, _dice, tmp_path)
    assert [continued for continued, _ in results] == [True, True]
    assert not results[0][1]  # rank 0, which shuffles, does not begin again


class Failing(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            raise ValueError("rank 1 has had enough")


def _failure(rank: int, folder: Path) -> str:
    run = trainer(2, folder, 1, (Failing(), OnExceptionCheckpoint(folder)), environment=Forked(rank, 2))
    with pytest.raises(Exception, match="rank 1") as caught:
        run.fit(Model(), data(), data())
    return type(caught.value).__name__


def test_a_failing_rank_ends_all_without_writing_a_partial_file(tmp_path):
    assert run_ranks(2, _failure, tmp_path) == ["RankFailedError", "ValueError"]
    assert not list(tmp_path.glob("*.ckpt"))
