"""Real Trainers with options that reach into weights, gradients and optimizers."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from tests.helpers.ranks import run_ranks
from tests.strategy.test_resume import Forked, Model, data, fit, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's; those of this package are logged


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("bf16-mixed", 0.05), ("bf16-true", 0.1), ("64-true", 1e-10), ("32-true", 1e-5)],
)
def test_precision_is_that_of_one_device(tmp_path, precision, tolerance):
    losses = []
    for n in (0, 2):
        model = Model()
        if precision != "64-true":
            model.float()
        run = trainer(n, tmp_path / str(n), 1, precision=precision)
        batches = data(dtype=torch.float64 if precision == "64-true" else torch.float32)
        run.fit(model, batches, batches)
        losses.append(float(run.callback_metrics["val_loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


class Adagrad(Model):
    """Its optimizer makes state for every parameter at once, also for those that live elsewhere."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def _adagrad(rank: int, n: int, folder: Path) -> dict[str, Tensor]:
    model = Adagrad()
    run = trainer(n, folder / str(n), 1, environment=Forked(rank, n)) if n else trainer(0, folder / "0", 1)
    run.fit(model, data(), data())
    run.save_checkpoint(folder / f"{n}.ckpt")
    if n:
        dist.barrier()
    return dict(model.state_dict())


def test_adagrad_s_state_for_parameters_elsewhere_reaches_no_file(tmp_path):
    expected = _adagrad(0, 0, tmp_path)
    for weights in run_ranks(2, _adagrad, 2, tmp_path):
        torch.testing.assert_close(weights, expected)
    saved, wanted = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in (2, 0))
    torch.testing.assert_close(saved["optimizer_states"][0]["state"], wanted["optimizer_states"][0]["state"])


class Watching(Model):
    """The idiom of Lightning's documentation for gradient norms."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net, norm_type=2))


def test_logged_gradient_norms_are_those_of_one_device(tmp_path):
    metrics = []
    for n in (0, 2):
        run = trainer(n, tmp_path / str(n), 1)
        run.fit(Watching(), data(), data())
        metrics.append({key: float(value) for key, value in run.callback_metrics.items()})
    assert metrics[1] == pytest.approx(metrics[0])


class OwnClipping(Model):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


def test_clipping_asked_for_in_the_user_s_own_hook_is_global(tmp_path):
    weights = []
    for n in (0, 3):
        model, run = OwnClipping(), trainer(n, tmp_path / str(n), 1, gradient_clip_val=None)
        run.fit(model, data(), data())
        weights.append(dict(model.state_dict()))
    torch.testing.assert_close(weights[1], weights[0])


def test_a_checkpoint_from_inside_a_step_is_refused(tmp_path):
    class Saving(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.trainer.save_checkpoint(tmp_path / "inside.ckpt")

    with pytest.raises(Exception, match="inside a step or hook that runs on rank 0 only"):
        trainer(2, tmp_path, 1).fit(Saving(), data(), data())


def test_weights_are_whole_in_the_script_after_every_kind_of_run(tmp_path):
    model, _ = fit(2, tmp_path, 1)
    assert not any(each.is_meta for each in model.state_dict().values())
    run = trainer(2, tmp_path, 1)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    run.validate(model, data(), verbose=False)
    assert isinstance(run.lightning_module, pl.LightningModule)
    torch.testing.assert_close(dict(model.state_dict()), before)
