import io
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.graph import Layer, LayerGraph, Value
from lightning_hetpipe.plans import COLUMNS, Alternative, Plan, Prediction, Stage
from lightning_hetpipe.profiles import DeviceProfile, Profile
from lightning_hetpipe.report import comparison_table, measured_table, plan_table, profile_table
from lightning_hetpipe.timeline import Span, Timeline


@pytest.fixture
def plan():
    cluster = Cluster.from_mapping({"name": "pair", "devices": [{"name": "fast"}, {"name": "old"}]})
    return Plan(
        cluster=cluster,
        layer_names=("conv", "pool", "fc"),
        stages=(Stage(0, 2, ("old",)), Stage(2, 3, ("fast",))),
        batch_size=8,
        micro_batch=4,
        schedule="1f1b",
        in_flight=(2, 1),
        prediction=Prediction(
            step_s=0.5,
            images_per_s=16.0,
            busy=(0.5, 0.75),
            memory_bytes=(2048, 1024),
            forward_s=(0.01, 0.02),
            backward_s=(0.02, 0.04),
            cut_bytes=(64, 512),
        ),
        reason="old is the bottleneck",
    )


def text(renderable):
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()


def test_a_plan_prints_as_a_table_without_rich(plan):
    head, columns, first, second = plan.table().splitlines()
    assert head == "pair: batch 8 in 2 micro-batches of 4, 1f1b; 16 images/s, 500 ms per step (predicted)"
    assert columns.split()[0] == "stage"
    assert first.split("  ")[0] == "0"
    assert "conv .. pool (2)" in first
    assert "old (rank 1)" in first
    assert "1.0 KiB" in first
    assert "2.0 KiB" in second


def test_the_rich_table_holds_every_row_of_the_plan_and_the_reason(plan):
    shown = text(plan_table(plan))
    for cell in [*COLUMNS, *(cell for row in plan.rows() for cell in row), "why: old is the bottleneck"]:
        assert cell in shown


def test_a_plan_that_was_never_simulated_shows_dashes_and_says_that_it_was_written_by_hand(plan):
    bare = replace(plan, prediction=None, reason="")
    assert [row[-5:] for row in bare.rows()] == [("-",) * 5] * 2
    assert bare.why() == "written by hand: nothing was compared"


def test_a_shared_stage_shows_both_devices_and_their_shares(plan):
    shared = replace(plan, stages=(Stage(0, 3, ("fast", "old"), (0.75, 0.25), "batch"),), in_flight=(1,))
    row = dict(zip(COLUMNS, shared.rows()[0]))
    assert row["device"] == "fast (rank 0), old (rank 1)"
    assert row["share"] == "batch 75% 25%"


def test_a_predicted_plan_survives_json(plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_the_comparison_puts_the_fastest_first_and_what_cannot_run_last():
    rows = [
        Alternative("slow", 5.0, 2.0),
        Alternative("too large", 0.0, 0.0, note="needs 9.0 GiB"),
        Alternative("quick", 50.0, 0.2, 2048),
    ]
    shown = text(comparison_table(rows))
    assert shown.index("quick") < shown.index("slow") < shown.index("needs 9.0 GiB")


def test_predicted_and_measured_stand_side_by_side_with_their_difference(plan):
    predicted = Timeline((Span(0, "1F0", 0.0, 1.0), Span(1, "0F0", 0.0, 0.5)), 2, "simulated")
    measured = Timeline((Span(0, "1F0", 0.0, 1.0), Span(1, "0F0", 0.0, 1.25)), 2, "measured", (2048, 1024))
    lines = text(measured_table(plan, predicted, measured)).splitlines()
    step = next(line for line in lines if " step " in line)
    assert "1.00 s" in step
    assert "1.25 s" in step
    assert "+25%" in step
    memory = next(line for line in lines if "stage 1 on fast: memory" in line)
    assert "+0%" in memory


def test_a_profile_shows_each_layer_and_the_sum_per_device():
    layers = (Layer("conv", "Conv2d", ("conv.weight",), 1024), Layer("fc", "Linear"))
    graph = LayerGraph(layers, (Value("x", -1, (0,), 4.0),))
    device = DeviceProfile("cpu", (1, 2), ((0.1, 0.2), (0.3, 0.6)), ((0.2, 0.4), (0.6, 1.2)))
    shown = text(profile_table(Profile(graph, (device,))))
    assert "micro-batch of 2" in shown
    assert "600 ms" in shown
    assert "800 ms + 1.60 s" in shown
