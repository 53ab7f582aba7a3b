"""The chain used here, with a skip from layer 0 to layer 3 and an input that layer 2 also reads:

reader ─x─► 0 ─a─► 1 ─b─► 2 ─c─► 3 ─d─► output
  └────────── x ─────────►┘      ▲
            └────── s ───────────┘
"""

import pytest

from lightning_hetpipe.errors import GraphError
from lightning_hetpipe.graph import READER, Layer, LayerGraph, Route, Value

GRAPH = LayerGraph(
    layers=tuple(Layer(f"l{i}", "Op") for i in range(4)),
    values=(
        Value("x", READER, (0, 2), 4, gradient=False),
        Value("a", 0, (1,), 8),
        Value("s", 0, (3,), 16),
        Value("b", 1, (2,), 8, fixed_bytes=2),
        Value("c", 2, (3,), 8),
        Value("d", 3, (), 1, output=True),
    ),
)


def test_a_skip_goes_straight_from_producer_to_consumer() -> None:
    assert GRAPH.routes((0, 1, 3)) == (
        Route(READER, 0, ("x",), ()),
        Route(READER, 1, ("x",), ()),
        Route(0, 1, ("a",), ("a",)),
        Route(0, 2, ("s",), ("s",)),
        Route(1, 2, ("c",), ("c",)),
    )


def test_an_output_made_early_is_sent_to_the_last_stage() -> None:
    graph = LayerGraph(GRAPH.layers, (Value("early", 0, (1,), 1, output=True), *GRAPH.values[2:]))
    assert Route(0, 2, ("early", "s"), ("early", "s")) in graph.routes((0, 1, 3))


def test_size_grows_with_the_micro_batch() -> None:
    assert GRAPH.value("b").size_bytes(3) == 26


@pytest.mark.parametrize("starts", [(), (1, 2), (0, 0), (0, 2, 1), (0, 4)])
def test_impossible_stages_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(GraphError, match="do not divide 4 layers"):
        GRAPH.routes(starts)


def test_an_empty_graph_is_refused() -> None:
    with pytest.raises(GraphError, match="no layers"):
        LayerGraph((), ())
