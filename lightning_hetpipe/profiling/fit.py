"""Fits a line to times: a fixed part and seconds per byte."""

from collections.abc import Mapping
from itertools import combinations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_TOLERANCE = 0.1  # relative residuals well beyond it hardly count (Cauchy's weights)
_ROUNDS = 10


def fit_line(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Fixed seconds and seconds per byte, both >= 0, with the least relative error.

    Starts from the line through two of the points that is nearest to all, then weighs squared errors;
    so one point in five that is far off hardly moves it.

    Args:
        seconds: Positive, by size in bytes.

    >>> fixed_s, s_per_byte = fit_line({1000: 0.021, 8000: 0.028, 64000: 0.084, 512000: 3.0})
    >>> round(fixed_s, 3), round(1 / s_per_byte, -4)
    (0.02, 1000000.0)
    """
    sizes, times = (np.array(column, dtype=float) for column in zip(*sorted(seconds.items())))
    line = min(_through_points(sizes, times), key=lambda line: _distance(line, sizes, times))
    for _ in range(_ROUNDS):
        expected = line[0] + line[1] * sizes
        residuals = np.abs(times - expected) / expected
        weights = 1 / np.sqrt(1 + np.square(residuals / _TOLERANCE)) / expected
        line = _least_squares(sizes, times, weights)
    return float(line[0]), float(line[1])


def _through_points(sizes: Array, times: Array) -> list[Array]:
    """Lines without a negative part through two points, or one point without one of the parts."""
    lines = [np.array(line) for size, time in zip(sizes, times) for line in ((time, 0.0), (0.0, time / size))]
    for left, right in combinations(range(len(sizes)), 2):
        slope = (times[right] - times[left]) / (sizes[right] - sizes[left])
        fixed = times[left] - slope * sizes[left]
        if slope >= 0 and fixed >= 0:
            lines.append(np.array((fixed, slope)))
    return lines


def _distance(line: Array, sizes: Array, times: Array) -> float:
    """The factors by which the line is off, as a sum of logarithms."""
    return float(np.abs(np.log((line[0] + line[1] * sizes) / times)).sum())


def _least_squares(sizes: Array, times: Array, weights: Array) -> Array:
    """The best line of weighted residuals without a negative part."""
    columns = np.stack([weights, weights * sizes], axis=1)
    wanted = weights * times
    both = np.linalg.lstsq(columns, wanted, rcond=None)[0] if len(sizes) > 1 else np.array([-1.0, -1.0])
    if (both >= 0).all():
        return np.asarray(both)
    lines = []
    for part in (0, 1):
        column = columns[:, part]
        line = np.zeros(2)
        line[part] = column @ wanted / (column @ column)
        lines.append(line)
    return min(lines, key=lambda line: float(np.square(columns @ line - wanted).sum()))
