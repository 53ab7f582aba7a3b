"""Who sends which rows to whom, where several ranks hold a stage: a table of overlaps, and no leader.

    6 rows, source by channels (2 members)         target by samples (3 members, 3:2:1)
       held   0 1 2 3 4 5  |  0 1 2 3 4 5             held   0 1 2  |  3 4  |  5
       duty   0 1 2        |        3 4 5             duty   0 1 2  |  3 4  |  5
       pieces 0 1 2 ──► first    3 4 ──► second   5 ──► third

A member *holds* the rows that it needs or makes: its share where the group splits by samples, otherwise
all. It has *duty* for the rows that it sends, which no other member sends. Gradients travel by the
same table with source and target exchanged, since what every member of a channel group has is complete.
A value without rows goes whole from the first member to every receiver.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from lightning_hetpipe.plans import Split
from lightning_hetpipe.shares import bounds_of, largest_remainder

Rows = tuple[int, int]  # from, and up to but not including


@dataclass(frozen=True)
class Holding:
    """The ranks of a stage, and how its rows lie on them.

    Attributes:
        ranks: The members, in order.
        shares: Their fractions.
        split: ``none`` for one member; ``channel``: each has all rows; ``batch``: each has its share.
    """

    ranks: tuple[int, ...]
    shares: tuple[float, ...] = (1.0,)
    split: Split = "none"

    def held(self, n_rows: int) -> dict[int, Rows]:
        """Rows of a micro-batch that each rank holds."""
        if self.split == "batch":
            return self._cut(n_rows, self.shares)
        return dict.fromkeys(self.ranks, (0, n_rows))

    def duty(self, n_rows: int) -> dict[int, Rows]:
        """Rows of a micro-batch that each rank sends; disjoint, and together all."""
        return self._cut(n_rows, self.shares if self.split == "batch" else (1.0,) * len(self.ranks))

    def _cut(self, n_rows: int, shares: tuple[float, ...]) -> dict[int, Rows]:
        return dict(zip(self.ranks, pairwise(bounds_of(largest_remainder(n_rows, shares)))))


@cache
def overlaps(source: Holding, target: Holding, n_rows: int) -> Mapping[tuple[int, int], Rows]:
    """The rows that pass from each sending to each receiving rank; pairs without any are left out."""
    table = {}
    for sender, (start, stop) in source.duty(n_rows).items():
        for receiver, (first, last) in target.held(n_rows).items():
            rows = max(start, first), min(stop, last)
            if rows[0] < rows[1]:
                table[sender, receiver] = rows
    return table
