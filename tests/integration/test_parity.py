"""Training as a pipeline gives what one device gives with the same micro-batches, in double precision.

The full product of cases takes a while, so a run of the suite covers each pair of settings at least once.
``HETPIPE_PARITY=all`` runs the product, ``full`` runs it with ResNet-18 and VGG-11 at their full size.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_hetpipe import Cluster, Device, HetPipeStrategy, Plan
from lightning_hetpipe.plans import Stage
from lightning_hetpipe.tracing import trace
from tests.helpers.models import FULL_SIZE, MODELS, Classifier, build, loader
from tests.helpers.parity import Recorder, assert_equal, one_device, pairwise_cover
from tests.helpers.ranks import run_ranks

ALL = os.environ.get("HETPIPE_PARITY") in ("all", "full")
FULL = os.environ.get("HETPIPE_PARITY") == "full"
SCHEDULES = ("gpipe", "1f1b")
N_STAGES = (2, 3, 4)
# Samples in a batch, in a micro-batch, and in the data set (the last batch is then smaller).
SLICINGS = {"even": (6, 2, 6), "ragged": (8, 3, 5), "few": (3, 3, 3)}
ACCUMULATE = (1, 2)
STEPS = 3


def cases() -> Iterator[tuple[str, str, int, str, int]]:
    product = list(itertools.product(MODELS, SCHEDULES, N_STAGES, SLICINGS, ACCUMULATE))
    yield from product if ALL else pairwise_cover(product)


def hand_made_plan(
    net: torch.nn.Module, x: Tensor, n_stages: int, batch: int, micro_batch: int, schedule: str
) -> Plan:
    """Cuts at pseudo-random layers; the last stage is on rank 0."""
    graph = trace(net, (x,), {}).graph
    generator = torch.Generator().manual_seed(n_stages * 100 + batch)
    cuts = sorted((torch.randperm(len(graph) - 1, generator=generator)[: n_stages - 1] + 1).tolist())
    devices = tuple(Device(f"d{i}") for i in range(n_stages))
    edges = [0, *cuts, len(graph)]
    names = [device.name for device in (*devices[1:], devices[0])]
    return Plan(
        cluster=Cluster("plain", devices),
        layer_names=tuple(layer.name for layer in graph.layers),
        stages=tuple(Stage(a, b, (name,)) for a, b, name in zip(edges, edges[1:], names)),
        batch_size=batch,
        micro_batch=micro_batch,
        schedule=schedule,
        in_flight=tuple(range(n_stages, 0, -1)),
        graph_fingerprint=graph.fingerprint,
    )


@pytest.mark.timeout(600 if ALL else 120)
@pytest.mark.parametrize(("name", "schedule", "n_stages", "slicing", "accumulate"), tuple(cases()))
def test_training_equals_one_device(
    name: str, schedule: str, n_stages: int, slicing: str, accumulate: int, tmp_path: Path
) -> None:
    batch, micro_batch, last_batch = SLICINGS[slicing]
    net, data = build(name, full_size=FULL and name in FULL_SIZE)
    samples = data(batch * (STEPS * accumulate - 1) + last_batch)
    plan = hand_made_plan(net, samples[0][:micro_batch], n_stages, batch, micro_batch, schedule)

    batches = list(zip(samples[0].split(batch), samples[1].split(batch)))
    ((losses, gradients, expected_state),) = run_ranks(
        1, one_device, net, batches, micro_batch, accumulate, timeout_s=300
    )

    module = Classifier(net)
    trainer = pl.Trainer(
        strategy=HetPipeStrategy(plan=plan, start_method="fork", timeout_s=60),
        accelerator="cpu",
        devices=n_stages,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[Recorder(tmp_path)],
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader(samples, batch))

    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(n_stages)]
    for rank_losses, _, _ in ranks:
        assert rank_losses == pytest.approx(losses, abs=1e-9)
    for step, expected in enumerate(gradients):
        found: dict[str, Tensor] = {}
        for _, held, _ in ranks:
            found |= held[step]
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(key, found[key], expected[key])
    state = module.state_dict()
    assert state.keys() == expected_state.keys()
    for key in state:
        assert_equal(key, state[key], expected_state[key])
