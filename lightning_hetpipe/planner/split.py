"""Splits that need no search: equal numbers of layers, equal time on one device, or cuts by name."""

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import accumulate
from typing import Literal

import numpy as np

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.graph import LayerGraph
from lightning_hetpipe.planner.cost import LayerCosts
from lightning_hetpipe.plans import Stage
from lightning_hetpipe.shares import largest_remainder

Even = Literal["layers", "time"]


def even_stages(costs: LayerCosts, devices: Sequence[str], even: Even) -> tuple[Stage, ...]:
    """One stage per device, in the order given, as alike as can be.

    Args:
        costs: Layer times, for ``time``.
        devices: Who holds the stages.
        even: ``layers``: numbers of layers differ by one at most. ``time``: the longest stage is as short
            as it can be on the first device.

    Raises:
        PlanError: There are more devices than layers.
    """
    n_layers, n = len(costs.graph), len(devices)
    if n > n_layers:
        raise PlanError(f"{n} stages were asked for, but the model has {n_layers} layers to divide")
    if even == "layers":
        sizes = list(largest_remainder(n_layers, (1.0,) * n))
    else:
        forward, backward = costs.seconds(devices[0])
        sizes = _balanced(np.diff(forward + backward).tolist(), n)
    stops = list(accumulate(sizes))
    return tuple(Stage(stop - size, stop, (name,)) for name, size, stop in zip(devices, sizes, stops))


def named_stages(graph: LayerGraph, cuts: Sequence[str], devices: Sequence[str]) -> tuple[Stage, ...]:
    """One stage per device; every stage but the first begins at a named layer.

    Args:
        cuts: Layer names, in the model's order.
        devices: One more than cuts.

    Raises:
        PlanError: A name is no layer, or the names are out of order.
    """
    index = {layer.name: position for position, layer in enumerate(graph.layers)}
    for name in cuts:
        if name not in index:
            near = get_close_matches(name, index, 3) or list(index)[:8]
            raise PlanError(f"the plan cuts at {name!r}, which is no layer; did you mean {', '.join(near)}?")
    edges = [0, *(index[name] for name in cuts), len(graph)]
    if edges != sorted(set(edges)):
        raise PlanError(
            f"cuts {', '.join(cuts)} are layers {edges[1:-1]}: name them in the model's order, each once, "
            "without the first layer"
        )
    return tuple(Stage(start, stop, (name,)) for start, stop, name in zip(edges, edges[1:], devices))


def _balanced(weights: Sequence[float], n: int) -> list[int]:
    """Lengths of ``n`` runs whose heaviest is as light as can be."""
    prefix = np.concatenate([[0.0], np.cumsum(weights)])
    n_layers = len(weights)
    lengths = prefix[None] - prefix[:, None]  # [start, stop]
    lengths[np.tril_indices(n_layers + 1)] = np.inf
    heaviest = np.full(n_layers + 1, np.inf)
    heaviest[0] = 0.0
    cut = np.zeros((n + 1, n_layers + 1), dtype=int)
    for run in range(1, n + 1):
        worst = np.maximum(heaviest[:, None], lengths)
        cut[run] = worst.argmin(axis=0)
        heaviest = worst.min(axis=0)
    sizes, stop = [], n_layers
    for run in range(n, 0, -1):
        start = int(cut[run, stop])
        sizes.append(stop - start)
        stop = start
    return sizes[::-1]
