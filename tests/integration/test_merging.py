"""Groups that the planner makes train as one device does, in double precision."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetpipe import Cluster, Device, HetPipeStrategy
from lightning_hetpipe.tracing import trace
from tests.helpers.models import Classifier, build, loader
from tests.helpers.parity import Recorder, assert_equal, assert_same_gradients, one_device
from tests.helpers.pipelines import trainer
from tests.helpers.ranks import run_ranks

BATCH, MICRO_BATCH, SAMPLES = 8, 4, 20
CLUSTER = Cluster("plain", tuple(Device(f"d{i}") for i in range(3)))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["merge", "short plan"])
def test_a_group_that_is_asked_for_by_name_trains_as_one_device(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE_DIR", str(tmp_path / "cache"))
    net, data = build({"merge": "vgg11_bn", "short plan": "encoder"}[how])
    samples = data(SAMPLES)
    graph = trace(net, (samples[0][:2],), {}).graph
    batches = list(zip(samples[0].split(BATCH), samples[1].split(BATCH)))
    ((losses, gradients, expected_state),) = run_ranks(
        1, one_device, net, batches, MICRO_BATCH, 1, timeout_s=300
    )
    cut = graph.layers[len(graph) // 2].name
    asked: dict[str, Any] = {
        "merge": {"merge": [["d1", "d2"]]},
        "short plan": {"plan": {"cuts": [cut], "devices": [["d1", "d2"], "d0"]}},
    }[how]
    module = Classifier(net)
    strategy = HetPipeStrategy(
        cluster=CLUSTER, micro_batch=MICRO_BATCH, norm="keep", start_method="fork", timeout_s=60, **asked
    )
    options = {"precision": "64-true", "default_root_dir": tmp_path, "callbacks": [Recorder(tmp_path)]}
    trainer(strategy, 3, max_epochs=1, **options).fit(module, loader(samples, BATCH))

    ranks = [torch.load(tmp_path / f"rank{i}.pt", weights_only=False) for i in range(3)]
    owners = ranks[0][2]
    (group,) = (stage for stage in strategy.plan.stages if stage.split != "none")
    assert set(group.devices) == {"d1", "d2"}
    if how == "merge":
        assert group.split == "channel"  # by samples, BatchNorm would see something else
        assert owners.shards
    else:
        assert [stage.start for stage in strategy.plan.stages] == [0, len(graph) // 2]
    for rank_losses, _, _ in ranks:
        assert rank_losses == pytest.approx(losses, abs=1e-9)
    assert_same_gradients([recorded for _, recorded, _ in ranks], owners, gradients)
    for key, tensor in module.state_dict().items():
        assert_equal(key, tensor, expected_state[key])
