"""The choice of layouts is the cheapest one, and says what it does."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.stage import layout as layouts
from lightning_hetpipe.stage.analyse import analyse
from lightning_hetpipe.stage.layout import Form, GroupCost, Operation, Sharding, Way, choose

R, C, S = Form.REPLICATED, Form.COPIED, Form.SHARDED
CUT = Sharding(1, (0, 5, 8))
MANY, TWO = st.integers(0, 2**31), st.integers(0, 3)


class Table:
    """Prices by kind; whole work costs twice the shared."""

    def compute_s(self, work: float, shared: bool) -> float:
        return work * (1 if shared else 2)

    def collective_s(self, kind: str, size_bytes: float) -> float:
        return size_bytes * {"all_gather": 1.0, "reduce_scatter": 1.1, "all_reduce": 2.3}[kind]


def _price(operations: list[Operation], ways: tuple[Way, ...], cost: Table) -> float | None:
    """What the choice of ways costs with the best conversions, by trying all orders of conversion sources."""
    best: list[float | None] = [None]

    def walk(index: int, forms: dict[str, frozenset[Form]], seconds: float) -> None:
        if index == len(operations):
            if best[0] is None or seconds < best[0]:
                best[0] = seconds
            return
        operation, way = operations[index], ways[index]
        seconds += cost.compute_s(operation.work, way.shared)
        seconds += sum(cost.collective_s(*c) for c in way.forward)
        seconds += sum(cost.collective_s(*c) for c in way.backward) if operation.gradient else 0.0
        choices = []
        for name, form in zip(operation.inputs, way.inputs):
            value = next(o for o in operations if o.name == name)
            if form in forms[name]:
                choices.append([(name, form, 0.0)])
                continue
            if form is S and value.sharding is None:
                return
            choices.append(
                [(name, form, layouts._conversion_s(value, source, form, cost)) for source in forms[name]]
            )
        for taken in itertools.product(*choices):
            after = dict(forms)
            for name, form, _ in taken:
                after[name] = after[name] | {form}
            after[operation.name] = frozenset({way.output})
            walk(index + 1, after, seconds + sum(price for _, _, price in taken))

    walk(0, {}, 0.0)
    return best[0]


@st.composite
def _graphs(draw: st.DrawFn) -> list[Operation]:
    """Small graphs with joins, of operations like those of networks."""
    operations = [Operation("v0", (), (Way("whole", (), R),), size_bytes=draw(TWO), sharding=CUT)]
    for index in range(1, draw(st.integers(2, 6))):
        n_inputs = draw(st.integers(1, min(2, index)))
        inputs = tuple(draw(st.permutations(range(index)))[:n_inputs])
        size, work = draw(TWO), float(draw(st.integers(0, 6)))
        whole = Way("whole", (R,) * n_inputs, R)
        local = Way("local", (S,) * n_inputs, S, shared=True)
        copied = Way("whole", (C,) * n_inputs, C)
        column = Way("column", (C,) * n_inputs, S, shared=True)
        row = Way("row", (S,) * n_inputs, R, True, (("all_reduce", size),))
        kinds = [(whole,), (whole, copied, local), (whole, column, row)]
        ways = draw(st.sampled_from(kinds))
        operations.append(
            Operation(
                f"v{index}",
                tuple(f"v{i}" for i in inputs),
                ways,
                work,
                size,
                gradient=draw(st.booleans()),
                sharding=None if len(ways) == 1 else CUT,
            )
        )
    return operations


@settings(max_examples=60, deadline=None)
@given(_graphs())
def test_the_choice_is_as_cheap_as_the_best_of_all(operations: list[Operation]):
    cost = Table()
    prices = [_price(operations, ways, cost) for ways in itertools.product(*(o.ways for o in operations))]
    chosen = choose(operations, cost)
    assert chosen.exact
    assert chosen.seconds == pytest.approx(min(price for price in prices if price is not None))


def _describe(module: nn.Module, x: torch.Tensor, shares: tuple[float, ...], **cost: float) -> str:
    stage = fx.symbolic_trace(module)
    return analyse(stage, {"input": x}, shares, GroupCost(shares, **cost)).describe()


def test_a_column_and_a_row_pair_needs_one_reduction():
    pair = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    text = _describe(pair, torch.zeros(8, 64), (0.5, 0.5), latency_s=1e-9)
    assert text.splitlines()[1:-1] == [
        "_0     Linear     column  128:128",
        "_1     ReLU       local   128:128",
        "_2     Linear     row     all       all_reduce/-",
    ]


def test_slow_links_leave_everything_whole():
    pair = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    text = _describe(pair, torch.zeros(2, 3, 9, 9), (0.5, 0.5), latency_s=10.0)
    assert "shared by 2 devices: 0% of the arithmetic, 0 tensors cut, 4 parameters whole" in text


def test_the_listing_says_why_something_is_whole():
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=2), nn.LayerNorm(7), nn.Conv2d(8, 9, 1))
    text = _describe(net, torch.zeros(2, 3, 9, 9), (0.5, 0.3, 0.2), bandwidth_bytes_per_s=1e15)
    assert "no cut of its input falls on group boundaries" in text
    assert "normalises over the channels" in text


def test_fewer_channels_than_devices_are_refused_with_the_reason():
    with pytest.raises(PlanError, match=r"nothing in this stage can be shared.*fewer channels than devices"):
        _describe(nn.Sequential(nn.Conv2d(2, 2, 3)), torch.zeros(1, 2, 5, 5), (0.4, 0.3, 0.3))


def test_a_stage_that_switches_gradients_off_is_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.set_grad_enabled, (False,))
    graph.output(graph.call_function(torch.relu, (x,)))
    with pytest.raises(PlanError, match="switches gradients off and on"):
        analyse(fx.GraphModule(nn.Module(), graph), {"x": torch.zeros(2, 4)}, (0.5, 0.5))


def test_cuts_are_aligned_where_there_are_enough_channels():
    net = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 6, 3)))
    x, shares = torch.zeros(1, 3, 8, 8), (0.7, 0.3)
    cost = GroupCost(shares, latency_s=1e-9, bandwidth_bytes_per_s=1e15)
    chosen = analyse(net, {"input": x}, shares, cost, align=8)
    assert chosen.placements["0.weight"].sharding.counts == (48, 16)
    assert chosen.operations["_2"].sharding.counts == (4, 2)


def test_parameters_that_other_stages_hold_too_stay_whole():
    net = fx.symbolic_trace(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)))
    x, shares = torch.zeros(4, 6), (0.6, 0.4)
    cost = GroupCost(shares, latency_s=1e-9, bandwidth_bytes_per_s=1e15)
    chosen = analyse(net, {"input": x}, shares, cost, keep_whole={"2.weight"})
    assert set(chosen.placements) == {"0.weight", "0.bias"}
    assert chosen.whole == ("2.weight", "2.bias")


def test_analysing_touches_neither_parameters_nor_buffers_nor_the_random_stream():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.ReLU(inplace=True))
    stage = fx.symbolic_trace(net)
    before = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
    kept = {name: id(parameter) for name, parameter in stage.named_parameters()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    analyse(stage, {"input": torch.zeros(2, 3, 6, 6, requires_grad=True)}, (0.5, 0.5))
    assert torch.equal(torch.rand(3), expected)
    assert {name: id(parameter) for name, parameter in stage.named_parameters()} == kept
    assert all(torch.equal(tensor, before[name]) for name, tensor in stage.state_dict().items())
