"""python recipes/ranking.py

Is the chosen plan the fastest one in reality? Runs it and what could be done instead (the best plan without
groups, one device, even splits, data-parallel training with even and with speed-sized shares) on the emulated
clusters, a few steps at a time and in turn, and prints images/s predicted and measured. What a rival reaches
is the chosen plan's median by the median of their ratios in each round.

    python recipes/ranking.py --models vgg11 --clusters edge6 --rounds 3
"""

import argparse
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from bench import EMULATED, Bench, alone, identity, predicted_s
from warm import warm_processors

import lightning_hetpipe as hp
from lightning_hetpipe.errors import HetPipeError
from lightning_hetpipe.plans import Stage
from lightning_hetpipe.shares import largest_remainder


def rivals(bench: Bench) -> Iterator[tuple[str, hp.Plan]]:
    """Every plan to run, the chosen one first; a rival that fits nowhere is left out."""
    asked = (bench.profile, bench.cluster, bench.batch_size)
    chosen = hp.plan(*asked)
    yield "the plan", chosen
    singles = list(alone(*asked))
    candidates = {"layers only": {"merge": "never"}} | {
        f"even split by {even}": {"even": even} for even in ("layers", "time")
    }
    for name, options in candidates.items():
        try:
            plan = hp.plan(*asked, baselines=False, **options)
        except HetPipeError as error:
            print(f"{name}: {error}")
            continue
        if name != "layers only" or identity(plan) != identity(chosen):
            yield name, plan
    if not singles:
        print("the model fits on no device alone")
        return
    yield "fastest single device", min(singles, key=lambda plan: plan.prediction.step_s)
    if len(singles) < len(bench.cluster.devices):
        print("the model does not fit on every device, as data-parallel training needs")
        return
    speeds = [1 / plan.prediction.step_s for plan in singles]
    yield "data-parallel, even", data_parallel(bench, chosen, [1.0] * len(speeds))
    yield "data-parallel, uneven", data_parallel(bench, chosen, speeds)


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
    return min(plans, key=lambda plan: predicted_s(plan, bench.profile))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18"])
    parser.add_argument("--clusters", nargs="+", default=EMULATED)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="turns of two steps of each plan")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")

    for model, cluster in itertools.product(options.models, options.clusters):
        bench = Bench(model, cluster, options.batch)
        plans = dict(rivals(bench))
        measured = dict(zip(plans, bench.run_in_turn(list(plans.values()), options.rounds)))
        plan_s = measured["the plan"].step_s
        best = min(each.ratio for each in measured.values())
        print(f"{model} on {cluster}, batch {options.batch}")
        for name, each in measured.items():
            expected = options.batch / predicted_s(plans[name], bench.profile)
            found = options.batch / (plan_s * each.ratio)
            print(
                f"  {name:24} {expected:8.2f} images/s predicted {found:8.2f} "
                f"measured {best / each.ratio:7.1%} of the fastest",
                flush=True,
            )


if __name__ == "__main__":
    with warm_processors():
        main()
