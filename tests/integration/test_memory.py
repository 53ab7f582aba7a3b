"""A rank holds its own part of the model, once: no other weights, and no gradient twice."""

import gc
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
from tests.helpers.pipelines import QUIET, hand_plan, trainer

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

WIDTH = 3000
WEIGHT_BYTES = 4 * WIDTH * WIDTH
HALF_BYTES = WEIGHT_BYTES + 4 * WIDTH  # one layer with its bias, float32: 36 MB


class TwoLayers(L.LightningModule):
    """Two big layers, one for each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self.net(batch[0])
        return output.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Scale(L.Callback):
    """Weighs each rank at several moments; the findings go to a file per rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, list[Any]] = {}

    def note(self, name: str, value: Any) -> None:
        self.found.setdefault(name, []).append(value)

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.note("resident", resident_bytes())

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.note("weights", held_bytes(module.parameters()))
        self.note("resident", resident_bytes())

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Tensor) -> None:
        self.note("before backward", large_bytes() - self.weights_and_state(trainer, module))

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.note("gradients", held_bytes(gradients))
        self.note("after backward", large_bytes() - self.weights_and_state(trainer, module))
        self.note("addresses", sorted(gradient.data_ptr() for gradient in gradients))

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.note("state", held_bytes(state_of(trainer)))

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        torch.save(self.found, self.folder / f"rank{trainer.global_rank}.pt")

    def weights_and_state(self, trainer: L.Trainer, module: L.LightningModule) -> int:
        return sum(
            large_bytes_of(tensors) for tensors in (list(module.parameters()), list(state_of(trainer)))
        )


def state_of(trainer: L.Trainer) -> list[Tensor]:
    states = trainer.optimizers[0].state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def held_bytes(tensors: Any) -> int:
    return sum(each.untyped_storage().nbytes() for each in tensors if not each.is_meta)


def large_bytes_of(tensors: list[Tensor]) -> int:
    """Of distinct storages of at least a weight's size, which no activation here reaches."""
    sizes = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors
        if each.layout == torch.strided and each.device.type == "cpu"
    }
    return sum(size for size in sizes.values() if size >= WEIGHT_BYTES)


def large_bytes() -> int:
    """Of all tensors that live in this process."""
    gc.collect()
    return large_bytes_of([each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def weigh(folder: Path, accumulate: int) -> tuple[L.Trainer, list[dict[str, list[Any]]]]:
    """Four batches of two micro-batches on two ranks."""
    torch.manual_seed(0)
    module = TwoLayers()
    plan = hand_plan(module.net, (torch.zeros(4, WIDTH),), 2, micro_batch=2)
    run = trainer(
        HetPipeStrategy(plan=plan, start_method="fork", timeout_s=30),
        2,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[Scale(folder)],
    )
    run.fit(module, DataLoader(TensorDataset(torch.randn(16, WIDTH)), 4))
    return run, [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_a_rank_holds_weights_gradients_and_state_of_its_own_layers_once(tmp_path: Path) -> None:
    run, ranks = weigh(tmp_path, accumulate=1)
    for found in ranks:
        assert found["weights"] == [HALF_BYTES]
        assert found["gradients"] == [HALF_BYTES] * 4
        assert found["state"] == [HALF_BYTES] * 4
        assert found["before backward"] == [WEIGHT_BYTES] * 4  # made by the schedule, not yet in .grad
        assert found["after backward"] == [WEIGHT_BYTES] * 4
        before, after = found["resident"]
        assert after < before  # the other's half was given back; set-up itself takes less than that
    assert not any(parameter.is_meta for parameter in run.lightning_module.parameters())


def test_gradients_of_two_batches_are_added_in_place(tmp_path: Path) -> None:
    _, ranks = weigh(tmp_path, accumulate=2)
    for found in ranks:
        assert found["after backward"] == [WEIGHT_BYTES] * 4
        first, second, third, fourth = found["addresses"]
        assert first == second
        assert third == fourth
