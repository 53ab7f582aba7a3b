"""Times the layers of a traced module on this device.

Layers are run one by one for their proportions, then in longer runs that are scaled to: a run of layers
costs less than its layers apart.

    layers   |a|b|c|d|e|f|g|h|        seconds of each
    runs     |   A   |   B   |        seconds of A replace a+b+c+d, in proportion

All sizes take turns, round after round, and every figure is put in proportion to the smallest size's runs
just before and after it: a machine whose speed drifts while it is measured gives all of them the same pace.

    round    s  layers 2  runs 2  s  layers 8  runs 8  s  layers 32  runs 32  s  pace  cold

Both are counted in the processor's own time, which other processes do not disturb. Every round also runs the
smallest size through the caller's section (which stretches it, when a device is emulated): wall-clock
seconds per processor second there, the *pace*, turn all figures into wall-clock seconds. So a slow device,
or one that gets a part of a core only, is found out without running everything slowly. And it runs it with
a pause before each run, as in a pipeline: what the runs take longer so, with cold caches, is added to their
layers at every size.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.profiles import DeviceProfile
from lightning_hetpipe.profiling.walk import walk
from lightning_hetpipe.profiling.weigh import Weights, through, weigh
from lightning_hetpipe.tracing import StageModule, Traced

_ROUNDS = (2, 5)
_FIRST_PART = 0.25  # of the budget, for the first look at all sizes
_PACE_S = 0.2  # seconds that a round's pace is taken over at least: two periods of a CPU quota
_PAUSE_S = 0.02  # about what a stage of a pipeline waits for its next micro-batch
_N_RUNS = 8

T = TypeVar("T")
Timing = tuple[float, float]  # seconds of the processor, and of the wall clock
Times = tuple[list[float], list[float]]  # forward and backward, by stage
Section = Callable[[], AbstractContextManager[object]]


def measure_device(
    traced: Traced,
    inputs: Mapping[str, Tensor],
    micro_batches: Sequence[int],
    device: str,
    *,
    section: Section = nullcontext,
    context: Section = nullcontext,
    progress: Callable[[int, int], None] | None = None,
    budget_s: float = 20.0,
) -> DeviceProfile:
    """Measures forward and backward seconds of every layer at several micro-batch sizes.

    The module must be whole, in the mode that it trains in, and where the inputs are. Its buffers, its
    gradients and the random state are as before when this returns.

    Args:
        traced: The traced module.
        inputs: Real inputs by name; batches are made by repeating or dropping their rows.
        micro_batches: Sizes in samples.
        device: The name that the profile carries.
        section: Entered around runs of layers; what it adds is part of the time.
        context: Entered around each forward, such as autocast.
        progress: Called with (parts done, parts in all).
        budget_s: Seconds to spend: rounds, then sizes, are left out where they would take longer. Two sizes
            are always run, in two rounds.

    Raises:
        ProfileError: A size is not positive, or the inputs are not those of the module.
    """
    sizes = tuple(sorted(set(micro_batches)))
    if not sizes or sizes[0] < 1:
        raise ProfileError(f"micro-batch sizes {list(micro_batches)} were asked for: give positive ones")
    if set(inputs) != set(traced.input_names):
        raise ProfileError(f"inputs {sorted(inputs)} were given; the module takes {list(traced.input_names)}")
    report = progress or (lambda done, total: None)
    n_layers, parts = len(traced.graph), len(sizes) + _ROUNDS[1]
    place = next(iter(inputs.values())).device
    layers = [traced.stage(layer, layer + 1, place) for layer in range(n_layers)]
    began_s = time.perf_counter()

    def left_s(part: float) -> float:
        return part * budget_s - (time.perf_counter() - began_s)

    with unchanged(traced.module, inputs):
        benches: list[_Bench] = []
        weights: dict[int, Weights] = {}
        for size in _in_order(sizes, lambda: left_s(_FIRST_PART)):
            report(len(benches), parts)
            batch = resized_rows(inputs, size)
            if not benches:
                sweep(layers, batch, context)  # warms up
            starts = run_starts(sweep(layers, batch, context)[0])
            if len(weights) < 2:
                weights[size] = weigh(layers, batch, context)
            runs = [traced.stage(start, stop, place) for start, stop in zip(starts, [*starts[1:], n_layers])]
            benches.append(_Bench(size, batch, layers, runs, starts))
        benches.sort(key=lambda bench: bench.size)
        sweep(benches[0].runs, benches[0].batch, context)  # warms up
        rounds: list[_Round] = []
        longest_s = 0.0
        while len(rounds) < _ROUNDS[0] or (len(rounds) < _ROUNDS[1] and longest_s < left_s(1.0)):
            report(len(sizes) + len(rounds), parts)
            round_s = time.perf_counter()
            rounds.append(_round(benches, section, context))
            longest_s = max(longest_s, time.perf_counter() - round_s)
    report(parts, parts)
    columns, extra, pace, spread = _summary(benches, rounds)
    parameters = [float(layer.parameter_bytes) for layer in traced.graph.layers]
    forward_peak, backward_peak = through([*weights.values()], [*weights], parameters)
    return DeviceProfile(
        device=device,
        micro_batches=tuple(bench.size for bench in benches),
        forward_s=_table([column[0] for column in columns], extra[0], pace),
        backward_s=_table([column[1] for column in columns], extra[1], pace),
        spread=spread,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
    )


@dataclass(frozen=True)
class _Bench:
    """What is run at one size: the layers one by one, and in runs that begin at ``starts``."""

    size: int
    batch: Mapping[str, Tensor]
    layers: Sequence[StageModule]
    runs: Sequence[StageModule]
    starts: Sequence[int]


@dataclass(frozen=True)
class _Round:
    """Seconds of one round, the smallest bench first; all in the processor's time but for the pace.

    Attributes:
        apart, together: Of the layers and of the runs, by bench.
        cold: Of the smallest bench's runs, each after a pause.
        smallest: Of the smallest bench's runs in all, before and after each pair of the above.
        pace: Wall-clock seconds per second of the processor, through the section.
    """

    apart: list[Times]
    together: list[Times]
    cold: Times
    smallest: list[float]
    pace: float


def _round(benches: Sequence[_Bench], section: Section, context: Section) -> _Round:
    small = benches[0]

    def smallest_s() -> float:
        return total_seconds(sweep(small.runs, small.batch, context)[0])

    apart, together, smallest = [], [], [smallest_s()]
    for bench in benches:
        apart.append(sweep(bench.layers, bench.batch, context)[0])
        together.append(sweep(bench.runs, bench.batch, context)[0])
        smallest.append(smallest_s())
    clock_s = wall_s = 0.0
    while wall_s < _PACE_S:
        clock, wall = sweep(small.runs, small.batch, context, section)
        clock_s, wall_s = clock_s + total_seconds(clock), wall_s + total_seconds(wall)
    cold, _ = sweep(small.runs, small.batch, context, pause_s=_PAUSE_S)
    smallest.append(smallest_s())
    return _Round(apart, together, cold, smallest, wall_s / clock_s)


def _summary(
    benches: Sequence[_Bench], rounds: Sequence[_Round]
) -> tuple[list[Times], tuple[list[float], list[float]], float, float]:
    """Seconds of each layer by bench, what cold caches add to each layer, the pace, and the spread."""
    usual_s = statistics.median(each for round_ in rounds for each in round_.smallest)

    def steady(times: Times, round_: _Round, place: int) -> Times:
        """Times as they would have been at the usual speed of the machine."""
        around = round_.smallest[place : place + 2]
        return scaled(times, usual_s * len(around) / sum(around))

    columns: list[Times] = []
    spreads: list[float] = []
    for place, bench in enumerate(benches):
        apart = [steady(round_.apart[place], round_, place) for round_ in rounds]
        together = medians([steady(round_.together[place], round_, place) for round_ in rounds])
        middle = medians(apart)
        columns.append(
            (
                _summing_to(together[0], middle[0], bench.starts),
                _summing_to(together[1], middle[1], bench.starts),
            )
        )
        totals = sorted(map(total_seconds, apart))
        spreads.append((totals[-1] - totals[0]) / 2 / statistics.median(totals))
        if place == 0:
            warm = together
    cold = medians([steady(round_.cold, round_, len(benches)) for round_ in rounds])
    starts = benches[0].starts
    extra = (
        _cold_extra(columns[0][0], warm[0], cold[0], starts),
        _cold_extra(columns[0][1], warm[1], cold[1], starts),
    )
    return columns, extra, statistics.median(round_.pace for round_ in rounds), statistics.median(spreads)


def _in_order(sizes: Sequence[int], left_s: Callable[[], float]) -> Iterator[int]:
    """The smallest size, one in the middle, then the largest and the others while there is time.

    A line through the first two says what a size would take: far apart, they make a line worth drawing,
    also beyond them.
    """
    first, rest = sizes[0], list(sizes[1:])
    before_s = left_s()
    yield first
    if not rest:
        return
    first_s = before_s - left_s()
    second = rest.pop(len(rest) // 2)
    before_s = left_s()
    yield second
    slope_s = max(0.0, (before_s - left_s() - first_s) / (second - first))
    for size in sorted(rest, reverse=True):
        if first_s + slope_s * (size - first) <= left_s():
            yield size


def total_seconds(times: Times) -> float:
    return sum(times[0]) + sum(times[1])


def scaled(times: Times, factor: float) -> Times:
    return [factor * each for each in times[0]], [factor * each for each in times[1]]


def medians(sweeps: Sequence[Times]) -> Times:
    """Of each stage's forward and backward, over sweeps."""
    forward = [statistics.median(times) for times in zip(*(sweep[0] for sweep in sweeps))]
    backward = [statistics.median(times) for times in zip(*(sweep[1] for sweep in sweeps))]
    return forward, backward


def sweep(
    stages: Sequence[StageModule],
    inputs: Mapping[str, Tensor],
    context: Section,
    section: Section = nullcontext,
    pause_s: float = 0.0,
) -> tuple[Times, Times]:
    """One forward and one backward through all stages, apart from each other, each after a pause.

    Returns:
        Forward and backward seconds of each stage, in the processor's time and in wall-clock time.
    """
    place = next(iter(inputs.values())).device

    def timed(run: Callable[[], T]) -> tuple[Timing, T]:
        time.sleep(pause_s)
        return _timed(run, section, place)

    forward, backward = walk(stages, inputs, context, timed, (0.0, 0.0))
    clock, wall = (([each[kind] for each in forward], [each[kind] for each in backward]) for kind in (0, 1))
    return clock, wall


def _timed(run: Callable[[], T], section: Section, place: torch.device) -> tuple[Timing, T]:
    clock = _clock(place)
    settle(place)
    start_s, wall_s = clock(), time.perf_counter()
    with section():
        result = run()
        settle(place)
        ran_s = clock() - start_s
    return (ran_s, time.perf_counter() - wall_s), result


def _clock(place: torch.device) -> Callable[[], float]:
    """What counts the processor's own seconds; a GPU's are those of the wall clock."""
    if place.type != "cpu":
        return time.perf_counter
    return time.thread_time if torch.get_num_threads() == 1 else time.process_time


def _cold_extra(
    layers: Sequence[float], warm: Sequence[float], cold: Sequence[float], starts: Sequence[int]
) -> list[float]:
    """What each layer takes longer after a pause: what its run does, in proportion."""
    extra: list[float] = []
    for warm_s, cold_s, start, stop in zip(warm, cold, starts, [*starts[1:], len(layers)]):
        factor = max(0.0, cold_s / warm_s - 1) if warm_s > 0 else 0.0
        extra.extend(factor * seconds for seconds in layers[start:stop])
    return extra


def _table(
    columns: Sequence[Sequence[float]], extra: Sequence[float], pace: float
) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(pace * (seconds + more) for seconds in row) for *row, more in zip(*columns, extra))


def settle(device: torch.device) -> None:
    """Waits until a GPU has done what this thread asked of it; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def run_starts(apart: Times) -> list[int]:
    """Beginnings of about `_N_RUNS` runs of layers that take similar times."""
    seconds = [forward + backward for forward, backward in zip(*apart)]
    share = sum(seconds) / _N_RUNS
    starts, passed = [0], 0.0
    for layer, layer_s in enumerate(seconds[:-1]):
        passed += layer_s
        if passed >= share:
            starts.append(layer + 1)
            passed = 0.0
    return starts


def _summing_to(together: Sequence[float], apart: Sequence[float], starts: Sequence[int]) -> list[float]:
    """Layer times whose sum over each run is the run's own time."""
    found: list[float] = []
    for run_s, start, stop in zip(together, starts, [*starts[1:], len(apart)]):
        total = sum(apart[start:stop])
        found.extend(seconds * (run_s / total if total > 0 else 0.0) for seconds in apart[start:stop])
    return found


def resized_rows(inputs: Mapping[str, Tensor], n_samples: int) -> dict[str, Tensor]:
    before = next(iter(inputs.values())).shape[0]
    rows = [index % before for index in range(n_samples)]
    return {
        name: tensor.detach()[rows].requires_grad_(tensor.requires_grad)
        if tensor.shape[:1] == (before,)
        else tensor
        for name, tensor in inputs.items()
    }


@contextmanager
def unchanged(module: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Puts buffers, gradients and random state back."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    devices = [tensor.device for tensor in inputs.values() if tensor.is_cuda]
    try:
        for parameter in module.parameters():
            parameter.grad = None
        with torch.random.fork_rng(devices), torch.enable_grad():
            yield
    finally:
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name]
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
