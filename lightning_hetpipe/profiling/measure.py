"""Times the layers of a traced module on this device.

Layers are run one by one for their proportions, then in longer runs that are scaled to: a run of layers
costs less than its layers apart, and only the runs pass through the caller's section (which may stretch
them, when a device is emulated).

    layers   |a|b|c|d|e|f|g|h|        seconds of each
    runs     |   A   |   B   |        seconds of A replace a+b+c+d, in proportion
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.profiles import DeviceProfile
from lightning_hetpipe.tracing import StageModule, Traced

_REPEATS = (2, 5)
_N_RUNS = 8

T = TypeVar("T")
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
    budget_s: float = 4.0,
) -> DeviceProfile:
    """Measures forward and backward seconds of every layer at several micro-batch sizes.

    The module must be whole, in the mode that it trains in, and where the inputs are. Its buffers, its
    gradients and the random state are as before when this returns.

    Args:
        traced: The traced module.
        inputs: Real inputs by name; batches are made by repeating or dropping their rows.
        micro_batches: Sizes in samples.
        device: The name that the profile carries.
        section: Entered around each timed run of layers; what it adds is part of the time.
        context: Entered around each forward, such as autocast.
        progress: Called with (parts done, parts in all).
        budget_s: Seconds to spend; each size is run a few times, whatever the budget.

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
    layers = [traced.stage(layer, layer + 1) for layer in range(n_layers)]
    columns: list[tuple[list[float], list[float]]] = []
    spreads: list[float] = []
    with _unchanged(traced.module, inputs):
        for index, size in enumerate(sizes):
            batch = _resized(inputs, size)
            deadline = time.perf_counter() + budget_s / len(sizes)
            report(2 * index, 2 * len(sizes))
            apart, spread = _repeat(layers, batch, nullcontext, context, deadline - budget_s / len(sizes) / 2)
            report(2 * index + 1, 2 * len(sizes))
            starts = _run_starts(apart)
            runs = [traced.stage(start, stop) for start, stop in zip(starts, [*starts[1:], n_layers])]
            together, _ = _repeat(runs, batch, section, context, deadline)
            columns.append((_scaled(apart[0], together[0], starts), _scaled(apart[1], together[1], starts)))
            spreads.append(spread)
    report(2 * len(sizes), 2 * len(sizes))
    return DeviceProfile(
        device=device,
        micro_batches=sizes,
        forward_s=tuple(zip(*(forward for forward, _ in columns))),
        backward_s=tuple(zip(*(backward for _, backward in columns))),
        spread=statistics.median(spreads),
    )


Times = tuple[list[float], list[float]]


def _repeat(
    stages: Sequence[StageModule],
    inputs: Mapping[str, Tensor],
    section: Section,
    context: Section,
    deadline: float,
) -> tuple[Times, float]:
    """Medians over sweeps, after one that warms up, and their relative half-width."""
    _sweep(stages, inputs, nullcontext, context)
    fewest, most = _REPEATS
    sweeps: list[Times] = []
    while len(sweeps) < fewest or (len(sweeps) < most and time.perf_counter() < deadline):
        sweeps.append(_sweep(stages, inputs, section, context))
    forward = [statistics.median(times) for times in zip(*(sweep[0] for sweep in sweeps))]
    backward = [statistics.median(times) for times in zip(*(sweep[1] for sweep in sweeps))]
    totals = sorted(sum(sweep[0]) + sum(sweep[1]) for sweep in sweeps)
    spread = (totals[-1] - totals[0]) / 2 / statistics.median(totals)
    return (forward, backward), spread


def _sweep(
    stages: Sequence[StageModule], inputs: Mapping[str, Tensor], section: Section, context: Section
) -> Times:
    """One forward and one backward through all stages, cut at every boundary; seconds of each stage."""
    made = dict(inputs)
    entered: list[dict[str, Tensor]] = []
    left: list[dict[str, Tensor]] = []
    forward_s: list[float] = []
    for stage in stages:
        values = {
            name: made[name].detach().requires_grad_(made[name].requires_grad) for name in stage.input_names
        }
        with context():
            seconds, outputs = _timed(partial(stage, values), section)
        forward_s.append(seconds)
        entered.append(values)
        left.append(outputs)
        made.update({name: tensor for name, tensor in outputs.items() if name not in values})
    gradients = {
        name: torch.full_like(tensor, 1 / max(tensor.numel(), 1)) for name, tensor in left[-1].items()
    }
    made.clear()
    backward_s: list[float] = []
    for _ in stages:
        values, outputs = entered.pop(), left.pop()
        pairs = [
            (tensor, gradients[name])
            for name, tensor in outputs.items()
            if tensor.requires_grad and name in gradients
        ]
        seconds = 0.0
        if pairs:
            tensors, incoming = zip(*pairs)
            seconds, _ = _timed(partial(torch.autograd.backward, tensors, incoming), section)
        backward_s.append(seconds)
        for name, tensor in values.items():
            if tensor.grad is not None:
                gradients[name] = tensor.grad + gradients[name] if name in gradients else tensor.grad
    return forward_s, backward_s[::-1]


def _timed(run: Callable[[], T], section: Section) -> tuple[float, T]:
    start = time.perf_counter()
    with section():
        result = run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return time.perf_counter() - start, result


def _run_starts(apart: Times) -> list[int]:
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


def _resized(inputs: Mapping[str, Tensor], n_samples: int) -> dict[str, Tensor]:
    before = next(iter(inputs.values())).shape[0]
    rows = [index % before for index in range(n_samples)]
    return {
        name: tensor.detach()[rows].requires_grad_(tensor.requires_grad)
        if tensor.shape[:1] == (before,)
        else tensor
        for name, tensor in inputs.items()
    }


@contextmanager
def _unchanged(module: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[None]:
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
