from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.graph import READER, Layer, LayerGraph, Value
from lightning_hetpipe.plans import Alternative, Pace, Plan, Prediction, Stage, micro_batch_sizes

CLUSTER = Cluster("pair", (Device("a"), Device("b")))
PLAN = Plan(
    cluster=CLUSTER,
    layer_names=("l0", "l1", "l2"),
    stages=(Stage(0, 2, ("b",)), Stage(2, 3, ("a",))),
    batch_size=20,
    micro_batch=8,
    schedule="1f1b",
    in_flight=(2, 1),
    graph_fingerprint="f",
    prediction=Prediction(1e-05, 3.5, (0.5, 0.25), (1, 2), (0.1, 0.2), (4.0, 5.0)),
    reason="b is the bottleneck",
    alternatives=(Alternative("even", 2.0, 3.0),),
)
GRAPH = LayerGraph(
    tuple(Layer(f"l{i}", "Op") for i in range(3)), (Value("x", READER, (0,), 1),), fingerprint="f"
)


def test_ranks_follow_the_order_of_the_cluster() -> None:
    assert PLAN.ranks_of_stage == ((1,), (0,))


def test_slices_are_equal_but_the_last() -> None:
    assert PLAN.slices(20) == (8, 8, 4)
    assert PLAN.slices(16) == (8, 8)
    assert PLAN.slices(3) == (3,)


@pytest.mark.parametrize("micro_batch", range(1, 12))
@pytest.mark.parametrize("n_samples", range(1, 40))
def test_no_slice_is_a_single_sample_unless_there_is_no_other_way(n_samples: int, micro_batch: int) -> None:
    sizes = micro_batch_sizes(n_samples, micro_batch)
    assert sum(sizes) == n_samples
    assert micro_batch_sizes(n_samples, sizes[0]) == sizes  # what rank 0 tells the others
    assert sizes[0] == max(sizes) or micro_batch == 2
    assert max(sizes) <= max(micro_batch, 3 if micro_batch == 2 else 0)
    assert min(sizes) > 1 or 1 in (n_samples, micro_batch)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_saved_plan_is_read_back_equal(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan.{suffix}"
    PLAN.save(path)
    if suffix == "yaml":
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text().replace("1e-05", "1.0e-05"))))
    assert Plan.load(path) == PLAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": (Stage(0, 2, ("z",)), Stage(2, 3, ("a",)))}, "device 'z', which cluster 'pair' does not"),
        ({"stages": (Stage(0, 2, ("a",)), Stage(2, 3, ("a",)))}, "used by two stages"),
        ({"stages": (Stage(0, 2, ("a",)), Stage(2, 3, ("b",)))}, "must hold the last stage"),
        ({"stages": (Stage(0, 1, ("b",)), Stage(2, 3, ("a",)))}, "gap or overlap at layer 1"),
        ({"stages": (Stage(0, 2, ("b",)),), "in_flight": (1,)}, "do not end at the model's last of 3"),
        ({"stages": ()}, "no stages"),
        ({"schedule": "zigzag"}, "schedule 'zigzag' is unknown"),
        ({"micro_batch": 0}, "micro_batch=0 was asked for: give samples"),
        ({"micro_batch": 2.5}, "micro_batch=2.5 was asked for: give samples"),
        ({"batch_size": "20"}, "batch_size='20' was asked for: give samples"),
        ({"in_flight": (2, 1.5)}, "at least 1 for each stage"),
        ({"cluster": "pair"}, "cluster='pair' was asked for: give a Cluster"),
        ({"stages": ((0, 3, ("a",)),)}, "give a tuple of Stage values"),
        ({"reason": 3}, "reason=3 was asked for: give text"),
        ({"in_flight": (1,)}, "at least 1 for each stage"),
    ],
)
def test_a_contradiction_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ((2, 2, ("a",)), "holds no layer"),
        ((0, 1, ("a",), (0.5, 0.5)), "one per device"),
        ((0, 1, ("a", "b"), (1.0, 0.0), "batch"), "positive and sum to 1"),
        ((0, 1, ("a", "b"), (0.5, 0.4), "batch"), "positive and sum to 1"),
        ((0, 1, ("a", "b"), (0.5, 0.5)), "cannot have split 'none'"),
        ((0, 1, ("a",), (float("nan"),)), r"shares=\(nan,\) was asked for"),
        ((0, 1.5, ("a",)), "stop=1.5 was asked for: give the index of a layer"),
        ((-1, 1, ("a",)), "start=-1 was asked for"),
        ((0, 1, "a"), "devices='a' was asked for: give a tuple of device names"),
        ((0, 1, ("a", "a"), (0.5, 0.5), "batch"), "names a device twice"),
        ((0, 1, ("a", "b"), (0.5, 0.5), "channel", 5), "pace=5 was asked for: give a Pace, or None"),
    ],
)
def test_an_impossible_stage_is_refused(stage: tuple[object, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Stage(*stage)  # type: ignore[arg-type]


def test_a_plan_for_the_same_model_passes() -> None:
    PLAN.check_graph(GRAPH)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (replace(GRAPH, layers=GRAPH.layers[:2]), "the plan has 3 layers, the model 2"),
        (replace(GRAPH, layers=(Layer("k", "Op"), *GRAPH.layers[1:])), "layer 0 is 'l0' in the plan and 'k'"),
        (replace(GRAPH, fingerprint="g"), "other shapes or dtypes"),
    ],
)
def test_a_plan_for_another_model_is_refused(graph: LayerGraph, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PLAN.check_graph(graph)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a plan of format"),
        ("{", "cannot be read"),
        ('{"format": 1}', "damaged"),
        ('{"format": 9}', "not a plan of format"),
        (PLAN.to_json().replace('"speed"', '"spede"').replace('"kind"', '"knd"'), "cluster is wrong"),
        (PLAN.to_json()[:200], "cannot be read"),
        (PLAN.to_json().replace("1e-05", "NaN"), "step_s=nan was asked for"),
        (PLAN.to_json().replace("1e-05", "-1"), "step_s=-1 was asked for"),
        (PLAN.to_json().replace("1e-05", '"soon"'), "step_s='soon' was asked for"),
        (PLAN.to_json().replace('"start": 0', '"start": "0"'), "start='0' was asked for"),
        (PLAN.to_json().replace('"batch_size": 20', '"batch_size": 1e400'), "batch_size=inf was asked for"),
        ("[" * 200_000, "cannot be read"),
        ('{"a":' * 200_000, "cannot be read"),
        ("7", "not a plan of format"),
    ],
)
def test_a_damaged_file_gives_one_clear_error(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=message) as error:
        Plan.load(tmp_path / "plan.json")
    assert "plan.json" in str(error.value)


def test_bytes_that_are_no_text_and_a_folder_are_no_plans(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00{")
    for path in (tmp_path / "plan.json", tmp_path):
        with pytest.raises(PlanError, match=f"plan {path} cannot be read"):
            Plan.load(path)


@pytest.mark.parametrize(
    ("pace", "message"),
    [
        ((0.0, 1e-3, 1e9), r"pace\.work_per_s=0\.0 was asked for"),
        ((1e9, -1e-3, 1e9), r"pace\.latency_s=-0\.001 was asked for"),
        ((1e9, 1e-3, "1Gbit/s"), r"pace\.bandwidth_bytes_per_s='1Gbit/s' was asked for"),
    ],
)
def test_a_pace_of_no_numbers_is_refused(pace: tuple[object, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Pace(*pace)  # type: ignore[arg-type]


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(PlanError, match="split 'rows' is unknown; known are none, channel, batch"):
        Stage(0, 1, ("a", "b"), (0.5, 0.5), "rows")  # type: ignore[arg-type]
