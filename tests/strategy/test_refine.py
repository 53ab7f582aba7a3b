"""The refinement of a plan in the first steps: who takes turns, who wins, and that nothing else changes."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.plans import Plan, Stage, micro_batch_sizes
from lightning_hetpipe.stage.norm import convert_norm
from lightning_hetpipe.strategy import planning
from lightning_hetpipe.strategy.refine import (
    Refinement,
    Trial,
    Verdict,
    Watch,
    sees_micro_batches,
    settled,
)
from lightning_hetpipe.tracing import trace
from tests.helpers.models import CLASSES, Classifier, loader
from tests.helpers.parity import Recorder, assert_equal, one_device
from tests.helpers.pipelines import trainer
from tests.helpers.ranks import run_ranks
from tests.helpers.synthetic import make_cluster, make_profile

BATCH, STEPS = 12, 30
PLANNED = Plan(
    cluster=Cluster("pair", (Device("a"), Device("b"))),
    layer_names=("l0", "l1"),
    stages=(Stage(0, 1, ("b",)), Stage(1, 2, ("a",))),
    batch_size=BATCH,
    micro_batch=4,
    schedule="1f1b",
    in_flight=(2, 1),
    reason="planned so",
)
PLANS = (PLANNED, replace(PLANNED, schedule="gpipe", in_flight=(3, 3)), replace(PLANNED, micro_batch=6))
SILENT = [Trial(False, False), Trial(False, False)]


def play(seconds: tuple[float, ...], trials: list[Trial] = SILENT) -> tuple[list[int], Verdict]:
    """Runs all turns; each plan takes its seconds, and much longer the first time."""
    refinement, turns = Refinement(PLANS), []
    while True:
        turn = refinement.turn(BATCH)
        assert turn is not None
        verdict = refinement.note(seconds[turn] + (9.0 if turn not in turns else 0.0), trials)
        turns.append(turn)
        if verdict is not None:
            assert refinement.turn(BATCH) is None
            return turns, verdict


def test_plans_take_turns_three_times_and_the_fastest_goes_on() -> None:
    turns, verdict = play((1.0, 0.9, 0.5))
    assert turns == [0, 1, 2] * 3
    assert verdict.index == 2
    for text in ("first 9 steps", "micro-batch 4 1f1b k=2,1 (planned) 1.00 s", "goes on with micro-batch 6"):
        assert text in verdict.reason
    plan = settled(PLANS, verdict)
    assert plan == replace(PLANS[2], reason=f"planned so; {verdict.reason}")


def test_a_gain_within_the_noise_changes_nothing() -> None:
    assert play((1.0, 0.98, 0.99))[1].index == 0


def test_only_full_batches_are_compared() -> None:
    refinement = Refinement(PLANS)
    assert refinement.turn(BATCH - 1) is None
    assert refinement.turn(BATCH) == 0


def test_a_plan_without_rivals_is_not_tried() -> None:
    assert Refinement(PLANS[:1]).turn(BATCH) is None


@pytest.mark.parametrize(
    ("noticed", "why"),
    [(Trial(True, False), "keep statistics by micro-batch"), (Trial(False, True), "draw random numbers")],
)
def test_the_size_is_kept_where_a_rank_notices_that_it_would_matter(noticed: Trial, why: str) -> None:
    turns, verdict = play((1.0, 0.5, 0.1), [Trial(False, False), noticed])
    assert turns == [0, 1] * 3
    assert verdict.index == 1
    assert why in verdict.reason


def test_nothing_is_tried_where_the_step_draws_before_the_call() -> None:
    turns, verdict = play((1.0, 0.5, 0.1), [Trial(False, True, reader_draws=True), Trial(False, False)])
    assert turns == [0]
    assert verdict.index == 0
    assert "draws random numbers before it calls the module" in verdict.reason


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand])
def test_a_watch_notices_random_numbers_of_every_kind(draw: Any) -> None:
    watch = Watch(nn.Linear(2, 2))
    assert not watch.drew()
    draw()
    assert watch.trial() == Trial(False, True)


def test_a_watch_notices_buffers_that_change() -> None:
    norm = nn.BatchNorm1d(2)
    watch = Watch(norm)
    norm(torch.ones(2, 2))
    assert watch.trial() == Trial(True, False)


def test_only_batchnorm_that_normalises_by_the_batch_sees_micro_batches() -> None:
    assert sees_micro_batches(nn.Sequential(nn.BatchNorm1d(2)))
    assert sees_micro_batches(nn.BatchNorm1d(2, track_running_stats=False).eval())
    for policy in ("deferred", "sync"):
        assert sees_micro_batches(convert_norm(nn.Sequential(nn.BatchNorm1d(2)), policy))
    for policy in ("group", "freeze"):
        assert not sees_micro_batches(convert_norm(nn.Sequential(nn.BatchNorm1d(32)), policy))
    assert not sees_micro_batches(nn.Sequential(nn.BatchNorm1d(2).eval(), nn.LayerNorm(2)))


def test_a_watch_looks_at_buffers_made_in_inference_mode() -> None:
    module = nn.Linear(2, 2)
    with torch.inference_mode():
        module.register_buffer("cache", torch.ones(2))
    assert Watch(module).trial() == Trial(False, False)


def plain_net(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), *extra, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


class Sizes(Classifier):
    """Notes the sizes of the slices that its step sees, on rank 0, which alone runs it."""

    def __init__(self, net: nn.Module, folder: Path) -> None:
        super().__init__(net)
        self.file = folder / "sizes.txt"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.file.open("a") as file:
            file.write(f"{batch_idx} {len(batch[0])}\n")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def by_step(self) -> list[list[int]]:
        lines = [tuple(map(int, line.split())) for line in self.file.read_text().splitlines()]
        by_step = [[size for step, size in lines if step == index] for index in range(STEPS)]
        return [by_step[0][1:], *by_step[1:]]  # the set-up ran the first step on its whole batch


def data(n: int = BATCH * STEPS - 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, 4, dtype=torch.float64), torch.randint(0, CLASSES, (n,))


def fit(folder: Path, net: nn.Module, epochs: int = 1, resume: Path | None = None, **options: Any) -> Any:
    """Trains on three emulated devices that a made-up profile tells to share the net."""
    graph = trace(net, (torch.zeros(BATCH, 4, dtype=torch.float64),), {}).graph
    speeds = (0.9, 0.8, 0.7)
    options = {
        "cluster": make_cluster(speeds),
        "profile": make_profile(graph, speeds, layer_s=0.01, alpha_s=0.004),
    } | options
    trainer = pl.Trainer(
        strategy=HetPipeStrategy(start_method="fork", timeout_s=60, **options),
        accelerator="cpu",
        devices=3,
        max_epochs=epochs,
        precision="64-true",
        callbacks=[Recorder(folder), ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    folder.mkdir(exist_ok=True)
    module = Sizes(net, folder)
    trainer.fit(module, loader(data(), BATCH), loader(data(20), 5), ckpt_path=resume)
    return module, trainer


def reference(net: nn.Module, micro_batch: int) -> Any:
    batches = list(zip(*(each.split(BATCH) for each in data())))
    return run_ranks(1, one_device, net, batches, micro_batch, 1)[0]


def assert_parity(folder: Path, module: Sizes, expected: Any) -> None:
    losses, gradients, state = expected
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(3)]
    for rank_losses, _, _ in ranks:
        assert rank_losses == pytest.approx(losses, abs=1e-9)
    for step, wanted in enumerate(gradients):
        found = {name: each for _, held, _ in ranks for name, each in held[step].items()}
        assert found.keys() == wanted.keys()
        for name, each in wanted.items():
            assert_equal(name, found[name], each)
    for name, value in state.items():
        assert_equal(name, module.state_dict()[name], value)


@pytest.fixture
def last_rival_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked ranks inherit it: the verdict is for a rival, whatever the clock says."""
    monkeypatch.setattr(
        Refinement, "_verdict", lambda self: Verdict(self._open[-1], f"tried {len(self._open)} plans")
    )


def test_training_with_trials_of_other_sizes_equals_one_device(tmp_path: Path, last_rival_wins: None) -> None:
    net = plain_net()
    expected = reference(net, BATCH)
    module, trainer = fit(tmp_path, net)
    assert_parity(tmp_path, module, expected)
    sizes, plan = module.by_step(), trainer.strategy.plan
    n_plans = int(plan.reason.rpartition("tried ")[2].split()[0])
    turns = [tuple(each) for each in sizes[: 3 * n_plans]]
    assert len(set(turns)) == 3  # the planned size and both of its neighbours
    assert turns == turns[:n_plans] * 3
    after = [tuple(each) for each in sizes[3 * n_plans : -1]]
    assert set(after) == {plan.slices(BATCH)}
    assert plan.slices(BATCH) != turns[0]
    assert tuple(sizes[-1]) == plan.slices(BATCH - 5)
    whole = nn.functional.cross_entropy(net(data(20)[0]), data(20)[1])
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(whole.item(), abs=1e-9)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_that_is_refined_again_after_a_resume_ends_as_one_that_never_was(
    tmp_path: Path, last_rival_wins: None
) -> None:
    kept, first, rest = plain_net(), plain_net(), plain_net()
    fit(tmp_path / "kept", kept, 2, refine=False)
    fit(tmp_path / "first", first, 1)
    _, trainer = fit(tmp_path / "rest", rest, 2, resume=tmp_path / "first" / "epoch=0.ckpt")
    assert trainer.strategy.plan.reason.count("tried") == 1
    for name, value in kept.state_dict().items():
        assert_equal(name, rest.state_dict()[name], value)


def test_under_batchnorm_only_the_order_of_work_is_tried(tmp_path: Path, last_rival_wins: None) -> None:
    net = plain_net(nn.BatchNorm1d(8))
    module, trainer = fit(tmp_path, net, schedule="1f1b")
    plan = trainer.strategy.plan
    assert {tuple(each) for each in module.by_step()[:-1]} == {plan.slices(BATCH)}
    assert "tried" in plan.reason
    assert_parity(tmp_path, module, reference(plain_net(nn.BatchNorm1d(8)), plan.micro_batch))


def test_dropout_keeps_the_size(tmp_path: Path) -> None:
    module, trainer = fit(tmp_path, plain_net(nn.Dropout(0.5)), schedule="1f1b")
    assert len({tuple(each) for each in module.by_step()[:-1]}) == 1
    assert "layers draw random numbers by micro-batch, so the size was kept" in trainer.strategy.plan.reason
    assert "measured in the first" in trainer.strategy.plan.reason


@pytest.mark.parametrize(
    "options", [{"refine": False}, {"micro_batch": 4}, {"plan": {"cuts": ["2"], "devices": ["d0", "d1"]}}]
)
def test_nothing_is_tried_where_it_was_not_left_to_the_planner(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    module, trainer = fit(tmp_path, plain_net(), **options)
    plan = trainer.strategy.plan
    assert {tuple(each) for each in module.by_step()[:-1]} == {micro_batch_sizes(BATCH, plan.micro_batch)}
    assert "measured in" not in plan.reason


def test_rivals_are_weighed_with_the_optimizer_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spy(*_: Any, optimizer_copies: float, **__: Any) -> tuple[Plan, ...]:
        (tmp_path / "asked").write_text(str(optimizer_copies))
        return ()

    monkeypatch.setattr(planning, "rivals", spy)
    monkeypatch.setenv("HETPIPE_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(0, CLASSES, (8,))
    strategy = HetPipeStrategy(cluster=PLANNED.cluster, start_method="fork", timeout_s=60)
    trainer(strategy, 2, max_epochs=1).fit(Classifier(net), loader((x, y), 8))
    assert float((tmp_path / "asked").read_text()) == 1.0  # SGD with momentum, and not Adam's 2
