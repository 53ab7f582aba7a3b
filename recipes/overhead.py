"""python recipes/overhead.py

How much slower than its simulation a pipeline runs, on stages whose cost is known exactly: they sleep.
Three uneven stages, twelve micro-batches, 1F1B; prints the simulated and the measured step and their ratio.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # torch loads it at the first backward: not while measuring
from torch import Tensor
from torch.distributed import TCPStore

from lightning_hetpipe.engine.control import Message
from lightning_hetpipe.engine.session import Engine, sample_weights
from lightning_hetpipe.graph import READER, Route
from lightning_hetpipe.planner.simulate import simulate_schedule
from lightning_hetpipe.schedule import Action, Kind, Schedule, make_schedule

RANKS_OF_STAGE = ((1,), (2,), (0,))
FORWARD_S = (0.010, 0.018, 0.008)
BACKWARD_S = (0.020, 0.030, 0.014)
ROUTES = (
    Route(READER, 0, ("x",), ()),
    Route(0, 1, ("a",), ("a",)),
    Route(1, 2, ("b",), ("b",)),
)
PORT = 29533


@dataclass(frozen=True)
class Spec:
    """What is known of a value before it exists."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Sleep(torch.autograd.Function):
    """The identity, for a price."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None, None


class SleepingStage:
    """One stage: takes ``FORWARD_S`` and ``BACKWARD_S``."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.weight = torch.ones((), requires_grad=True)

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        (value,) = values.values()
        out = Sleep.apply(value, self.weight, FORWARD_S[self.index], BACKWARD_S[self.index])
        return {"aby"[self.index]: out}

    def output(self, values: Mapping[str, Tensor]) -> Tensor:
        return values["y"]


class Constant:
    """A reader without any work of its own."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.value = torch.ones(shape)

    def start(self, m: int) -> dict[str, Tensor]:
        return {"x": self.value}

    def finish(self, m: int, output: Tensor) -> Tensor:
        return output.sum()

    def backward(self, m: int, grads: Mapping[str, Tensor]) -> None:
        raise AssertionError("nothing before the module learns")


def schedule_of(n_micro_batches: int, training: bool) -> Schedule:
    return make_schedule(
        "1f1b",
        ranks_of_stage=RANKS_OF_STAGE,
        n_ranks=3,
        n_micro_batches=n_micro_batches,
        in_flight=(5, 3, 1),
        routes=ROUTES,
        training=training,
    )


def run(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", PORT, 3, rank == 0, timeout=timedelta(seconds=30), wait_for_workers=False)
    engine = Engine(store, rank, 3, timeout_s=60)
    mine = {stage: SleepingStage(stage) for stage, ranks in enumerate(RANKS_OF_STAGE) if rank in ranks}
    engine.install(schedule_of, ROUTES, RANKS_OF_STAGE, mine)
    shape = (args.size // 4,)
    specs = [{name: Spec(shape, torch.float32, name != "x") for name in "xaby"}] * args.micro_batches
    weights = sample_weights((1,) * args.micro_batches)
    measured = []
    for _ in range(args.steps):
        engine.control.share(None if rank else Message())
        engine.train_step(specs, weights=weights, reader=Constant(shape) if rank == 0 else None)
        timeline = engine.gather_timeline()
        if timeline is not None:
            measured.append(timeline.step_s)
    if rank == 0:
        report(args, measured)
    engine.close()


def report(args: argparse.Namespace, measured: list[float]) -> None:
    def seconds(action: Action) -> float:
        if action.stage == READER:
            return 0.0
        return (FORWARD_S if action.kind is Kind.F else BACKWARD_S)[action.stage]

    schedule = schedule_of(args.micro_batches, True)
    simulated = simulate_schedule(schedule, seconds, lambda action, source, target: (0.0, 0.0, 0.0))
    step_s = statistics.median(measured[1:])
    print(f"simulated {simulated.step_s * 1e3:8.1f} ms per step, transfers free")
    print(
        f"measured  {step_s * 1e3:8.1f} ms, median of {len(measured) - 1}; best {min(measured) * 1e3:.1f} ms"
    )
    print(f"ratio     {step_s / simulated.step_s:8.3f}; best {min(measured) / simulated.step_s:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=12)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--size", type=int, default=2**16, help="bytes of each message")
    args = parser.parse_args()
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=run, args=(rank, args)) for rank in (1, 2)]
    for process in others:
        process.start()
    run(0, args)
    for process in others:
        process.join()


if __name__ == "__main__":
    main()
