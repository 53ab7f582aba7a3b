import importlib

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import nn

from lightning_hetpipe.errors import UnsupportedError
from lightning_hetpipe.strategy.partition import OwnerMap, partition
from lightning_hetpipe.strategy.precision import (
    PipelineGradScaler,
    check_optimizers,
    prepare_precision,
)
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


def scaled_plugin(group: dist.ProcessGroup | None = None) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    prepare_precision(plugin, CPU, group)
    return plugin


def _scaler(rank: int) -> list[tuple[float, float]]:
    """Rank 0 scales a loss, rank 1 has gradients only, rank 2 has none at all."""
    group = dist.group.WORLD
    model = nn.Linear(2, 2, bias=False)
    partition(model, OwnerMap({"weight": (0, 1)}), rank, group)
    nn.init.ones_(model.weight) if rank < 2 else None
    optimizer, plugin = torch.optim.SGD(model.parameters(), 1.0), scaled_plugin(group)
    scaler, seen = plugin.scaler, []
    assert isinstance(scaler, PipelineGradScaler)
    for step in range(4):
        if rank == 0:
            scaler.scale(torch.ones(()))
        if rank < 2:
            factor = float("inf") if (step, rank) == (1, 1) else scaler.get_scale()
            model.weight.grad = torch.full((2, 2), 0.125 * factor)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), model.weight[0, 0].item() if rank < 2 else 0.0))
    return seen


def test_an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all():
    first, second, third = run_ranks(3, _scaler)
    assert first == second == [(1024.0, 0.875), (512.0, 0.875), (512.0, 0.75), (1024.0, 0.625)]
    assert [scale for scale, _ in third] == [scale for scale, _ in first]


def test_the_scaler_keeps_its_settings_and_its_state_in_checkpoints():
    plugin = scaled_plugin()
    assert plugin.state_dict()["growth_interval"] == 2
    assert plugin.scaler.get_scale() == 1024.0
    first = plugin.scaler
    prepare_precision(plugin, CPU, None)
    assert plugin.scaler is first
    plugin.load_state_dict({**plugin.state_dict(), "scale": 8.0})
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    plugin.scaler.unscale_(optimizer)
    assert plugin.scaler.get_scale() == 8.0


def test_a_disabled_scaler_stays_disabled():
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))
    prepare_precision(plugin, CPU, None)
    plugin.scaler.unscale_(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))
    assert not plugin.scaler.is_enabled()


@pytest.mark.parametrize(
    ("plugin", "dtype"),
    [
        (Precision(), torch.float32),
        (DoublePrecision(), torch.float64),
        (HalfPrecision("bf16-true"), torch.bfloat16),
        (MixedPrecision("bf16-mixed", "cuda"), torch.bfloat16),
    ],
)
def test_a_stage_computes_in_the_precision_of_the_trainer(plugin, dtype):
    prepare_precision(plugin, CPU, None)
    layer = plugin.convert_module(nn.Linear(2, 2))
    partition(layer, OwnerMap({}), 0, None)
    for context in (plugin.train_step_context, plugin.val_step_context, plugin.predict_step_context):
        with context():
            assert layer(torch.ones(1, 2, dtype=layer.weight.dtype)).dtype == dtype


def test_both_namespaces_plugins_are_fitted():
    other = importlib.import_module("pytorch_lightning.plugins.precision")
    plugin = other.MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cpu"))
    prepare_precision(plugin, CPU, None)
    assert (plugin.device, type(plugin.scaler)) == ("cpu", PipelineGradScaler)


def test_plugins_of_other_strategies_are_refused():
    with pytest.raises(UnsupportedError, match="FSDPPrecision cannot run on a pipeline: choose precision"):
        prepare_precision(FSDPPrecision("bf16-mixed"), CPU, None)


def test_fused_optimizers_are_refused_under_loss_scaling_only():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1, fused=True)
    check_optimizers(Precision(), [optimizer])
    check_optimizers(scaled_plugin(), [torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)])
    with pytest.raises(UnsupportedError, match=r"SGD\(fused=True\) unscales its own gradients"):
        check_optimizers(scaled_plugin(), [optimizer])
