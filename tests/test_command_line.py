import subprocess
import sys

import pytest


def hetpipe(*words, cwd):
    command = [sys.executable, "-m", "lightning_hetpipe", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


def test_help_lists_commands_models_and_clusters_and_leaves_no_files(tmp_path):
    done = hetpipe("--help", cwd=tmp_path)
    assert done.returncode == 0
    for word in ("profile", "compare", "resnet18", "lab4", "hetpipe16", "micro_batch: auto"):
        assert word in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say what to do: hetpipe profile | plan | compare | simulate | train"),
        (("paln",), "say what to do"),
        (("plan", "cluster=lab5"), "Could not find 'cluster/lab5'"),
        (("plan", "microbatch=4"), "Key 'microbatch' is not in struct"),
        (("plan", "profile=none.json"), "profile none.json cannot be read"),
        (("simulate", "plan=none.json"), "plan none.json cannot be read"),
        (("plan", "cluster.devices.0.speed=2"), "a device can only be slowed down"),
        (("plan", "cluster=mixed3"), "say profile=analytic"),
        (("profile", "model.module.num_classes=many"), "the model cannot be built"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_request_ends_with_one_clear_message_and_no_traceback(tmp_path, words, message):
    done = hetpipe(*words, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
