"""Measuring inside ``Trainer.fit`` shows how far it is, where the Trainer shows progress."""

from pathlib import Path

import pytest

import lightning_hetpipe as hp
from lightning_hetpipe.profiling import device
from tests.helpers.pipelines import QUIET, Classifier, loader, trainer

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]
TWO = {"name": "pair", "devices": [{"name": "left", "speed": 0.5}, {"name": "right", "speed": 0.5}]}


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """What a run with or without Lightning's bar writes to a terminal's standard error."""
    monkeypatch.setenv("HETPIPE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(device, "reference_seconds", lambda place, section: 0.05)  # a busy machine keeps none
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")

    def run(bar: bool) -> str:
        strategy = hp.HetPipeStrategy(TWO, start_method="fork", timeout_s=30)
        trainer(strategy, 2, enable_progress_bar=bar, max_epochs=1).fit(Classifier(), loader())
        return capfd.readouterr().err

    return run


def test_measuring_shows_rank_0_s_device_and_its_layers_and_later_runs_do_not_measure_again(terminal):
    shown = terminal(bar=True)
    assert "measuring 7 layers on left" in shown
    assert "on right" not in shown
    assert "measuring 7 layers" not in terminal(bar=True)


def test_measuring_is_silent_where_the_trainer_shows_no_progress(terminal):
    assert "measuring" not in terminal(bar=False)
