"""Times the layers of a traced module on this device.

Layers are run one by one for their proportions, then in longer runs that are scaled to: a run of layers
costs less than its layers apart.

    layers   |a|b|c|d|e|f|g|h|        seconds of each
    runs     |   A   |   B   |        seconds of A replace a+b+c+d, in proportion

Both are counted in the processor's own time, which other processes do not disturb. At the smallest size
the runs also pass through the caller's section (which stretches them, when a device is emulated), with
a pause before each as in a pipeline: what they take longer than without, with cold caches, is added to their
layers at every size. Wall-clock seconds per processor second there, the *pace*, turn all figures into
wall-clock seconds: so a slow device, or one that gets a part of a core only, is found out without running
everything slowly.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.profiles import DeviceProfile
from lightning_hetpipe.profiling.walk import walk
from lightning_hetpipe.profiling.weigh import Weights, through, weigh
from lightning_hetpipe.tracing import StageModule, Traced

_REPEATS = (2, 5)
_PACE_S = 1.5  # seconds that a pace is taken over, pauses included, at least
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
    budget_s: float = 10.0,
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
        budget_s: Seconds to spend: repeats, then sizes, are left out where they would take longer. Two sizes
            are always run.

    Raises:
        ProfileError: A size is not positive, or the inputs are not those of the module.
    """
    sizes = tuple(sorted(set(micro_batches)))
    if not sizes or sizes[0] < 1:
        raise ProfileError(f"micro-batch sizes {list(micro_batches)} were asked for: give positive ones")
    if set(inputs) != set(traced.input_names):
        raise ProfileError(f"inputs {sorted(inputs)} were given; the module takes {list(traced.input_names)}")
    report = progress or (lambda done, total: None)
    n_layers = len(traced.graph)
    place = next(iter(inputs.values())).device
    layers = [traced.stage(layer, layer + 1, place) for layer in range(n_layers)]
    columns: dict[int, Times] = {}
    spreads: list[float] = []
    weights: dict[int, Weights] = {}
    began_s = time.perf_counter()
    with unchanged(traced.module, inputs):
        for size in _in_order(sizes, lambda: budget_s - (time.perf_counter() - began_s)):
            report(len(columns), len(sizes))
            batch = resized_rows(inputs, size)
            now_s, half_s = time.perf_counter(), budget_s / len(sizes) / 2
            apart, spread = _repeat(layers, batch, context, now_s + half_s)
            starts = run_starts(apart)
            runs = [traced.stage(start, stop, place) for start, stop in zip(starts, [*starts[1:], n_layers])]
            together, _ = _repeat(runs, batch, context, now_s + 2 * half_s)
            if size == sizes[0]:
                smallest, warm, first_starts = (runs, batch), together, starts
            if len(weights) < 2:
                weights[size] = weigh(layers, batch, context)
            columns[size] = (
                _scaled(apart[0], together[0], starts),
                _scaled(apart[1], together[1], starts),
            )
            spreads.append(spread)
        pace, cold = _pace(*smallest, section, context)
    report(len(sizes), len(sizes))
    measured = sorted(columns)
    extra = [_cold_extra(columns[sizes[0]][way], warm[way], cold[way], first_starts) for way in (0, 1)]
    parameters = [float(layer.parameter_bytes) for layer in traced.graph.layers]
    forward_peak, backward_peak = through([*weights.values()], [*weights], parameters)
    return DeviceProfile(
        device=device,
        micro_batches=tuple(measured),
        forward_s=_table([columns[size][0] for size in measured], extra[0], pace),
        backward_s=_table([columns[size][1] for size in measured], extra[1], pace),
        spread=statistics.median(spreads),
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
    )


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


def _pace(
    stages: Sequence[StageModule], inputs: Mapping[str, Tensor], section: Section, context: Section
) -> tuple[float, Times]:
    """Wall-clock seconds per second of the processor through the section, and the latter with cold caches."""
    sweeps: list[Times] = []
    walls_s, began_s = 0.0, time.perf_counter()
    while len(sweeps) < _REPEATS[0] or time.perf_counter() - began_s < _PACE_S:
        clock, wall = sweep(stages, inputs, context, section, _PAUSE_S)
        sweeps.append(clock)
        walls_s += sum(map(sum, wall))
    return walls_s / sum(sum(map(sum, sweep)) for sweep in sweeps), medians(sweeps)


def medians(sweeps: Sequence[Times]) -> Times:
    """Of each stage's forward and backward, over sweeps."""
    forward = [statistics.median(times) for times in zip(*(sweep[0] for sweep in sweeps))]
    backward = [statistics.median(times) for times in zip(*(sweep[1] for sweep in sweeps))]
    return forward, backward


def _repeat(
    stages: Sequence[StageModule], inputs: Mapping[str, Tensor], context: Section, deadline_s: float
) -> tuple[Times, float]:
    """Medians over sweeps, after one that warms up, and their relative half-width."""
    sweep(stages, inputs, context)
    fewest, most = _REPEATS
    sweeps: list[Times] = []
    while len(sweeps) < fewest or (len(sweeps) < most and time.perf_counter() < deadline_s):
        sweeps.append(sweep(stages, inputs, context)[0])
    totals = sorted(sum(each[0]) + sum(each[1]) for each in sweeps)
    spread = (totals[-1] - totals[0]) / 2 / statistics.median(totals)
    return medians(sweeps), spread


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


def _scaled(apart: Sequence[float], together: Sequence[float], starts: Sequence[int]) -> list[float]:
    """Layer times whose sum over each run is the run's own time."""
    scaled: list[float] = []
    for run_s, start, stop in zip(together, starts, [*starts[1:], len(apart)]):
        total = sum(apart[start:stop])
        scaled.extend(seconds * (run_s / total if total > 0 else 0.0) for seconds in apart[start:stop])
    return scaled


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
