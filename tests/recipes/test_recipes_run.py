import json
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_hetpipe as hp

ROOT = Path(hp.__file__).parent.parent
SHORT = (
    "cluster=twins",
    "data.train_samples=64",
    "data.size=16",
    "max_epochs=1",
    "progress_bar=false",
    "batch_size=32",
)
KEYS = {
    "micro_batch",
    "micro_batch_auto",
    "images_per_s_predicted",
    "bubble",
    "memory_mib",
    "val_acc",
    "images_per_s",
    "step_s_measured",
    "step_s_predicted",
    "images_per_s_bound",
    "plan",
    "peak_memory_bytes",
}


def recipe(name, *words, cwd):
    command = [sys.executable, str(ROOT / "recipes" / f"{name}.py"), *words, *SHORT]
    done = subprocess.run(
        command,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "COLUMNS": "160", "XDG_CACHE_HOME": str(cwd)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.timeout(240)
def test_a_recipe_shows_its_plan_trains_and_keeps_what_happened(tmp_path):
    shown = recipe("resnet", "hydra.run.dir=run", cwd=tmp_path)
    assert "why:" in shown
    assert "predicted and measured" in shown
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert set(result) == KEYS
    assert result["step_s_measured"] > 0
    assert 0 <= result["bubble"] < 1
    assert result["memory_mib"] == max(result["peak_memory_bytes"]) / 2**20
    assert len(result["peak_memory_bytes"]) == 2
    plan = hp.Plan.load(tmp_path / "run" / "plan.json")
    assert hp.Plan.from_mapping(result["plan"]) == plan
    trace = json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    names = [{e["name"] for e in trace if e["ph"] == "X" and e["pid"] == process} for process in (0, 1)]
    assert {"0F0", "0B0"} <= names[0] & names[1]
    assert (tmp_path / "run" / "gantt.png").stat().st_size > 1000


@pytest.mark.timeout(400)
def test_a_sweep_of_micro_batches_runs_each_once_and_ends_in_one_table(tmp_path):
    shown = recipe("resnet", "-m", "micro_batch=8,16", "hydra.sweep.dir=sweep", cwd=tmp_path)
    table = shown[shown.rindex("Sweep") :]
    assert "micro_batch=8" in table
    assert "micro_batch=16" in table
    for word in ("auto", "images_per", "bubble", "memory"):  # long headings are broken over lines
        assert word in table
    assert (tmp_path / "sweep" / "sweep.png").stat().st_size > 1000
    results = sorted((tmp_path / "sweep").glob("*/result.json"))
    assert [json.loads(path.read_text())["plan"]["micro_batch"] for path in results] == [8, 16]
