import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetpipe.strategy.checkpoint import load_model_state, load_optimizer_state
from lightning_hetpipe.strategy.partition import partition
from lightning_hetpipe.strategy.sharded import consolidate, is_sharded, load_sharded, save_sharded
from tests.helpers.ranks import run_ranks
from tests.strategy.test_checkpoint import OPTIMIZERS, assert_same, build, dump, groups, owner_map, run, train


def _run(rank: int, n: int, start: Path | None, steps: int, target: Path) -> int:
    group = dist.group.WORLD if n > 1 else None
    model = build(seed=rank)
    partition(model, owner_map(model, n), rank, group)
    optimizer = OPTIMIZERS["adamw"](groups(model))
    if start is not None:
        saved = load_sharded(start)
        load_model_state(model, saved["state_dict"])
        load_optimizer_state(optimizer, saved["optimizer_states"][0])
    train(model, optimizer, steps)
    checkpoint = dump(model, optimizer)
    checkpoint["extra"] = [1]
    save_sharded(checkpoint, target, rank=rank, group=group)
    return len(saved["hetpipe_rng"]) if start is not None else 0


def _whole(folder: Path) -> dict[str, Any]:
    consolidate(folder, folder.parent / "whole")
    saved = torch.load(folder.parent / "whole", weights_only=True)
    (folder.parent / "whole").unlink()
    return _in_order(saved)


def _expected() -> dict[str, Any]:
    return _in_order(run(0, 1, "adamw", None, 6))


def _in_order(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What must agree, sorted, because a directory does not keep the order of names."""

    def ordered(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: ordered(node[key]) for key in sorted(node)}
        return [ordered(child) for child in node] if isinstance(node, list) else node

    return {key: ordered(checkpoint[key]) for key in ("state_dict", "optimizer_states", "epoch")}


def test_a_directory_of_any_partition_continues_in_any_other(tmp_path):
    first, second, third = (tmp_path / f"{name}.ckpt" for name in "abc")
    run_ranks(3, _run, 3, None, 2, first)
    assert is_sharded(first)
    assert run_ranks(2, _run, 2, first, 2, second) == [3, 3]
    assert run_ranks(1, _run, 1, second, 2, third) == [2]
    assert_same(_whole(third), _expected())


def test_a_directory_replaces_the_former_one_and_leaves_nothing_beside_it(tmp_path):
    for steps in (1, 6):
        run_ranks(2, _run, 2, None, steps, tmp_path / "a.ckpt")
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]
    assert_same(_whole(tmp_path / "a.ckpt"), _expected())


def test_lightning_s_own_tool_makes_a_file_with_ordinary_weights_of_it(tmp_path):
    run_ranks(2, _run, 2, None, 6, tmp_path / "a.ckpt")
    tool = "lightning.pytorch.utilities.consolidate_checkpoint"
    command = [
        sys.executable,
        "-m",
        tool,
        str(tmp_path / "a.ckpt"),
        "--output_file",
        str(tmp_path / "b.ckpt"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    state = torch.load(tmp_path / "b.ckpt", weights_only=True)["state_dict"]
    assert_same(dict(sorted(state.items())), _expected()["state_dict"])
