"""Runs in which devices share stages: checkpoints, clipping, evaluation, BatchNorm, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.errors import PlanError, UnsupportedError
from lightning_hetpipe.plans import Plan, Stage
from lightning_hetpipe.strategy import groups
from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
from lightning_hetpipe.tracing import trace
from tests.helpers.pipelines import QUIET, Classifier, assert_same_weights, loader, trainer
from tests.stage.parity import free_communication

pytestmark = [
    pytest.mark.filterwarnings(each)
    for each in (*QUIET, "ignore:Be aware that when using .ckpt_path., callbacks")
]

# Stages by the fraction of layers at which they end, with their devices, shares and split.
PLACES: dict[str, list[tuple[float, tuple[str, ...], tuple[float, ...], Any]]] = {
    "channels first": [(0.6, ("d1", "d2"), (0.75, 0.25), "channel"), (1.0, ("d0",), (1.0,), "none")],
    "channels last": [(0.3, ("d2",), (1.0,), "none"), (1.0, ("d1", "d0"), (0.25, 0.75), "channel")],
    "samples last": [(0.3, ("d2",), (1.0,), "none"), (1.0, ("d1", "d0"), (0.25, 0.75), "batch")],
    "samples, then channels": [
        (0.5, ("d1", "d2"), (0.5, 0.5), "batch"),
        (1.0, ("d0", "d3"), (0.5, 0.5), "channel"),
    ],
    "all by samples": [(1.0, ("d0", "d1"), (0.5, 0.5), "batch")],
}


@pytest.fixture(autouse=True)
def free_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets channel groups share all that they can, however small it is; the ranks are forked."""
    monkeypatch.setattr(groups, "_cost", lambda plan, index: free_communication(plan.stages[index].shares))


def plan_of(net: nn.Module, place: str, example: Tensor | None = None) -> Plan:
    example = torch.zeros(16, 8, dtype=torch.float64) if example is None else example
    with torch.random.fork_rng(devices=[]):
        graph = trace(net, (example,), {}).graph
    start, stages = 0, []
    for end, devices, shares, split in PLACES[place]:
        stop = round(end * len(graph))
        stages.append(Stage(start, stop, devices, shares, split))
        start = stop
    names = sorted(name for stage in stages for name in stage.devices)
    return Plan(
        cluster=Cluster("hand", tuple(map(Device, names))),
        layer_names=tuple(layer.name for layer in graph.layers),
        stages=tuple(stages),
        batch_size=16,
        micro_batch=6,
        schedule="1f1b",
        in_flight=tuple(range(len(stages), 0, -1)),
    )


def fit(
    module: L.LightningModule, place: str, *, norm: Any = "keep", ckpt: Any = None, **options: Any
) -> L.Trainer:
    plan = plan_of(module.net, place)  # type: ignore[arg-type]
    strategy = HetPipeStrategy(plan=plan, start_method="fork", timeout_s=30, norm=norm)
    run = trainer(strategy, len(plan.cluster.devices), **options)
    run.fit(module, loader(), loader(20, seed=1), ckpt_path=ckpt)
    return run


def fit_one(module: L.LightningModule, *, ckpt: Any = None, **options: Any) -> L.Trainer:
    run = trainer(**options)
    run.fit(module, loader(), loader(20, seed=1), ckpt_path=ckpt)
    return run


def made(make: Callable[[], L.LightningModule] = Classifier) -> L.LightningModule:
    torch.manual_seed(1)
    return make()


@pytest.mark.parametrize("place", PLACES)
def test_training_and_evaluation_equal_one_device(place: str) -> None:
    one, shared = made(), made()
    alone, run = fit_one(one), fit(shared, place)
    assert_same_weights(one, shared)
    for name, value in alone.callback_metrics.items():
        torch.testing.assert_close(
            run.callback_metrics[name], value, rtol=1e-9, atol=1e-12, check_dtype=False
        )


class Adam(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("place", ["channels first", "channels last", "samples last"])
def test_a_checkpoint_of_a_group_is_that_of_one_device(place: str, tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "group"
    runs = [fit_one, lambda module, **options: fit(module, place, **options)]
    for run, folder in zip(runs, folders):
        save = ModelCheckpoint(folder, filename="last")
        run(made(Adam), enable_checkpointing=True, callbacks=[save], max_epochs=1)
    one, group = (torch.load(folder / "last.ckpt", weights_only=False) for folder in folders)
    torch.testing.assert_close(group["state_dict"], one["state_dict"], rtol=1e-9, atol=1e-12)
    states = [each["optimizer_states"][0]["state"] for each in (group, one)]
    torch.testing.assert_close(states[0], states[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("place", ["channels first", "channels last", "samples, then channels"])
def test_a_run_goes_on_under_another_plan(place: str, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="half")
    fit(made(Adam), "channels last", enable_checkpointing=True, callbacks=[save], max_epochs=1)
    one, again = made(Adam), made(Adam)
    fit_one(one, max_epochs=2)
    fit(again, place, ckpt=tmp_path / "half.ckpt", max_epochs=2)
    assert_same_weights(one, again)
    alone = made(Adam)
    fit_one(alone, ckpt=tmp_path / "half.ckpt", max_epochs=2)
    assert_same_weights(one, alone)


def test_a_group_writes_a_directory_as_one_device_a_file(tmp_path: Path) -> None:
    module = made(Adam)
    plan = plan_of(module.net, "channels last")  # type: ignore[arg-type]
    strategy = HetPipeStrategy(plan=plan, start_method="fork", timeout_s=30, checkpoint="directory")
    save = ModelCheckpoint(tmp_path, filename="half")
    trainer(strategy, 3, enable_checkpointing=True, callbacks=[save], max_epochs=1).fit(
        module, loader(), loader(20, seed=1)
    )
    one, again = made(Adam), made(Adam)
    fit_one(one, max_epochs=2)
    fit(again, "samples last", ckpt=tmp_path / "half.ckpt", max_epochs=2)
    assert_same_weights(one, again)


@pytest.mark.parametrize("place", ["channels first", "channels last", "samples last"])
def test_clipping_counts_every_parameter_once(place: str) -> None:
    one, shared = made(), made()
    fit_one(one, gradient_clip_val=0.05)
    fit(shared, place, gradient_clip_val=0.05)
    assert_same_weights(one, shared)


class LogsNorms(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net, 2))


@pytest.mark.parametrize("place", ["channels first", "samples, then channels"])
def test_gradient_norms_of_cut_parameters_are_logged_whole(place: str) -> None:
    one, shared = made(LogsNorms), made(LogsNorms)
    alone, run = fit_one(one, max_epochs=1), fit(shared, place, max_epochs=1)
    names = [name for name in alone.callback_metrics if "norm" in name]
    assert len(names) == 9
    for name in names:
        assert float(run.callback_metrics[name]) == pytest.approx(
            float(alone.callback_metrics[name]), rel=1e-5
        )


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh(),
            nn.Linear(12, 4),
        ).double()  # fmt: skip


class SeesBuffers(L.Callback):
    """Writes each rank's running statistics at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        held = {name: each.clone() for name, each in pl_module.named_buffers() if not each.is_meta}
        torch.save(held, self.folder / f"{trainer.global_rank}.pt")


@pytest.mark.parametrize("norm", ["keep", "deferred", "sync"])
@pytest.mark.parametrize("place", ["all by samples", "channels last"])
def test_all_members_end_with_the_same_running_statistics(place: str, norm: str, tmp_path: Path) -> None:
    """They are those of one device where every member's layer sees all samples of a micro-batch."""
    one, shared = made(Normed), made(Normed)
    fit(shared, place, norm=norm, callbacks=[SeesBuffers(tmp_path)])
    held = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    if place == "all by samples":
        torch.testing.assert_close(held[0], held[1], rtol=0, atol=0)
    if norm == "sync" or place == "channels last":
        plan = plan_alone(one.net)  # type: ignore[arg-type]
        alone = HetPipeStrategy(
            plan=plan, start_method="fork", timeout_s=30, norm="keep" if norm == "sync" else norm
        )
        trainer(alone, 1).fit(one, loader(), loader(20, seed=1))
        assert_same_weights(one, shared)


def plan_alone(net: nn.Module) -> Plan:
    """The same micro-batches on one device."""
    plan = plan_of(net, "all by samples")
    (stage,) = plan.stages
    return Plan(
        cluster=Cluster("one", (Device("d0"),)),
        layer_names=plan.layer_names,
        stages=(Stage(stage.start, stage.stop, ("d0",)),),
        batch_size=16,
        micro_batch=6,
        schedule="1f1b",
        in_flight=(1,),
    )


class Means(nn.Module):
    """What crosses the middle has no samples, and a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(torch.ones(1, 1, dtype=x.dtype))
        x = torch.tanh(self.body(x))
        return self.head(x * scale)  # type: ignore[no-any-return]


class WithMeans(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = Means().double()  # type: ignore[assignment]


def test_a_value_without_samples_cannot_enter_a_group_that_splits_them() -> None:
    with pytest.raises(Exception, match="would have to be summed over the devices") as caught:
        fit(made(WithMeans), "samples last")
    assert PlanError.__name__ in str(caught.value) or isinstance(caught.value, PlanError)


def test_a_value_without_samples_may_enter_a_group_that_splits_channels() -> None:
    one, shared = made(WithMeans), made(WithMeans)
    fit_one(one)
    fit(shared, "channels last")
    assert_same_weights(one, shared)


class Factored(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def test_an_optimizer_of_whole_weights_is_refused_where_they_are_cut() -> None:
    with pytest.raises(Exception, match="cannot train weights that devices share by channels") as caught:
        fit(made(Factored), "channels first")
    assert UnsupportedError.__name__ in str(caught.value) or isinstance(caught.value, UnsupportedError)


def refused(net: nn.Module, first: int, last: int, shares: tuple[float, ...], split: Any, x: Tensor) -> str:
    """What a plan whose group holds the layers from ``first`` to before ``last`` is refused with."""
    with torch.random.fork_rng(devices=[]):
        graph = trace(net, (x,), {}).graph
    members = tuple(f"d{i}" for i in range(1, len(shares) + 1))
    stages = [Stage(first, last, members, shares, split), Stage(last, len(graph), ("d0",))]
    names = ["d0", *members]
    if first:
        stages.insert(0, Stage(0, first, ("front",)))
        names.append("front")
    plan = Plan(
        cluster=Cluster("hand", tuple(map(Device, names))),
        layer_names=tuple(layer.name for layer in graph.layers),
        stages=tuple(stages),
        batch_size=16,
        micro_batch=8,
        schedule="1f1b",
        in_flight=tuple(range(len(stages), 0, -1)),
    )
    module = Classifier()
    module.net = net  # type: ignore[assignment]
    data = DataLoader(
        TensorDataset(x.repeat(4, *[1] * (x.ndim - 1)), torch.zeros(4 * len(x), dtype=torch.long)), 16
    )
    strategy = HetPipeStrategy(plan=plan, start_method="fork", timeout_s=30)
    with pytest.raises(Exception, match="which d1") as caught:
        trainer(strategy, len(names)).fit(module, data)
    assert isinstance(caught.value, PlanError) or PlanError.__name__ in str(caught.value)
    return str(caught.value)


IMAGES = torch.zeros(4, 2, 6, 6, dtype=torch.float64)
HALVES = (0.5, 0.5)


def test_kernels_with_fewer_channels_than_devices_are_refused() -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)).double()
    text = refused(net, 0, 2, (0.4, 0.3, 0.3), "channel", IMAGES)
    assert "0: fewer channels than devices" in text
    assert "Use a smaller group, or split by batch" in text


def test_a_share_of_less_than_half_a_channel_is_refused() -> None:
    net = nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4)).double()
    text = refused(net, 0, 2, (0.98, 0.02), "channel", IMAGES)
    assert "share 0.02 of d2 is less than half a channel of the 16 that the widest" in text


def test_groups_of_channels_that_no_cut_respects_are_refused() -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.GroupNorm(1, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    ).double()
    text = refused(net, 1, 2, HALVES, "channel", IMAGES)
    assert "no cut falls on its groups of 8 channels" in text


class Centred(nn.Module):
    """Its second operation looks at all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x - x.mean(0))  # type: ignore[no-any-return]


class Paired(Centred):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).view(-1, 2, 8).flip(1).reshape(-1, 8))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "layer"), [(Centred, "sub"), (Paired, "")])
def test_layers_that_mix_samples_are_refused_where_samples_are_shared(kind: Any, layer: str) -> None:
    net = kind().double()
    x = torch.randn(16, 8, dtype=torch.float64)
    text = refused(net, 0, len(trace(net, (x,), {}).graph) - 1, HALVES, "batch", x)
    assert "makes of a sample depends on the other samples" in text
    assert layer in text
    assert "share the stage by channels" in text
