"""The study of merging plans and runs what it compares."""

from types import ModuleType

import pytest
from omegaconf import OmegaConf
from torch import nn

import lightning_hetpipe as hp


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(request.config.rootpath / "recipes"))
    import merging

    return merging


@pytest.mark.timeout(240)
def test_keeping_merging_and_dropping_are_run_as_they_were_planned(study, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HETPIPE_CACHE_DIR", str(tmp_path))
    speeds = (0.6, 0.3, 0.3)
    devices = [hp.Device(f"d{i}", emulation=hp.Emulation(speed)) for i, speed in enumerate(speeds)]
    cluster = hp.Cluster("small", tuple(devices), (hp.Link(1e-4, 1e8, emulated=True),))
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    )
    config = OmegaConf.create(
        {
            "model": {"inputs": [[3, 8, 8]], "classes": 4},
            "batch_size": 8,
            "micro_batch": "auto",
            "schedule": "auto",
            "teams": None,
            "rounds": 1,
            "steps": 2,
        }
    )
    figures = study.run(config, network, cluster)
    assert list(figures) == ["keep", "merge d1+d2", "drop", "auto"]
    assert figures["keep"]["beside_keep"] == 1
    assert figures["drop"]["stages"] == 1
    for each in figures.values():
        assert each["predicted"] > 0
        assert each["measured"] > 0
