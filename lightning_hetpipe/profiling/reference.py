"""Small fixed computations, timed as a rank runs its own: a device's pace, the cost of an optimizer step.

``section`` is what encloses every computation of a rank (`engine.emulate.Emulator.section`).
"""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.profiling.measure import settle

Section = Callable[[], AbstractContextManager[Any]]

_WINDOW_S = 0.25  # some periods (0.1 s) of a CPU quota
_WINDOWS = 3
_SIDE = {"cpu": 256, "cuda": 4096}  # a product of two such matrices, so often:
_REPEATS = {"cpu": 60, "cuda": 10}  # about 50 ms on one core of a server CPU, or on its GPU

N_TENSORS, TENSOR_BYTES = 16, 2**20


def reference_seconds(device: torch.device, section: Section = nullcontext) -> float:
    """Seconds of a fixed computation.

    A device that is throttled by something nobody declared takes longer than when it was profiled. The
    mean over a window, because a CPU quota lets some repeats pass at full speed; the best of some
    windows, because other processes disturb.
    """
    side, repeats = (table.get(device.type, table["cpu"]) for table in (_SIDE, _REPEATS))
    left = torch.linspace(-1.0, 1.0, side * side, device=device).view(side, side)
    product = torch.empty_like(left)

    def compute() -> None:
        for _ in range(repeats):
            torch.mm(left, left, out=product)

    _seconds(compute, device, section)
    return min(_mean(compute, device, section) for _ in range(_WINDOWS))


def _mean(compute: Callable[[], object], device: torch.device, section: Section) -> float:
    total_s, count = 0.0, 0
    while total_s < _WINDOW_S:
        total_s += _seconds(compute, device, section)
        count += 1
    return total_s / count


def optimizer_s_per_byte(
    optimizer: Callable[..., torch.optim.Optimizer],
    settings: Mapping[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    section: Section = nullcontext,
    repeats: int = 5,
) -> float:
    """Seconds of one optimizer step per parameter byte, the median over the repeats.

    Measured on parameters of 16 MiB in tensors of 1 MiB, after a first step that makes the optimizer's state.

    Args:
        optimizer: A class of torch.optim, or what else is called with parameters and settings.
        settings: Its keyword arguments, such as ``{"lr": 0.1, "momentum": 0.9}``.
        device: Where the parameters are.
        dtype: Of the parameters and gradients.
        section: Encloses the step.
        repeats: Steps that count.
    """
    parameters = []
    for _ in range(N_TENSORS):
        parameter = torch.nn.Parameter(_ramp(device, dtype))
        parameter.grad = _ramp(device, dtype)
        parameters.append(parameter)
    with torch.enable_grad():
        made = optimizer(parameters, **settings)
    _seconds(made.step, device, section)
    taken_s = statistics.median(_seconds(made.step, device, section) for _ in range(repeats))
    return taken_s / (N_TENSORS * TENSOR_BYTES)


def _ramp(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Values of ordinary size, without drawing random numbers."""
    return torch.linspace(-1.0, 1.0, TENSOR_BYTES // dtype.itemsize, device=device).to(dtype)


def _seconds(compute: Callable[[], object], device: torch.device, section: Section) -> float:
    settle(device)
    start_s = time.perf_counter()
    with section():
        compute()
        settle(device)
    return time.perf_counter() - start_s
