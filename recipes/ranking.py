"""python recipes/ranking.py

Is the chosen plan the fastest one in reality? Runs it and what could be done instead (one device, even
splits, data-parallel training with even and with speed-sized shares) on the emulated clusters, in turn,
and prints measured images/s.

    python recipes/ranking.py --models vgg11 --clusters edge6 --rounds 3
"""

import argparse
import itertools
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from bench import EMULATED, Bench

import lightning_hetpipe as hp
from lightning_hetpipe.errors import HetPipeError
from lightning_hetpipe.plans import Stage
from lightning_hetpipe.shares import largest_remainder


def rivals(bench: Bench) -> Iterator[tuple[str, hp.Plan]]:
    """Every plan to run, the chosen one first; a rival that fits nowhere is left out."""
    chosen = hp.plan(bench.profile, bench.cluster, bench.batch_size)
    yield "the plan", chosen
    single = min((alone(bench, device.name) for device in bench.cluster.devices), key=predicted_s)
    yield "fastest single device", single
    for even in ("layers", "time"):
        try:
            yield f"even split by {even}", hp.plan(bench.profile, bench.cluster, bench.batch_size, even=even)
        except HetPipeError as error:
            print(f"even split by {even}: {error}")
    speeds = [1 / predicted_s(alone(bench, device.name)) for device in bench.cluster.devices]
    yield "data-parallel, even", data_parallel(bench, chosen, [1.0] * len(speeds))
    yield "data-parallel, uneven", data_parallel(bench, chosen, speeds)


def alone(bench: Bench, device: str) -> hp.Plan:
    return hp.plan(bench.profile, bench.cluster, bench.batch_size, device_order=[device], baselines=False)


def predicted_s(plan: hp.Plan) -> float:
    return plan.prediction.step_s


def data_parallel(bench: Bench, like: hp.Plan, weights: list[float]) -> hp.Plan:
    """All devices hold the whole model and share every slice, at the size that is predicted to be best."""
    counts = largest_remainder(bench.batch_size, weights)
    names = [device.name for device, count in zip(bench.cluster.devices, counts) if count]
    shares = tuple(count / bench.batch_size for count in counts if count)
    stage = Stage(0, len(like.layer_names), tuple(names), shares, "batch")
    base = replace(
        like, cluster=bench.cluster, stages=(stage,), schedule="1f1b", in_flight=(1,), prediction=None
    )
    sizes = [size for size in (4, 8, 16, 32, 64, 128) if 2 * len(names) <= size <= bench.batch_size]
    plans = [replace(base, micro_batch=size) for size in sizes or [bench.batch_size]]
    return min(plans, key=lambda plan: hp.simulate(plan, bench.profile).step_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18"])
    parser.add_argument("--clusters", nargs="+", default=EMULATED)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")

    for model, cluster in itertools.product(options.models, options.clusters):
        bench = Bench(model, cluster, options.batch)
        plans = dict(rivals(bench))
        seconds: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(options.rounds):
            for name, plan in plans.items():
                seconds[name].append(bench.run(plan, options.steps).step_s)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        best_s = min(medians.values())
        print(f"{model} on {cluster}, batch {options.batch}")
        for name, step_s in medians.items():
            predicted = plans[name].prediction
            said = f"{options.batch / predicted.step_s:8.2f}" if predicted else "       -"
            print(
                f"  {name:24} {options.batch / step_s:8.2f} images/s measured {said} predicted "
                f"{best_s / step_s:7.1%} of the fastest",
                flush=True,
            )


if __name__ == "__main__":
    main()
