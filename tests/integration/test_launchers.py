"""Every way to start the ranks trains a model; each needs only ``import lightning_hetpipe``."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import lightning_hetpipe  # noqa: F401  # registers the names
from lightning_hetpipe.errors import UnsupportedError
from tests.helpers.pipelines import QUIET, Classifier, assert_same_weights, loader, trainer
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]
NAMES = {"hetpipe": "popen", "hetpipe_fork": "fork", "hetpipe_spawn": "spawn", "hetpipe_notebook": "fork"}

SCRIPT = """
import os
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetpipe

torch.set_num_threads(1)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), 4)
    trainer = L.Trainer(
        strategy=os.environ["STRATEGY"], devices=int(os.environ.get("LOCAL_WORLD_SIZE", 2)), max_epochs=1,
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, data)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    strategy = trainer.strategy
    line = f"{strategy.world_size} {len(strategy.plan.stages)} {trainer.global_step} {weights.sum():.6f}"
    Path(os.environ["FOLDER"], f"rank{trainer.global_rank}").write_text(line)
"""


def start(script: Path, strategy: str, *launch: str) -> "subprocess.Popen[str]":
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "STRATEGY": strategy,
        "FOLDER": str(script.parent),
    }
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *launch, str(script)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(processes: list["subprocess.Popen[str]"]) -> None:
    """Waits for all of them; none must fail or outlive this."""
    try:
        for process in processes:
            _, errors = process.communicate(timeout=110)
            assert process.returncode == 0, errors[-4000:]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def lines(folder: Path) -> list[list[str]]:
    return [path.read_text().split() for path in sorted(folder.glob("rank*"))]


@pytest.mark.parametrize("name", NAMES)
def test_all_names_are_registered_with_their_start_method(name: str) -> None:
    strategy = StrategyRegistry.get(name)
    assert strategy.options.start_method == NAMES[name]


@pytest.mark.parametrize("name", ["hetpipe_notebook", "hetpipe_fork"])
def test_forked_names_train_and_may_run_in_a_notebook(name: str) -> None:
    module = Classifier()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    run = trainer(name, 2, max_epochs=1)
    assert run.strategy.launcher.is_interactive_compatible
    run.fit(module, loader(16))
    assert all(not torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_forked_ranks_that_have_ended_leave_weights_to_save_but_no_optimizer(tmp_path: Path) -> None:
    module, run = Classifier(), trainer("hetpipe_fork", 2, max_epochs=1)
    run.fit(module, loader(16))
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(saved, dict(module.state_dict()), rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match="ended, and with them the optimizers' state"):
        run.save_checkpoint(tmp_path / "whole.ckpt")
    assert not (tmp_path / "whole.ckpt").exists()


def test_popen_starts_the_script_once_per_rank(script: Path) -> None:
    end([start(script, "hetpipe")])
    found = lines(script.parent)
    assert [line[0] for line in found] == ["2", "2"]
    assert found[0] == found[1]
    assert found[0][2] == "2"


def test_spawned_ranks_hand_weights_and_plan_back(script: Path) -> None:
    end([start(script, "hetpipe_spawn")])
    (found,) = lines(script.parent)  # of the process that spawned them
    torch.manual_seed(0)
    assert found[:2] == ["2", "1"]
    assert found[3] not in ("0.000000", "nan")


@pytest.mark.timeout(240)
def test_torchrun_may_give_each_node_its_own_number_of_devices(script: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = []
    for node, n_processes in enumerate((2, 1)):
        options = f"--nnodes=2 --node-rank={node} --nproc-per-node={n_processes} --master-port={port}".split()
        options += ["--master-addr=127.0.0.1"]
        agents.append(start(script, "hetpipe", "-m", "torch.distributed.run", *options))
        time.sleep(0.1)
    end(agents)
    found = lines(script.parent)
    assert [line[0] for line in found] == ["3", "3", "3"]
    assert found[0] == found[1] == found[2]


def fit_on_one_device(rank: int, strategy: str) -> Classifier:
    torch.manual_seed(0)
    module = Classifier()
    run = trainer(strategy, 1, max_epochs=1)
    assert run.strategy.launcher is None
    run.fit(module, loader())
    return module


def test_one_device_trains_without_processes_as_lightning_does() -> None:
    (one,), (other,) = (run_ranks(1, fit_on_one_device, strategy) for strategy in ("auto", "hetpipe"))
    assert_same_weights(one, other)
