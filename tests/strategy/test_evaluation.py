"""Evaluation on a pipeline: every row once and in order, equal results on all ranks."""

import copy
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn

import lightning_hetpipe as hp
from lightning_hetpipe.errors import StepError
from tests.helpers.pipelines import QUIET, Classifier, Witness, hand_plan, loader, pipeline, trainer

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]


def _module(kind: type[Classifier] = Classifier) -> Classifier:
    torch.manual_seed(3)
    return kind()


def test_test_results_equal_those_of_one_device_on_every_rank(tmp_path: Path) -> None:
    (alone,) = trainer().test(_module(), loader(37), verbose=False)
    witness = Witness(tmp_path)
    module = _module()
    (together,) = trainer(pipeline(module, 3), 3, callbacks=[witness]).test(module, loader(37), verbose=False)
    assert together == pytest.approx(alone, rel=1e-6)
    first, *others = witness.seen("test", 3)
    assert others == [first, first]


class _Writer(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(self, trainer: L.Trainer, pl_module: Any, prediction: Any, *rest: Any) -> None:
        with (self.folder / f"batches-{trainer.global_rank}").open("a") as file:
            file.write(f"{len(prediction)} {list(rest[0])}\n")

    def write_on_epoch_end(self, trainer: L.Trainer, pl_module: Any, predictions: Any, indices: Any) -> None:
        torch.save((list(predictions), indices), self.folder / f"epoch-{trainer.global_rank}")


class _SavePredictions(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Tensor] = []

    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.rows.append(outputs)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save(torch.cat(self.rows), self.folder / f"rows-{trainer.global_rank}")


def test_predictions_are_all_rows_in_order_on_all_ranks_and_written_once(tmp_path: Path) -> None:
    alone = torch.cat(trainer().predict(_module(), loader(37)))  # type: ignore[arg-type]
    module = _module()
    run = trainer(pipeline(module, 2), 2, callbacks=[_Writer(tmp_path), _SavePredictions(tmp_path)])
    run.predict(module, loader(37), return_predictions=False)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"rows-{rank}"), alone)
    predictions, indices = torch.load(tmp_path / "epoch-0")
    torch.testing.assert_close(torch.cat(predictions), alone)
    assert [i for batches in indices for batch in batches for i in batch] == list(range(37))
    assert len((tmp_path / "batches-0").read_text().splitlines()) == 3
    assert not (tmp_path / "epoch-1").exists()


class _Often(Classifier):
    """Calls the module three times on the even batches and never on the odd ones."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = sum(self.net(x * scale) for scale in (0.5, 1.0, 2.0)) if batch_idx % 2 == 0 else x[:, :4]
        self.log("test_loss", nn.functional.cross_entropy(logits, y))


def test_an_evaluation_step_may_call_the_module_any_number_of_times() -> None:
    (alone,) = trainer().test(_module(_Often), loader(37), verbose=False)
    module = _module(_Often)
    (together,) = trainer(pipeline(module, 2), 2).test(module, loader(37), verbose=False)
    assert together == pytest.approx(alone, rel=1e-6)


class _Metrics(Classifier):
    """Logs metric objects, collects outputs, and looks at metrics in hooks that run on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.rows: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        self.accuracy.update(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.rows.append(logits)

    def on_validation_epoch_end(self) -> None:
        rows = torch.cat(self.rows)
        self.rows.clear()
        self.log("spread", rows.std())
        self.log("again", self.net(torch.ones(3, 8, dtype=torch.float64)).sum())
        self.log("seen", self.accuracy.compute())


def test_metric_objects_and_epoch_end_hooks_agree_on_all_ranks(tmp_path: Path) -> None:
    torch.manual_seed(3)
    alone = trainer()
    alone.fit(_module(_Metrics), loader(), loader(20, seed=1))
    witness = Witness(tmp_path)
    module = _module(_Metrics)
    together = trainer(pipeline(module, 2), 2, callbacks=[witness])
    together.fit(module, loader(), loader(20, seed=1))
    names = {"train_accuracy", "accuracy", "spread", "again", "seen"}
    assert set(together.callback_metrics) == names
    for name in names:
        torch.testing.assert_close(
            together.callback_metrics[name], alone.callback_metrics[name], rtol=1e-6, atol=0
        )
    first, other = witness.seen("fit", 2)
    assert first == other


class _Reductions(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        x = batch[0]
        self.log("largest", x.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("smallest", x.min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log("count", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log_dict({"mean": x.mean(), "twice": 2 * x.mean()}, on_epoch=True)
        self.log("own_size", x.mean(), batch_size=len(x), on_step=False, on_epoch=True)
        return loss


def test_logged_values_are_merged_as_their_reduction_says() -> None:
    runs = []
    for n in (0, 2):
        module = _module(_Reductions)
        run = trainer(pipeline(module, n, micro_batch=5) if n else "auto", n or 1, max_epochs=1)
        run.fit(module, loader(), loader(20, seed=1))
        runs.append({name: float(value) for name, value in run.callback_metrics.items()})
    assert runs[1] == pytest.approx(runs[0], rel=1e-6)


def test_early_stopping_checkpoints_and_plateaus_decide_alike_on_all_ranks(tmp_path: Path) -> None:
    class Plateau(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def callbacks(folder: Path) -> list[Any]:
        return [
            L.pytorch.callbacks.EarlyStopping("val_loss", min_delta=0.02, patience=1),
            L.pytorch.callbacks.ModelCheckpoint(
                folder, "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=1
            ),
            Witness(folder),
        ]

    found = []
    for n in (0, 2):
        folder = tmp_path / str(n)
        folder.mkdir()
        module = _module(Plateau)
        run = trainer(
            pipeline(module, n) if n else "auto",
            n or 1,
            max_epochs=8,
            callbacks=callbacks(folder),
            enable_checkpointing=True,
        )
        run.fit(module, loader(), loader(20, seed=1))
        found.append(
            (
                sorted(path.name for path in folder.glob("*.ckpt")),
                json.loads((folder / "fit-0.json").read_text()),
            )
        )
    assert found[0] == (found[1][0], pytest.approx(found[1][1], rel=1e-6))
    assert found[0][1]["epoch"] < 8


def test_several_evaluation_loaders_keep_their_names() -> None:
    class Two(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log("val_loss", self.loss(batch))

    runs = []
    for n in (0, 2):
        module = _module(Two)
        run = trainer(pipeline(module, n) if n else "auto", n or 1)
        run.validate(module, [loader(20), loader(37, seed=2)], verbose=False)
        runs.append({name: float(value) for name, value in run.callback_metrics.items()})
    assert set(runs[0]) == {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}
    assert runs[1] == pytest.approx(runs[0], rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"limit_train_batches": 2, "limit_val_batches": 1},
        {"max_steps": 2},
        {"barebones": True},
        {"val_check_interval": 1, "check_val_every_n_epoch": None, "max_steps": 4},
        {"max_time": {"seconds": 0}},
        {"num_sanity_val_steps": 0, "reload_dataloaders_every_n_epochs": 1},
        {"overfit_batches": 1},
        {"detect_anomaly": True, "max_steps": 1},
        {"inference_mode": False, "limit_train_batches": 0},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:.*barebones")
@pytest.mark.filterwarnings("ignore:.*requested to overfit")
def test_the_trainers_switches_work(options: dict[str, Any]) -> None:
    steps = []
    for n in (0, 2):
        module = _module()
        settings = {"max_epochs": 2} | options
        run = trainer(pipeline(module, n) if n else "auto", n or 1, **settings)
        run.fit(module, loader(), loader(20, seed=1))
        steps.append({key: value.cpu() for key, value in module.state_dict().items()})
    for name, value in steps[0].items():
        torch.testing.assert_close(steps[1][name], value)


class _Similarities(nn.Module):
    """Gives each sample's likeness to every other: its output grows both ways with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5)).double()

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers(x)
        return z @ z.T


class _SequenceFirst(nn.Module):
    """An LSTM over (length, samples, features), torch's own order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 6).double()
        self.lstm = nn.LSTM(6, 5).double()
        self.head = nn.Linear(5, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(x))[0])
        return out


class _Sum(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._see(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", self._see(batch[0]))

    def _see(self, x: Tensor) -> Tensor:
        return (self.net(self.arrange(x)) ** 2).mean()

    def arrange(self, x: Tensor) -> Tensor:
        return torch.stack([x, x * 2, x * 3]) if isinstance(self.net, _SequenceFirst) else x


@pytest.mark.parametrize("net", [_Similarities, _SequenceFirst])
def test_an_evaluated_call_whose_rows_are_not_the_samples_is_not_sliced(net: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, other = _Sum(), _Sum()
    module.net = net()
    other.net = net()
    other.load_state_dict(module.state_dict())
    (alone,) = trainer().test(other, loader(24), verbose=False)
    x = torch.randn(16, 8, dtype=torch.float64)
    strategy = hp.HetPipeStrategy(
        plan=hand_plan(module.net, (module.arrange(x),), 2), start_method="fork", timeout_s=60
    )
    (together,) = trainer(strategy, 2).test(module, loader(24), verbose=False)
    assert together == pytest.approx(alone, rel=1e-9)


def test_an_lstm_trains_over_two_ranks_as_on_one() -> None:
    torch.manual_seed(0)
    module = _Sum()
    module.net = _SequenceFirst()
    x = torch.randn(16, 8, dtype=torch.float64)
    plan = hand_plan(module.net, (module.arrange(x),), 2)
    twin = copy.deepcopy(module)
    trainer(hp.HetPipeStrategy(plan=plan, start_method="fork", timeout_s=60), 2, max_epochs=1).fit(
        module, loader(32)
    )
    trainer(max_epochs=1).fit(twin, loader(32))
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, atol=1e-10, rtol=0)


class _ReturnsWhatDoesNotPickle(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]), lambda: None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "name": lambda: None}


@pytest.mark.parametrize("run", ["predict", "fit"])
def test_a_step_that_returns_what_cannot_be_pickled_is_told_so(run: str) -> None:
    module = _module(_ReturnsWhatDoesNotPickle)
    with pytest.raises(StepError, match=r"cannot be pickled: .*lambda.*\. Steps and hooks may return"):
        getattr(trainer(pipeline(module, 2), 2), run)(module, loader(20))
