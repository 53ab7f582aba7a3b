import sys

import pytest
from hydra.core.global_hydra import GlobalHydra

from lightning_hetpipe.__main__ import main


@pytest.fixture
def hetpipe(tmp_path, monkeypatch, capsys):
    """Runs one command in an empty folder; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["hetpipe", *words])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
        finally:
            GlobalHydra.instance().clear()
        return code, *capsys.readouterr()

    return run


def test_help_lists_commands_models_and_clusters_and_leaves_no_files(hetpipe, tmp_path):
    code, shown, _ = hetpipe("--help")
    assert not code
    for word in ("profile", "compare", "resnet18", "lab4", "hetpipe16", "micro_batch: auto"):
        assert word in shown
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
def test_a_wrong_request_ends_with_one_clear_message_and_no_traceback(hetpipe, words, message):
    code, _, errors = hetpipe(*words)
    assert code
    assert message in errors
    assert "Traceback" not in errors
