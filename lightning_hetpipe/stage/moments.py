"""Statistics of a batch that arrives in pieces: merged without loss, and pooled over a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hetpipe.stage.members import Members


@dataclass(frozen=True, eq=False)
class Moments:
    """What is known of the values seen so far, per channel.

    Sums of squares cancel; deviations from the mean do not (Chan, Golub and LeVeque, 1979).
    """

    count: int  # values per channel: samples times positions
    mean: Tensor  # [C]
    m2: Tensor  # [C], the sum of squared deviations from the mean

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of values together; neither may be empty."""
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        m2 = self.m2 + other.m2 + delta.square() * (self.count * other.count / count)
        return Moments(count, mean, m2)


def pool(rows: Tensor, group: Members) -> Tensor:
    """Merges the moments of all members of `group`; a collective.

    Args:
        rows: [K, 3], float64: count, mean and m2 of K channels as this member saw them; zeros for none.
        group: every member calls with the same K.

    Returns:
        [K, 3]: the same for all members' values together, bit for bit equal on every member.
    """
    # A table of zeros in which each member fills its own page: an all-reduce that gathers, on any backend.
    table = rows.new_zeros(group.size(), *rows.shape)
    table[group.rank()] = rows
    group.allreduce([table]).wait()
    counts, means, m2s = table.unbind(-1)  # [members, K] each
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    m2 = m2s.sum(0) + (counts * (means - mean).square()).sum(0)
    return torch.stack([count, mean, m2], dim=-1)


def pool_all(parts: Sequence[Moments], group: Members) -> list[Moments]:
    """Merges each of `parts` (one per layer) over `group` in one collective; a count may be zero."""
    if not parts:
        return []
    columns = [
        torch.stack([torch.full_like(part.mean, part.count, dtype=torch.float64), part.mean, part.m2], dim=-1)
        for part in parts
    ]
    rows = pool(torch.cat(columns), group)
    pooled = []
    for part, row in zip(parts, torch.split(rows, [len(part.mean) for part in parts]), strict=True):
        count, mean, m2 = row.unbind(-1)
        pooled.append(Moments(round(count[0].item()), mean.to(part.mean), m2.to(part.m2)))
    return pooled
