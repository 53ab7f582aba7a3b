"""Channel groups train what fits on none of their devices: a model, and one single layer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.cluster import Cluster, Device, Emulation, Link
from lightning_hetpipe.plans import Plan, Stage
from lightning_hetpipe.profiling.memory import (
    memory_bytes,
    peak_memory_bytes,
    reset_peak,
    return_freed_memory,
)
from lightning_hetpipe.strategy import prepare
from lightning_hetpipe.strategy.groups import make_groups
from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
from lightning_hetpipe.strategy.partition import partition
from lightning_hetpipe.tracing import TensorSpec, trace
from tests.helpers.pipelines import QUIET, trainer
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]

MB = 2**20
WIDTH = 4096
LAYER_BYTES = 4 * 1568 * WIDTH  # 25.7 MB in float32
LIMIT_BYTES = 56 * MB  # the layer with gradient and momentum takes 77 MB, half of it 39 MB
SAMPLES, BATCH, MICRO_BATCH = 12, 4, 2


class Narrow(L.LightningModule):
    """The end of VGG-11, with fewer channels: features, the first large linear layer, and the others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(7), nn.Flatten(),
            nn.Linear(1568, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 4),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Each rank writes what it used more while the model was cut, and what it then held of the layer."""

    def weigh(module: nn.Module, owners: Any, rank: int, *rest: Any) -> None:
        return_freed_memory()
        reset_peak()
        before = memory_bytes()
        partition(module, owners, rank, *rest)
        weight = module.get_parameter("net.4.weight")
        held = 0 if weight.is_meta else weight.untyped_storage().nbytes()
        torch.save((peak_memory_bytes() - before, held), tmp_path / f"rank{rank}.pt")

    monkeypatch.setattr(prepare, "partition", weigh)  # the ranks are forked
    return tmp_path


def module_and_plan(devices: tuple[tuple[str, ...], ...], limit_bytes: int) -> tuple[Narrow, Plan]:
    """The layer on the first stage, what follows it on the second; each device has that much memory."""
    torch.manual_seed(0)
    module = Narrow()
    with torch.random.fork_rng(devices=[]):
        graph = trace(module.net, (torch.zeros(MICRO_BATCH, 3, 8, 8),), {}).graph
    names = [layer.name for layer in graph.layers]
    ends = (0, names.index(next(name for name in names if "6" in name)), len(names))
    stages = [
        Stage(
            start,
            stop,
            group,
            (1 / len(group),) * len(group),
            "none" if len(group) == 1 else "channel",
        )
        for start, stop, group in zip(ends, ends[1:], devices)
    ]
    used = sorted(name for group in devices for name in group)
    cluster = Cluster(
        "small",
        tuple(Device(name, emulation=Emulation(1.0, limit_bytes), memory_bytes=limit_bytes) for name in used),
    )
    plan = Plan(
        cluster=cluster,
        layer_names=tuple(names),
        stages=tuple(stages),
        batch_size=BATCH,
        micro_batch=MICRO_BATCH,
        schedule="1f1b",
        in_flight=(2, 1),
    )
    return module, plan


def data() -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    y = torch.randint(4, (SAMPLES,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), BATCH)


def fit(module: Narrow, plan: Plan) -> HetPipeStrategy:
    strategy = HetPipeStrategy(plan=plan, start_method="fork", timeout_s=30)
    run = trainer(strategy, len(plan.cluster.devices), max_epochs=1)
    run.fit(module, data())
    return strategy


def alone(rank: int) -> dict[str, Tensor]:
    """The same training on one device without a limit."""
    torch.manual_seed(0)
    module = Narrow()
    optimizer = module.configure_optimizers()
    for x, y in data():
        optimizer.zero_grad()
        for xs, ys in zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH)):
            (nn.functional.cross_entropy(module.net(xs), ys) * len(xs) / len(x)).backward()
        optimizer.step()
    return module.state_dict()


def test_a_layer_that_fits_on_no_device_trains_on_two() -> None:
    module, plan = module_and_plan((("d1",), ("d0",)), LIMIT_BYTES)
    with pytest.raises(MemoryError, match="emulated memory limit of 56"):
        fit(module, plan)


def test_a_group_trains_a_layer_that_fits_on_none_of_its_devices(weighed: Path) -> None:
    (wanted,) = run_ranks(1, alone)
    module, plan = module_and_plan((("d1", "d2"), ("d0",)), LIMIT_BYTES)
    fit(module, plan)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6)
    for rank in range(3):
        grown, held = torch.load(weighed / f"rank{rank}.pt")
        assert held == (LAYER_BYTES // 2 if rank else 0)
        assert grown < 1.25 * LAYER_BYTES  # nobody made another whole one to cut it: that takes 1.5


def test_a_layer_that_is_quickest_whole_is_cut_where_it_does_not_fit() -> None:
    module, plan = module_and_plan((("d1", "d2"), ("d0",)), LIMIT_BYTES)
    slow = Link(latency_s=0.05, bandwidth_bytes_per_s=1e5)
    for limit, cut in ((None, False), (LIMIT_BYTES, True)):
        devices = tuple(replace(each, memory_bytes=limit) for each in plan.cluster.devices)
        groups = make_groups(
            replace(plan, cluster=Cluster("slow", devices, (slow,))),
            trace(module.net, (torch.zeros(MICRO_BATCH, 3, 8, 8),), {}),
            {"input": TensorSpec((MICRO_BATCH, 3, 8, 8), torch.float32)},
            set(),
        )
        assert ("4.weight" in groups.layouts[0].placements) == cut
