"""Small models and clusters made of numbers, for tests of schedules and planner."""

from collections.abc import Sequence

import numpy as np

from lightning_hetpipe.cluster import Cluster, Device, Emulation, Link
from lightning_hetpipe.graph import READER, Layer, LayerGraph, Value
from lightning_hetpipe.profiles import DeviceProfile, Profile
from lightning_hetpipe.sharing import SharedOperation, SharedWay, Sharing


def make_graph(
    n_layers: int,
    *,
    parameter_bytes: Sequence[int] | int = 1000,
    saved: Sequence[float] | float = 500.0,
    out: Sequence[float] | float = 100.0,
    skips: Sequence[tuple[int, int]] = (),
    input_gradient: bool = False,
    tied: tuple[tuple[int, ...], ...] = (),
) -> LayerGraph:
    """A chain of layers; ``skips`` are (producer, consumer) pairs beside it."""

    def each(value: object) -> list:
        return list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value] * n_layers

    layers = tuple(
        Layer(f"layer{i}", "Linear", (f"layer{i}.weight",), int(weight), 1e6, float(kept))
        for i, (weight, kept) in enumerate(zip(each(parameter_bytes), each(saved)))
    )
    sizes = each(out)
    values = [Value("x", READER, (0,), 50.0, gradient=input_gradient)]
    values += [Value(f"v{i}", i, (i + 1,), float(sizes[i])) for i in range(n_layers - 1)]
    values.append(Value(f"v{n_layers - 1}", n_layers - 1, (), 10.0, output=True))
    values += [Value(f"s{a}_{b}", a, (b,), float(sizes[a])) for a, b in skips]
    return LayerGraph(layers, tuple(values), tied, "synthetic", ("x",))


def make_cluster(
    speeds: Sequence[float],
    *,
    latency_s: float = 0.0,
    bandwidth_bytes_per_s: float = 1e9,
    memory_bytes: Sequence[int | None] | None = None,
    name: str = "synthetic",
) -> Cluster:
    """One device per speed, named d0, d1, ...; equal speeds (and memories) are of one kind."""
    limits = memory_bytes or [None] * len(speeds)
    devices = tuple(
        Device(
            f"d{i}", model=f"speed {speed:g}", memory_bytes=limit, emulation=Emulation(min(speed, 1.0), limit)
        )
        for i, (speed, limit) in enumerate(zip(speeds, limits))
    )
    return Cluster(name, devices, (Link(latency_s, bandwidth_bytes_per_s),))


def make_sharing(graph: LayerGraph, *, most: int = 8, work: float = 1.0, **figures) -> Sharing:
    """Every layer can be shared as a dense one: by its outputs, or by its inputs and a sum."""
    operations = [
        SharedOperation("x", -1, (), (_way("whole", (), "replicated"),), 0.0, 50.0, False, True, True)
    ]
    sizes = {value.producer: value.bytes_per_sample for value in graph.values}
    for i in range(len(graph)):
        name, before = f"v{i}", operations[-1].name
        ways = (
            _way("whole", ("replicated",), "replicated"),
            _way("column", ("copied",), "sharded", most=most),
            _way("row", ("sharded",), "replicated", forward=(("all_reduce", sizes[i]),), most=most),
        )
        operations.append(SharedOperation(name, i, (before,), ways, work, sizes[i], True, True, True))
    end = SharedOperation(
        "out",
        -1,
        (operations[-1].name,),
        (_way("whole", ("replicated",), "replicated"),),
        0.0,
        0.0,
        True,
        False,
        False,
    )
    return Sharing((*operations, end), most, **figures)


def _way(name, inputs, output, *, forward=(), most=8) -> SharedWay:
    return SharedWay(name, inputs, output, name != "whole", forward, (), most)


def make_profile(
    graph: LayerGraph,
    speeds: Sequence[float],
    *,
    layer_s: Sequence[float] | float = 0.01,
    alpha_s: float = 0.0,
    backward_ratio: float = 2.0,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    **figures: float,
) -> Profile:
    """Seconds per layer and sample at speed 1, plus ``alpha_s`` per layer and micro-batch."""
    per_layer = np.broadcast_to(np.asarray(layer_s, dtype=float), (len(graph),))
    devices = []
    for i, speed in enumerate(speeds):
        forward = (alpha_s + per_layer[:, None] * np.asarray(sizes)) / speed / (1 + backward_ratio)
        devices.append(
            DeviceProfile(
                f"d{i}",
                tuple(sizes),
                tuple(map(tuple, forward.tolist())),
                tuple(map(tuple, (forward * backward_ratio).tolist())),
            )
        )
    return Profile(graph, tuple(devices), **figures)
