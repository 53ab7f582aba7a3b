import copy
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hetpipe.errors import CheckpointError, RankFailedError, UnsupportedError
from lightning_hetpipe.strategy.checkpoint import (
    AtomicCheckpointIO,
    load_model_state,
    load_optimizer_state,
    merge,
    optimizer_state,
    restore_rng,
    rng_state,
    save_checkpoint,
)
from lightning_hetpipe.strategy.partition import OwnerMap, gather, partition
from tests.helpers.ranks import run_ranks

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 0.1),
}


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[3].weight = model[0].weight
    return model


def owner_map(model: nn.Module, n: int) -> OwnerMap:
    """Layer i on rank n - 1 - i % n, so that rank 0 holds the end."""
    holders = [
        ([f"{i}.{name}" for name in child.state_dict()], ((n - 1 - i) % n,)) for i, child in enumerate(model)
    ]
    return OwnerMap.of_stages(model, "", holders)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    decay = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": decay}, {"params": rest, "lr": 0.01}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps by gradients that depend on the values, so that a wrong state shows."""
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = None if parameter.is_meta else torch.sin(parameter.detach() * 3)
        optimizer.step()
        if not model[1].running_mean.is_meta:
            model[1].running_mean += 1


def dump(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = model.state_dict()
    return {
        "state_dict": state,
        "optimizer_states": [optimizer_state(optimizer)],
        "epoch": 3,
        "extra": [(copy.deepcopy(state["2.bias"]), "text")],
    }


def run(rank: int, n: int, kind: str, start: dict[str, Any] | None, steps: int) -> dict[str, Any] | None:
    group = dist.group.WORLD if n > 1 else None
    model = build(seed=rank)
    partition(model, owner_map(model, n), rank, group)
    optimizer = OPTIMIZERS[kind](groups(model))
    if start is not None:
        load_model_state(model, start["state_dict"])
        load_optimizer_state(optimizer, start["optimizer_states"][0])
    train(model, optimizer, steps)
    return merge(dump(model, optimizer), rank, group)


def on_ranks(n: int, *args: Any) -> dict[str, Any]:
    return run_ranks(n, run, n, *args)[0]


def assert_same(one: Any, other: Any, path: str = "") -> None:
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}.{index}")
    else:
        assert one == other, path


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_of_any_partition_continues_in_any_other_as_one_device_does(kind):
    expected = run(0, 1, kind, None, 6)
    state = None
    for n in (3, 2, 1):
        state = on_ranks(n, kind, state, 2)
    for checkpoint in (expected, state):
        del checkpoint["hetpipe_rng"]
    assert_same(state, expected)


def test_a_merged_checkpoint_is_what_one_device_would_have_written():
    merged, expected = on_ranks(3, "adamw", None, 2), run(0, 1, "adamw", None, 2)
    assert len(merged.pop("hetpipe_rng")) == 3
    expected.pop("hetpipe_rng")
    assert_same(merged, expected)
    assert merged["state_dict"]._metadata == expected["state_dict"]._metadata


def _tied(rank: int) -> int | None:
    model = build()
    partition(model, OwnerMap(dict.fromkeys(("0.weight", "3.weight"), (1,))), rank, dist.group.WORLD)
    merged = merge({"state_dict": model.state_dict()}, rank, dist.group.WORLD)
    return None if merged is None else len({merged["state_dict"][f"{i}.weight"].data_ptr() for i in (0, 3)})


def test_a_tied_weight_from_elsewhere_is_one_tensor_in_the_file():
    assert run_ranks(2, _tied)[0] == 1


def _after_gather(rank: int) -> list[int] | None:
    group, model = dist.group.WORLD, build()
    owners = owner_map(model, 2)
    partition(model, owners, rank, group)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 1)
    gather(model, owners, rank, group)
    merged = merge(dump(model, optimizer), rank, group)
    return None if merged is None else list(merged["optimizer_states"][0]["state"])


def test_a_checkpoint_after_the_weights_are_gathered_still_has_every_optimizer_state():
    assert run_ranks(2, _after_gather)[0] == [0, 1, 2, 3, 4, 5]


def _hook_makes_orphans(rank: int) -> None:
    model = build()
    partition(model, owner_map(model, 2), rank, dist.group.WORLD)
    state = model.state_dict()
    if rank == 0:
        state["renamed"] = state.pop("0.bias")
    merge({"state_dict": state}, rank, dist.group.WORLD)


def test_a_tensor_that_no_rank_holds_is_named_on_every_rank():
    with pytest.raises(UnsupportedError, match=r"no rank holds values for state_dict.renamed \[4\]"):
        run_ranks(2, _hook_makes_orphans)


def test_names_of_the_whole_model_are_checked_on_every_rank():
    model, state = build(), build().state_dict()
    model[2].weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    load_model_state(model, state)
    assert torch.equal(model[2].bias, state["2.bias"])
    assert model[2].weight.is_meta
    with pytest.raises(RuntimeError, match=r"missing \['2.weight'\]"):
        load_model_state(model, {name: each for name, each in state.items() if name != "2.weight"})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "2.bias"'):
        load_model_state(model, {name: each for name, each in state.items() if name != "2.bias"})
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"more\""):
        load_model_state(model, {**state, "more": torch.ones(1)})
    load_model_state(model, {"more": torch.ones(1)}, strict=False)
    with pytest.raises(RuntimeError, match=r"other shapes \['2.weight'\]"):
        load_model_state(model, {**state, "2.weight": torch.ones(1, 4)})


def test_optimizer_state_of_other_shapes_or_groups_is_refused():
    model = build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(model, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    model[0].weight.data = torch.empty(3, 4)
    with pytest.raises(CheckpointError, match=r"of parameter 0 has shape \[4, 4\].*has \[3, 4\]"):
        load_optimizer_state(optimizer, state)
    with pytest.raises(CheckpointError, match=r"groups of \[6\] parameters, this one of \[2, 4\]"):
        load_optimizer_state(OPTIMIZERS["sgd"](groups(build())), state)


def test_random_numbers_go_on_where_the_file_was_written(tmp_path):
    path = tmp_path / "rng.ckpt"
    AtomicCheckpointIO().save_checkpoint({"hetpipe_rng": [rng_state(), rng_state()]}, path)
    expected = (torch.rand(2), random.random(), np.random.rand())
    checkpoint = torch.load(path, weights_only=True)
    for rank, world in ((0, 1), (0, 3), (1, 2)):
        restore_rng(checkpoint, rank, world)
        drawn = (torch.rand(2), random.random(), np.random.rand())
        assert_same(drawn, expected)
    state = torch.get_rng_state()
    restore_rng(checkpoint, 1, 3)
    restore_rng({}, 0, 1)
    assert torch.equal(state, torch.get_rng_state())


def _save(rank: int, path: Path) -> None:
    model = build()
    partition(model, owner_map(model, 2), rank, dist.group.WORLD)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 1)
    checkpoint = dump(model, optimizer)
    save_checkpoint(checkpoint, path, io=AtomicCheckpointIO(), rank=rank, group=dist.group.WORLD)


def test_the_file_loads_with_weights_only_and_holds_no_placeholder(tmp_path):
    run_ranks(2, _save, tmp_path / "deep" / "a.ckpt")
    checkpoint = torch.load(tmp_path / "deep" / "a.ckpt", weights_only=True)
    build().load_state_dict(checkpoint["state_dict"])
    assert not checkpoint["extra"][0][0].is_meta
    assert os.listdir(tmp_path / "deep") == ["a.ckpt"]


def _save_where_rank_0_cannot(rank: int, path: Path) -> str:
    with pytest.raises((RankFailedError, OSError), match=r"rank 0 failed|exists|Not a directory") as caught:
        _save(rank, path)
    return f"{type(caught.value).__name__} {caught.value}"


def test_every_rank_learns_that_rank_0_could_not_write(tmp_path):
    (tmp_path / "file").write_text("")
    first, second = run_ranks(2, _save_where_rank_0_cannot, tmp_path / "file" / "a.ckpt")
    assert first.startswith(("FileExistsError", "NotADirectoryError"))
    assert second.startswith("RankFailedError rank 0 could not write the checkpoint")


def _save_interrupted(rank: int, path: Path) -> None:
    if rank == 0:  # the other rank never comes
        save_checkpoint({}, path, io=AtomicCheckpointIO(), rank=0, group=dist.group.WORLD, interrupted=True)


def test_an_interrupted_run_writes_nothing_and_waits_for_nobody(tmp_path):
    run_ranks(2, _save_interrupted, tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())


def _write_for_ever(path: Path) -> None:
    while True:
        AtomicCheckpointIO().save_checkpoint({"state_dict": {"a": torch.ones(1_000_000)}}, path)


def test_a_kill_while_writing_leaves_a_whole_file(tmp_path):
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"a": torch.ones(1_000_000)}}, path)
    for after in (0.01, 0.05, 0.08, 0.11):
        child = get_context("fork").Process(target=_write_for_ever, args=(path,))
        child.start()
        time.sleep(after)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert torch.load(path, weights_only=True)["state_dict"]["a"].sum() == 1_000_000
