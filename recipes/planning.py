"""python recipes/planning.py

How long planning takes: 64 devices of 4 kinds, and 1,000 devices of 8 kinds, for a model of 200 layers made
of numbers. Prints processor seconds, the plan's stages, and its reason with the bound on what a better
placement could save.
"""

import argparse
import time

import numpy as np

from lightning_hetpipe.cluster import Cluster, Device, Link
from lightning_hetpipe.graph import READER, Layer, LayerGraph, Value
from lightning_hetpipe.planner.search import make_plan
from lightning_hetpipe.profiles import DeviceProfile, Profile

SIZES = (1, 2, 4, 8, 16, 32, 64)


def make_graph(n_layers: int, rng: np.random.Generator) -> LayerGraph:
    layers = tuple(
        Layer(f"layer{i}", "Linear", (f"layer{i}.weight",), int(rng.integers(10**4, 10**6)), 1e6, 2e4)
        for i in range(n_layers)
    )
    values = [Value("x", READER, (0,), 50.0, gradient=False)]
    values += [Value(f"v{i}", i, (i + 1,), float(rng.uniform(2e3, 2e4))) for i in range(n_layers - 1)]
    values.append(Value(f"v{n_layers - 1}", n_layers - 1, (), 10.0, output=True))
    return LayerGraph(layers, tuple(values), (), "synthetic", ("x",))


def make_problem(n_devices: int, n_kinds: int, n_layers: int) -> tuple[Profile, Cluster]:
    """Equal numbers of every kind, each kind a quarter slower than the one before; 100 MB/s between them."""
    rng = np.random.default_rng(3)
    graph, layer_s = make_graph(n_layers, rng), rng.uniform(0.002, 0.006, n_layers)
    speeds = [0.8 * 0.75 ** (i * n_kinds // n_devices) for i in range(n_devices)]
    devices = tuple(Device(f"d{i}", model=f"speed {speed:g}") for i, speed in enumerate(speeds))
    tables = {
        speed: tuple(map(tuple, ((0.002 + layer_s[:, None] * np.array(SIZES)) / speed / 3).tolist()))
        for speed in set(speeds)
    }
    twice = {
        speed: tuple(tuple(2 * seconds for seconds in row) for row in table)
        for speed, table in tables.items()
    }
    profiles = tuple(
        DeviceProfile(device.name, SIZES, tables[speed], twice[speed])
        for device, speed in zip(devices, speeds)
    )
    return Profile(graph, profiles), Cluster("synthetic", devices, (Link(1e-4, 1e8),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--sizes", default="64/4,1000/8", help="devices/kinds, separated by commas")
    args = parser.parse_args()
    for text in args.sizes.split(","):
        n_devices, n_kinds = map(int, text.split("/"))
        profile, cluster = make_problem(n_devices, n_kinds, args.layers)
        before_s = time.process_time()
        plan = make_plan(profile, cluster, batch_size=max(128, n_devices))
        seconds = time.process_time() - before_s
        print(f"{n_devices} devices of {n_kinds} kinds, {args.layers} layers: {seconds:.1f} s")
        print(f"  {len(plan.stages)} stages; {plan.reason}")


if __name__ == "__main__":
    main()
