"""Training on a pipeline gives what training on one device gives."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import StepError
from tests.helpers.pipelines import (
    QUIET,
    Classifier,
    Witness,
    assert_same_weights,
    fit_both,
    loader,
    pipeline,
    samples,
    trainer,
)

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_weights_and_metrics_equal_those_of_one_device(n_ranks: int, schedule: str, tmp_path: Path) -> None:
    witness = Witness(tmp_path)
    one, many = fit_both(
        Classifier, n_ranks, strategy={"schedule": schedule, "micro_batch": 5}, callbacks=lambda: [witness]
    )
    assert_same_weights(one.lightning_module, many.lightning_module)
    assert one.callback_metrics.keys() == many.callback_metrics.keys()
    for name, value in one.callback_metrics.items():
        torch.testing.assert_close(many.callback_metrics[name], value, rtol=1e-6, atol=0)
    first, *others = witness.seen("fit", n_ranks)
    assert all(seen == first for seen in others)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_gradients_accumulate_over_batches(accumulate: int) -> None:
    one, many = fit_both(Classifier, 2, accumulate_grad_batches=accumulate)
    assert_same_weights(one.lightning_module, many.lightning_module)


def test_gradients_accumulate_by_a_scheduler() -> None:
    schedule = lambda: [L.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 3})]  # noqa: E731
    one, many = fit_both(Classifier, 2, callbacks=schedule)
    assert_same_weights(one.lightning_module, many.lightning_module)


def test_the_norm_that_clips_is_that_of_the_whole_model() -> None:
    one, many = fit_both(Classifier, 3, gradient_clip_val=0.05)
    assert_same_weights(one.lightning_module, many.lightning_module)


class _Hooked(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append("on_before_backward")

    def on_after_backward(self) -> None:
        held = [each for each in self.parameters() if not each.is_meta]
        self.calls.append(f"on_after_backward {all(each.grad is not None for each in held)}")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("on_before_optimizer_step")

    def on_train_end(self) -> None:
        assert self.calls[:4] == [
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward True",
            "on_before_optimizer_step",
        ]


def test_hooks_run_in_the_official_order_on_every_rank_with_gradients_in_place() -> None:
    one, many = fit_both(_Hooked, 2)
    assert_same_weights(one.lightning_module, many.lightning_module)


class _Around(Classifier):
    """Trains layers before and behind the pipelined module, and a loss with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(self.before(x)) * self.scale, y)


def test_what_stands_around_the_pipelined_module_is_trained_too() -> None:
    one, many = fit_both(_Around, 2, strategy={"module": "net"})
    assert_same_weights(one.lightning_module, many.lightning_module)


class _Sum(Classifier):
    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y, reduction="sum") / 16


def test_a_loss_that_sums_over_samples_is_summed_over_micro_batches() -> None:
    one, many = fit_both(_Sum, 2, strategy={"loss_reduction": "sum"})
    assert_same_weights(one.lightning_module, many.lightning_module)


class _Dict(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        return {"loss": nn.functional.cross_entropy(logits, batch[1]), "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["logits"].shape == (len(batch[0]), 4)
        self.log("largest", outputs["logits"].max())


def test_a_step_may_return_a_dict_and_its_hook_sees_the_whole_batch(tmp_path: Path) -> None:
    witness = Witness(tmp_path)
    one, many = fit_both(_Dict, 2, callbacks=lambda: [witness])
    assert_same_weights(one.lightning_module, many.lightning_module)
    torch.testing.assert_close(many.callback_metrics["largest"], one.callback_metrics["largest"])
    first, other = witness.seen("fit", 2)
    assert first == other


class _Twice(Classifier):
    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.net(batch[0]) - self.net(-batch[0])).square().mean()


class _Never(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return next(self.net.parameters()).sum()


class _Nothing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net(batch[0])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Twice, r"calls _Twice.net twice, at .*test_training.py:\d+ and at .*test_training.py:\d+"),
        (_Never, "returned without calling _Never.net"),
        (_Nothing, "returned None for one micro-batch"),
    ],
)
def test_a_step_that_cannot_be_pipelined_is_named(kind: type[Classifier], message: str) -> None:
    module = kind()
    with pytest.raises(StepError, match=message):
        trainer(pipeline(module, 1)).fit(module, loader())


def test_the_error_of_a_step_ends_all_ranks() -> None:
    module = _Twice()
    with pytest.raises(StepError, match=r"calls _Twice\.net twice"):
        trainer(pipeline(module, 2), 2).fit(module, loader())


def test_a_step_before_the_run_can_be_followed_by_another_run() -> None:
    module = Classifier()
    run = trainer(pipeline(module, 1), max_epochs=1)
    run.fit(module, loader())
    (metrics,) = run.test(module, loader(20), verbose=False)
    assert metrics["test_loss"] > 0
    assert "forward" not in vars(module.net)


def test_plan_and_timeline_are_there_after_a_forked_fit() -> None:
    module = Classifier()
    strategy = pipeline(module, 2)
    trainer(strategy, 2).fit(module, loader())
    assert strategy.plan is not None
    assert strategy.plan.micro_batch == 4
    assert strategy.timeline is not None
    assert {span.action for span in strategy.timeline.spans} >= {"rF0", "0F0", "1F0", "1B0", "0B0"}


def test_the_loader_is_not_read_twice_by_the_peek() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __init__(self) -> None:
            self.given = 0

        def __iter__(self) -> Any:
            for sample in samples(48):
                self.given += 1
                yield sample

    stream = Stream()
    module = Classifier()
    run = trainer(pipeline(module, 1), max_epochs=1)
    run.fit(module, torch.utils.data.DataLoader(stream, 16))
    assert run.global_step == 3
    assert stream.given == 48


def test_an_unsized_loader_ends_on_all_ranks_together(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(samples(40))

    witness = Witness(tmp_path)
    stream = torch.utils.data.DataLoader(Stream(), 16)
    one, many = fit_both(Classifier, 2, train=stream, val=stream, callbacks=lambda: [witness])
    assert_same_weights(one.lightning_module, many.lightning_module)
    first, other = witness.seen("fit", 2)
    assert first == other
    assert first["step"] == 6
