from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.shares import channel_bounds, largest_remainder

SHARES = st.lists(st.floats(0.01, 10), min_size=1, max_size=6)


@given(SHARES, st.integers(0, 500))
def test_counts_sum_to_the_total_and_stay_within_one_of_the_exact_part(shares, total):
    counts = largest_remainder(total, shares)
    assert sum(counts) == total
    assert all(abs(n - total * s / sum(shares)) < 1 + 1e-6 for n, s in zip(counts, shares))


@given(SHARES, st.integers(1, 64), st.integers(1, 8))
def test_every_member_gets_a_unit_and_every_cut_is_a_multiple_of_it(shares, units, unit):
    if units < len(shares):
        with pytest.raises(PlanError, match="fewer than the"):
            channel_bounds(units * unit, shares, unit)
        return
    bounds = channel_bounds(units * unit, shares, unit)
    assert (bounds[0], bounds[-1]) == (0, units * unit)
    assert all(bound % unit == 0 for bound in bounds)
    assert all(stop - start >= unit for start, stop in pairwise(bounds))


def test_known_cuts():
    assert channel_bounds(64, (5, 2, 1)) == (0, 40, 56, 64)
    assert channel_bounds(64, (7, 1), unit=16) == (0, 48, 64)
    assert channel_bounds(3, (100, 1, 1)) == (0, 1, 2, 3)


def test_channels_that_the_unit_does_not_divide_are_refused():
    with pytest.raises(PlanError, match="10 channels cannot be cut at multiples of 4"):
        channel_bounds(10, (1, 1), unit=4)
