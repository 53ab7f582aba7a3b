"""Every row of every value reaches everyone who needs it, from one sender."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.engine.pieces import Holding, overlaps
from lightning_hetpipe.plans import Split

SPLITS: tuple[Split, ...] = ("channel", "batch")


@st.composite
def holdings(draw: st.DrawFn, first: int) -> Holding:
    n = draw(st.integers(1, 4))
    if n == 1:
        return Holding((first,))
    shares = tuple(draw(st.lists(st.floats(0.05, 1), min_size=n, max_size=n)))
    return Holding(tuple(range(first, first + n)), shares, draw(st.sampled_from(SPLITS)))


@given(holdings(0), holdings(10), st.integers(0, 20))
def test_every_receiver_gets_its_rows_once_and_in_order(
    source: Holding, target: Holding, n_rows: int
) -> None:
    table = overlaps(source, target, n_rows)
    for receiver, (start, stop) in target.held(n_rows).items():
        pieces = [rows for sender in source.ranks if (rows := table.get((sender, receiver)))]
        assert [row for first, last in pieces for row in range(first, last)] == list(range(start, stop))


@given(holdings(0), holdings(10), st.integers(0, 20))
def test_a_sender_has_what_it_sends(source: Holding, target: Holding, n_rows: int) -> None:
    held = source.held(n_rows)
    for (sender, _), (start, stop) in overlaps(source, target, n_rows).items():
        assert held[sender][0] <= start < stop <= held[sender][1]


@given(holdings(0), st.integers(0, 20))
def test_duties_are_disjoint_and_complete(holding: Holding, n_rows: int) -> None:
    rows = Counter(row for start, stop in holding.duty(n_rows).values() for row in range(start, stop))
    assert rows == Counter(range(n_rows))


def test_equal_groups_send_straight_across() -> None:
    source, target = Holding((0, 1), (0.7, 0.3), "batch"), Holding((2, 3), (0.7, 0.3), "batch")
    assert overlaps(source, target, 10) == {(0, 2): (0, 7), (1, 3): (7, 10)}


def test_a_channel_group_shares_the_sending() -> None:
    source, target = Holding((0, 1), (0.9, 0.1), "channel"), Holding((2,))
    assert overlaps(source, target, 6) == {(0, 2): (0, 3), (1, 2): (3, 6)}
