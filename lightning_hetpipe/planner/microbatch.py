"""Which micro-batch sizes are worth a search.

With ``t_s(mu) = alpha_s + beta_s mu`` and ``b`` the bottleneck, the step is

    B alpha_b / mu  +  mu (Σ beta_s + Σ beta_hop - beta_b)  +  const

fixed costs paid M times against the time to fill the pipeline. So

    mu* = sqrt( B alpha_b / (Σ beta_s + Σ beta_hop - beta_b) )

and its neighbours among the sizes on offer; the simulator picks.
"""

import math
from collections.abc import Sequence


def offered(batch_size: int, largest: int | None = None) -> tuple[int, ...]:
    """Sizes worth trying: divisors of the batch, and for each number of slices the most even size.

    The second kind leaves a smaller last slice; it matters where the batch has few divisors (a prime
    batch would offer 1 and itself). Ascending.

    >>> offered(12)
    (1, 2, 3, 4, 6, 12)
    >>> offered(7)
    (1, 2, 3, 4, 7)
    """
    sizes = {-(-batch_size // n) for n in range(1, min(batch_size, 64) + 1)}
    divisors = {size for size in range(1, batch_size + 1) if batch_size % size == 0}
    # A ragged size next to a divisor brings little: keep those that are 20 % away from all of them.
    ragged = {size for size in sizes if all(abs(size - d) > 0.2 * d for d in divisors)}
    kept = sorted(divisors | ragged)
    return tuple(size for size in kept if largest is None or size <= largest) or (1,)


def best_size(
    batch_size: int, small: tuple[int, Sequence[float], float], large: tuple[int, Sequence[float], float]
) -> float:
    """The square-root rule.

    Args:
        batch_size: ``B``.
        small: A size, the seconds of each stage at that size, and the sum of the hops.
        large: The same stages at a larger size.

    Returns:
        ``mu*``, between 1 and ``B``; ``B`` where larger slices only gain.
    """
    (size, seconds, hops), (size_l, seconds_l, hops_l) = small, large
    slopes = [(b - a) / (size_l - size) for a, b in zip(seconds, seconds_l)]
    bottleneck = max(range(len(seconds)), key=lambda stage: seconds[stage])
    alpha = max(0.0, seconds[bottleneck] - slopes[bottleneck] * size)
    growth = sum(slopes) + (hops_l - hops) / (size_l - size) - slopes[bottleneck]
    if growth <= 0:
        return float(batch_size)
    return min(float(batch_size), max(1.0, math.sqrt(batch_size * alpha / growth)))


def neighbours(sizes: Sequence[int], wanted: float, count: int = 3) -> tuple[int, ...]:
    """The ``count`` offered sizes nearest to the wanted one, as ratios go; nearest first."""
    ranked = sorted(sizes, key=lambda size: abs(math.log(size / max(wanted, 1e-9))))
    return tuple(ranked[:count])
