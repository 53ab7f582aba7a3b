"""Processes that others start: torchrun, with another number of devices on each node."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_hetpipe import HetPipeStrategy
from tests.helpers.pipelines import QUIET, Classifier, loader, trainer

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]
SCRIPT = """
import sys, torch
from tests.helpers.pipelines import Classifier, loader, pipeline, trainer
torch.set_num_threads(1)
torch.manual_seed(1)
module = Classifier()
strategy = pipeline(module, 3)
run = trainer(strategy, int(__import__("os").environ["LOCAL_WORLD_SIZE"]), num_nodes=2)
torch.manual_seed(2)
run.fit(module, loader(shuffle=True), loader(20, seed=1))
torch.save(module.state_dict(), f"{sys.argv[1]}/rank{run.global_rank}.pt")
assert run.world_size == 3
"""


def test_nodes_of_unequal_size_train_together_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc_per_node={size}",
                f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}",
                str(script), str(tmp_path),
            ],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node, size in enumerate((2, 1))
    ]  # fmt: skip
    try:
        outputs = [node.communicate(timeout=110)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    torch.manual_seed(1)
    alone = Classifier()
    run = trainer()
    torch.manual_seed(2)
    run.fit(alone, loader(shuffle=True), loader(20, seed=1))
    for rank in range(3):
        weights = torch.load(tmp_path / f"rank{rank}.pt")
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


def test_a_process_started_by_hand_on_each_node_is_one_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"NODE_RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    strategy = HetPipeStrategy()
    trainer(strategy, 1, num_nodes=4)
    strategy.set_world_ranks()
    assert (strategy.global_rank, strategy.world_size) == (2, 4)
    monkeypatch.undo()
    trainer(HetPipeStrategy(), 1).strategy.set_world_ranks()  # this process is rank 0 again
