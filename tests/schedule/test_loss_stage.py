"""Where a group shares the last stage, a stage without layers on rank 0 takes its outputs."""

import pytest

from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.graph import READER, Layer, LayerGraph, Route, Value
from lightning_hetpipe.plans import Plan, Stage
from lightning_hetpipe.schedule import make_schedule
from lightning_hetpipe.schedule.action import Kind

GRAPH = LayerGraph(
    tuple(Layer(f"l{i}", "Linear") for i in range(3)),
    (
        Value("x", READER, (0,), 8, gradient=False),
        Value("a", 0, (1,), 8),
        Value("early", 0, (1,), 8, output=True),
        Value("b", 1, (2,), 8),
        Value("y", 2, (), 8, output=True),
    ),
)


def plan(in_flight: tuple[int, ...] = (2, 1)) -> Plan:
    return Plan(
        cluster=Cluster("c", (Device("a"), Device("b"), Device("c"))),
        layer_names=("l0", "l1", "l2"),
        stages=(Stage(0, 1, ("c",)), Stage(1, 3, ("b", "a"), (0.5, 0.5), "batch")),
        batch_size=4,
        micro_batch=1,
        schedule="1f1b",
        in_flight=in_flight,
    )


def test_outputs_go_to_the_loss_stage_from_where_they_are_made() -> None:
    assert plan().routes(GRAPH) == (
        Route(READER, 0, ("x",), ()),
        Route(0, 1, ("a", "early"), ("a", "early")),
        Route(0, 2, ("early",), ("early",)),
        Route(1, 2, ("y",), ("y",)),
    )
    assert plan().executed_ranks == ((2,), (1, 0), (0,))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("in_flight", [(2, 1), (3, 2)])
@pytest.mark.parametrize("training", [True, False])
def test_the_loss_stage_goes_in_step_with_the_group(
    name: str, in_flight: tuple[int, ...], training: bool
) -> None:
    plan_ = plan(in_flight)
    schedule = make_schedule(
        name,
        ranks_of_stage=plan_.executed_ranks,
        n_ranks=3,
        n_micro_batches=4,
        in_flight=plan_.executed_in_flight,
        routes=plan_.routes(GRAPH),
        reduce=(1,) if training else (),
        training=training,
    )
    computed = [str(action) for action in schedule.actions[0] if action.kind.is_compute and action.stage > 0]
    for m in range(4):
        assert computed.index(f"2F{m}") == computed.index(f"1F{m}") + 1
        if training:
            assert computed.index(f"1B{m}") == computed.index(f"2B{m}") + 1
    member = [action for action in schedule.actions[1] if action.kind is not Kind.REDUCE_GRAD]
    assert [a for a in schedule.actions[0] if a.stage == 1 and a.kind is not Kind.REDUCE_GRAD] == member


def test_two_stages_of_a_rank_must_go_in_step() -> None:
    plan_ = plan((3, 2))
    with pytest.raises(ScheduleError, match="are on one rank: give these stages equal in_flight"):
        make_schedule(
            "1f1b",
            ranks_of_stage=plan_.executed_ranks,
            n_ranks=3,
            n_micro_batches=4,
            in_flight=(3, 2, 1),
            routes=plan_.routes(GRAPH),
        )
