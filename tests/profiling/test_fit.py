import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.profiling.fit import fit_line

SIZES = (2**10, 2**13, 2**16, 2**19, 2**22)


@given(st.floats(1e-5, 1.0), st.floats(1e-11, 1e-5))
def test_a_line_is_found(fixed_s, s_per_byte):
    found = fit_line({size: fixed_s + size * s_per_byte for size in SIZES})
    for size in SIZES:
        assert found[0] + found[1] * size == pytest.approx(fixed_s + size * s_per_byte, rel=1e-3)


@pytest.mark.parametrize("wrong", range(5))
@pytest.mark.parametrize("factor", [0.3, 5.0])
def test_one_time_that_is_far_off_hardly_moves_the_line(wrong, factor):
    times = {size: 2e-3 + size / 25e6 for size in SIZES}
    times[SIZES[wrong]] *= factor
    fixed_s, s_per_byte = fit_line(times)
    for index in set(range(5)) - {wrong}:
        right = 2e-3 + SIZES[index] / 25e6
        assert fixed_s + s_per_byte * SIZES[index] == pytest.approx(right, rel=0.2)


@pytest.mark.parametrize(
    ("times", "line"),
    [
        ({1: 1.0, 10: 10.0, 100: 100.0}, (0.0, 1.0)),
        ({1: 3.0, 100: 3.0, 10_000: 3.0}, (3.0, 0.0)),
        ({1000: 2.0}, (2.0, 0.0)),
    ],
)
def test_times_without_a_fixed_part_or_without_a_slope_have_none(times, line):
    assert fit_line(times) == pytest.approx(line, abs=1e-9)


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=5))
def test_neither_part_is_negative(times):
    fixed_s, s_per_byte = fit_line(dict(zip(SIZES, times)))
    assert fixed_s >= 0
    assert s_per_byte >= 0
