"""python recipes/largest_batch.py

How large a batch trains where memory is short: under a plan, and under GPipe with as many layers on each
device. Finds both on emulated devices with memory limits, then proves each: a step of that batch runs, the
planner refuses one sample more, and the same stages are refused memory at --above times that batch.

    python recipes/largest_batch.py --memory 60MB 40MB 40MB --width 4 --above 1.5
"""

import argparse
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from rich.table import Table
from torch import nn

import lightning_hetpipe as hp
from lightning_hetpipe.errors import InfeasibleError, MemoryLimitError
from lightning_hetpipe.planner.largest import largest_batch
from lightning_hetpipe.report import show
from lightning_hetpipe.trial import train_on_random_samples
from lightning_hetpipe.units import format_bytes, parse_bytes

CLASSES = 10
OPTIMIZER_COPIES = 1.0  # momentum


@dataclass(frozen=True)
class Claim:
    """A plan of the largest batch, and what came of putting it to the test."""

    name: str
    plan: hp.Plan
    one_more: str
    at: str
    above: str


def fresh(work: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a process of its own: memory that others freed would not count against a limit."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def network(width: int) -> nn.Module:
    """Eight convolutions, pooled three times: most activations are in front, most weights behind."""
    layers: list[nn.Module] = []
    channels = 3
    for block in range(4):
        out = width * 2**block
        for _ in range(2):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
            channels = out
        layers.append(nn.AdaptiveAvgPool2d(1) if block == 3 else nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, CLASSES))


def cluster_of(memory: list[str]) -> hp.Cluster:
    devices = [{"name": f"d{i}", "speed": 0.5, "memory": size} for i, size in enumerate(memory)]
    links = [{"latency": "0.1ms", "bandwidth": "1GB/s", "emulated": True}]
    return hp.Cluster.from_mapping({"name": "short", "devices": devices, "links": links})


def grown(plan: hp.Plan, batch_size: int) -> hp.Plan:
    """The same stages, slices and schedule for another batch, whether it fits or not."""
    n = -(-batch_size // plan.micro_batch)
    flight = (n,) * len(plan.stages) if plan.schedule == "gpipe" else plan.in_flight
    return replace(plan, batch_size=batch_size, in_flight=flight, prediction=None)


def run(plan: hp.Plan, options: argparse.Namespace) -> tuple[bool, str]:
    """Whether the plan trains, and what happened."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    shape = (3, options.pixels, options.pixels)
    try:
        trial = train_on_random_samples(network(options.width), [shape], CLASSES, plan, options.steps)
    except (MemoryLimitError, RuntimeError) as error:
        # Reading a batch that does not fit fails outside any action, with torch's own words.
        if not isinstance(error, MemoryLimitError) and "allocate memory" not in str(error):
            raise
        return False, str(error).splitlines()[0]
    pairs = zip(plan.cluster.devices, trial.timeline.peak_memory_bytes)
    fullest = max(pairs, key=lambda pair: pair[1] / pair[0].memory_bytes)
    used = f"{format_bytes(fullest[1])} of {format_bytes(fullest[0].memory_bytes)} on {fullest[0].name}"
    return True, f"{trial.step_s:.3g} s per step, {used}"


def measure(cluster: hp.Cluster, options: argparse.Namespace) -> hp.Profile:
    """The devices' profile, of a batch of 64."""
    torch.set_num_threads(1)
    return hp.profile(network(options.width), (torch.randn(64, 3, options.pixels, options.pixels),), cluster)


def prove(
    name: str, plan: hp.Plan, profile: hp.Profile, cluster: hp.Cluster, options: argparse.Namespace, **asked
) -> Claim:
    """Tries a largest batch, one sample more by the planner, and a larger one by running it."""
    try:
        hp.plan(
            profile,
            cluster,
            plan.batch_size + 1,
            micro_batch=plan.micro_batch,
            optimizer_copies=OPTIMIZER_COPIES,
            **asked,
        )
        one_more = "PLANNED"
    except InfeasibleError:
        one_more = "refused"
    larger = int(plan.batch_size * options.above) + 1
    print(f"{name}: a run of {plan.batch_size} samples, then of {larger}", flush=True)
    trains, at = fresh(run, plan, options)
    still, above = fresh(run, grown(plan, larger), options)
    return Claim(
        name,
        plan,
        one_more,
        f"{'trains' if trains else 'FAILS'}: {at}",
        f"{larger} {'TRAINS' if still else 'refused'}: {above}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", nargs="+", default=["300MB", "200MB", "200MB"], help="of each device")
    parser.add_argument("--width", type=int, default=8, help="channels of the first convolution")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of each run")
    parser.add_argument("--micro-batch", default="8", help="of both; auto: the smallest measured size")
    parser.add_argument(
        "--above", type=float, default=1.15, help="the batch that must be refused memory, times"
    )
    options = parser.parse_args()
    for size in options.memory:
        parse_bytes(size)

    cluster = cluster_of(options.memory)
    profile = fresh(measure, cluster, options)
    found = largest_batch(
        profile, cluster, micro_batch=options.micro_batch, optimizer_copies=OPTIMIZER_COPIES
    )
    claims = [prove("this plan", found.plan, profile, cluster, options)]
    if found.even is not None:
        claims.append(
            prove("gpipe, even split", found.even, profile, cluster, options, schedule="gpipe", even="layers",
                  device_order=[stage.devices[0] for stage in found.even.stages])
        )  # fmt: skip
    table = Table("largest batch of", "samples", "micro-batch", "one more", "a run of it", "a larger run")
    for claim in claims:
        size, slices = str(claim.plan.batch_size), f"{claim.plan.micro_batch} {claim.plan.schedule}"
        table.add_row(claim.name, size, slices, claim.one_more, claim.at, claim.above)
    show(table)
    if found.gain is not None:
        show(f"{found.gain:+.0%} against gpipe on an even split")


if __name__ == "__main__":
    main()
