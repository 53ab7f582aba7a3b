"""A rank that is killed or raises ends the whole run, and what the user reads is that rank and why."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetpipe.errors import RankFailedError, UnsupportedError
from tests.helpers import doomed
from tests.helpers.pipelines import QUIET, Classifier, loader, pipeline, trainer

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]
PHASES = ("training", "validation", "checkpointing")


def assert_named_by_all_others(folder: Path, victim: int) -> None:
    for rank in {0, 1, 2} - {victim}:
        text = (folder / f"rank{rank}.txt").read_text()
        assert text.startswith(f"RankFailedError: rank {victim} was lost"), text
    assert not (folder / f"rank{victim}.txt").exists()
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    assert saved["epoch"] == 0
    assert not [path for path in folder.iterdir() if path.suffix not in {".txt", ".ckpt"}]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_ends_forked_training_and_is_named(victim: int, phase: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=rf"^rank {victim} was lost \(SIGKILL\)"):
        doomed.main(str(tmp_path), "fork", str(victim), phase, "kill")
    assert_named_by_all_others(tmp_path, victim)


@pytest.mark.parametrize(("culprit", "phase"), [(0, "training"), (1, "validation"), (2, "checkpointing")])
def test_forked_training_raises_what_the_failing_rank_raised(
    culprit: int, phase: str, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError, match=r"^the user's fault$") as caught:
        doomed.main(str(tmp_path), "fork", str(culprit), phase, "raise")
    assert f"on rank {culprit}:\n" in str(caught.value.__cause__)
    assert "in strike" in str(caught.value.__cause__)


class _Misshapen(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            batch[1] = batch[1][:-1]
        return super().training_step(batch, batch_idx)


def test_an_error_in_a_step_is_the_users_own_with_action_and_micro_batch() -> None:
    module = _Misshapen()
    with pytest.raises(ValueError, match="Expected input batch_size") as caught:
        trainer(pipeline(module, 3), 3).fit(module, loader())
    assert any("raised by rank 0 in 2F0 (micro-batch 0)" in note for note in caught.value.__notes__)


def test_forking_after_a_backward_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:  # as PyTorch does in such a fork where it sees a GPU
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing. See ..."
        )

    module = Classifier()
    run = trainer(pipeline(module, 2), 2)
    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    with pytest.raises(UnsupportedError, match=r"a backward has already run.*use strategy='hetpipe' or"):
        run.fit(module, loader())


def run_script(launch: list[str], folder: Path, *what: str) -> tuple[int, str]:
    """Exit code and stderr of a command and all it started; killed if it takes too long."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *launch, doomed.__file__, str(folder), *what],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=100)  # ends when all ranks have closed it
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, errors


@pytest.mark.parametrize(
    ("launch", "victim", "phase"),
    [
        pytest.param([], 1, "training", id="popen"),
        pytest.param([], 0, "validation", id="popen-rank0"),
        pytest.param(
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"],
            2,
            "checkpointing",
            id="torchrun",
        ),
    ],
)
def test_a_killed_rank_ends_all_processes_of_a_script(
    launch: list[str], victim: int, phase: str, tmp_path: Path
) -> None:
    code, errors = run_script(launch, tmp_path, "popen", str(victim), phase, "kill")
    assert code != 0
    assert f"RankFailedError: rank {victim} was lost" in errors
    assert_named_by_all_others(tmp_path, victim)
