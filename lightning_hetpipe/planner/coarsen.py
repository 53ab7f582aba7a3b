"""Drops cuts that another cut replaces at no cost that matters.

Cut ``k`` replaces cut ``j`` when the layers between them take at most ``delta`` seconds on every device and
nothing larger crosses at ``k``. Moving a plan's cuts to their replacements lengthens no stage by more
than ``2 delta`` and no transfer at all, so the best objective grows by ``2 (P + M - 1) delta`` at most.
``delta`` is a fraction of ``1 / Σ_d 1/T_d``, about the least period that the devices allow together. Layers
without time of their own are merged at any fraction, and nothing is lost.
"""

from dataclasses import replace

import numpy as np

from lightning_hetpipe.planner.chain import Chain, Ints


def coarsen(chain: Chain, tolerance: float) -> tuple[Chain, Ints]:
    """The chain with fewer cuts, and the original layer at each of its cuts.

    Args:
        chain: Any.
        tolerance: Time, as a fraction of the least possible period, and memory, as a fraction of the
            smallest limit, that may change stages with a dropped cut.
    """
    kept = np.array([0, *_kept(chain, tolerance), chain.n_layers])
    return _with_cuts(chain, kept)


def thin(chain: Chain, most: int) -> tuple[Chain, Ints]:
    """At most so many layers: cuts evenly apart in time, each the one that the least crosses.

    Unlike `coarsen` this may lose: what is placed on the thin chain is to be cut again on the full one
    (`recut`), and bounded there.
    """
    most = max(most, chain.n_stages or 2)
    if chain.n_layers <= most:
        return chain, np.arange(chain.n_layers + 1)
    share = (chain.seconds / chain.seconds[:, -1:]).mean(axis=0)[1:-1]
    crossing = chain.hop_s.mean(axis=(0, 1))[1:-1]
    bins = (share * (most - 1)).astype(np.int64)
    order = np.lexsort([crossing, bins])
    bins = bins[order]
    inner = np.sort(order[np.diff(bins, prepend=-1) != 0]) + 1
    return _with_cuts(chain, np.array([0, *inner, chain.n_layers]))


def _with_cuts(chain: Chain, kept: Ints) -> tuple[Chain, Ints]:
    if len(kept) == chain.n_layers + 1 or len(kept) - 1 < (chain.n_stages or 1):
        return chain, np.arange(chain.n_layers + 1)
    coarse = replace(
        chain,
        seconds=chain.seconds[:, kept],
        hop_s=chain.hop_s[:, :, kept],
        occupied_s=chain.occupied_s[:, :, kept],
        memory=None if chain.memory is None else chain.memory.at(kept),
    )
    return coarse, kept


def _kept(chain: Chain, tolerance: float) -> list[int]:
    counts = (chain.available[: chain.n_choices] / chain.seconds[:, -1]).sum()
    slack_s = tolerance / float(counts)
    weight, slack_bytes = np.zeros(chain.n_layers + 1), np.inf
    if chain.memory is not None:
        weight = chain.memory.grows
        slack_bytes = tolerance * float(chain.memory.limit.min())
    kept: list[int] = []
    first = 1
    while first < chain.n_layers:
        moved_s = (chain.seconds[:, first:-1] - chain.seconds[:, first, None]).max(axis=0)
        near = (moved_s <= slack_s) & (weight[first:-1] - weight[first] <= slack_bytes)
        last = first + int(near.sum())
        kept += _smallest(chain, range(first, last))
        first = last
    return kept


def _smallest(chain: Chain, cuts: range) -> list[int]:
    """Cuts that no other, or an equal earlier one, undercuts in everything that crosses."""
    rows = [chain.hop_s[:, :, cut].ravel() for cut in cuts]
    if chain.memory is not None:
        rows = [np.append(row, chain.memory.crosses[:, cut]) for row, cut in zip(rows, cuts)]
    return [
        cut
        for i, cut in enumerate(cuts)
        if not any(
            (rows[j] <= rows[i]).all() and (j < i or (rows[j] < rows[i]).any())
            for j in range(len(rows))
            if j != i
        )
    ]
