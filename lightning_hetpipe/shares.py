"""Divides whole things (channels, samples) by fractions, with nothing lost and nothing padded."""

from collections.abc import Sequence
from itertools import accumulate

from lightning_hetpipe.errors import PlanError


def largest_remainder(total: int, shares: Sequence[float], at_least: int = 0) -> tuple[int, ...]:
    """Whole numbers in proportion to ``shares`` that sum to ``total``.

    Everyone gets the floor of the exact part, but no less than ``at_least``; what is left goes
    to the largest deficits, and what is too much is taken from the largest surpluses.

    >>> largest_remainder(64, (5, 2, 1)), largest_remainder(8, (7, 1)), largest_remainder(3, (8, 1, 1), 1)
    ((40, 16, 8), (7, 1), (1, 1, 1))

    Raises:
        PlanError: ``total`` is less than ``at_least`` for everyone, or the shares are not positive.
    """
    if not shares or any(share <= 0 for share in shares):
        raise PlanError(f"shares {tuple(shares)} must be positive")
    if total < at_least * len(shares):
        raise PlanError(f"{total} cannot give {at_least} to each of {len(shares)} members")
    exact = [total * share / sum(shares) for share in shares]
    counts = [max(at_least, int(part)) for part in exact]
    while sum(counts) < total:
        needy = max(range(len(counts)), key=lambda i: (exact[i] - counts[i], -i))
        counts[needy] += 1
    while sum(counts) > total:
        rich = max(
            (i for i in range(len(counts)) if counts[i] > at_least), key=lambda i: (counts[i] - exact[i], -i)
        )
        counts[rich] -= 1
    return tuple(counts)


def bounds_of(counts: Sequence[int]) -> tuple[int, ...]:
    """Where each part begins, and the end.

    >>> bounds_of((5, 2, 1))
    (0, 5, 7, 8)
    """
    return (0, *accumulate(counts))


def channel_bounds(channels: int, shares: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """Cuts ``channels`` by shares, at multiples of ``unit``, with at least one unit for every member.

    >>> channel_bounds(64, (5, 2, 1), unit=8)
    (0, 40, 56, 64)

    Raises:
        PlanError: There are fewer units than members, or ``unit`` does not divide ``channels``.
    """
    if channels % unit:
        raise PlanError(f"{channels} channels cannot be cut at multiples of {unit}")
    units = channels // unit
    if units < len(shares):
        raise PlanError(
            f"{channels} channels in units of {unit} are {units}, fewer than the {len(shares)} devices of "
            "the group: use a smaller group here, or split by batch"
        )
    return tuple(unit * bound for bound in bounds_of(largest_remainder(units, shares, at_least=1)))
