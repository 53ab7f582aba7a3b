"""python recipes/prediction.py

How near predictions come: plans of four models on the emulated clusters, under both schedules and three
micro-batch sizes, run for real. Prints one row per plan, then the median and the worst difference.

    python recipes/prediction.py --models resnet18 --clusters lab4 twins --micro-batches 4 8
"""

import argparse
import itertools
import statistics
import warnings

import torch
from bench import EMULATED, Bench

import lightning_hetpipe as hp
from lightning_hetpipe.errors import InfeasibleError

MODELS = ("resnet18", "resnet50", "vgg11", "vit_tiny")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--clusters", nargs="+", default=EMULATED)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")

    differences = []
    print("model     cluster    schedule  micro-batch  stages  predicted   measured  difference", flush=True)
    for model, cluster in itertools.product(options.models, options.clusters):
        bench = Bench(model, cluster, options.batch)
        for schedule, size in itertools.product(options.schedules, options.micro_batches):
            row = f"{model:9} {cluster:10} {schedule:8} {size:12d}"
            try:
                plan = hp.plan(
                    bench.profile,
                    bench.cluster,
                    options.batch,
                    micro_batch=size,
                    schedule=schedule,
                    baselines=False,
                )
            except InfeasibleError:
                print(f"{row}  does not fit", flush=True)
                continue
            predicted_s, measured_s = plan.prediction.step_s, bench.run(plan, options.steps).step_s
            differences.append(predicted_s / measured_s - 1)
            figures = f"{predicted_s:8.3f} s {measured_s:8.3f} s {differences[-1]:+11.1%}"
            print(f"{row} {len(plan.stages):7d} {figures}", flush=True)
    sizes = sorted(map(abs, differences))
    print(
        f"{len(sizes)} plans: median difference {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, "
        f"{sum(size <= 0.05 for size in sizes)} within 5 %"
    )


if __name__ == "__main__":
    main()
