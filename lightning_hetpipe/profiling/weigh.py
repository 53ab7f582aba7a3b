"""What layers and optimizers need in passing: weighed as they run, one by one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_hetpipe.profiling.memory import mapping, memory_bytes, peak_memory_bytes, reset_peak
from lightning_hetpipe.profiling.walk import walk
from lightning_hetpipe.tracing import StageModule

T = TypeVar("T")
Table = tuple[tuple[float, float], ...]
N_TENSORS, TENSOR_BYTES = (1, 3), 8 * 2**20  # the kernel counts resident memory to about 1 MiB


class Weights(NamedTuple):
    """The most that each layer allocated on top of what was there: in its forward, and in its backward."""

    forward: list[float]
    backward: list[float]


def weigh(
    stages: Sequence[StageModule],
    inputs: Mapping[str, Tensor],
    context: Callable[[], AbstractContextManager[object]],
) -> Weights:
    """Runs layers forward and backward once; they have run before, so that nothing is loaded now."""
    place = next(iter(inputs.values())).device
    with mapping(place):
        return Weights(*walk(stages, inputs, context, lambda run: _weighed(run, place), 0.0))


def through(weights: Sequence[Weights], sizes: Sequence[int], fixed: Sequence[float]) -> list[Table]:
    """Lines through the weights at two sizes, forward and backward: ``(fixed, per sample)`` of each layer.

    Args:
        weights: At one size or two.
        sizes: Samples of each.
        fixed: Bytes of each layer's parameters: what does not grow in a backward that was weighed once.
    """
    small, large = weights[0], weights[-1]
    tables: list[Table] = []
    for index, row in enumerate(small):
        lines = []
        for layer, need in enumerate(row):
            if len(weights) == 1:
                still = min(need, fixed[layer]) if index else 0.0
                lines.append((still, (need - still) / sizes[0]))
            else:
                slope = max(0.0, (large[index][layer] - need) / (sizes[1] - sizes[0]))
                lines.append((max(0.0, need - slope * sizes[0]), slope))
        tables.append(tuple(lines))
    return tables


class OptimizerNeeds(NamedTuple):
    """What an optimizer allocates.

    Attributes:
        copies: State values that it keeps per parameter.
        of_largest, of_all: In passing, while it steps: times the bytes of the largest parameter, and times
            those of all.
    """

    copies: float
    of_largest: float
    of_all: float


def weigh_optimizer(
    make: Callable[..., torch.optim.Optimizer],
    settings: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> OptimizerNeeds:
    """Lets an optimizer step on few and on more parameters of 8 MiB, and sees what it keeps and needs.

    Draws no random numbers.

    Args:
        make, settings: As for `reference.optimizer_s_per_byte`.
    """
    rows = []
    for count in N_TENSORS:
        parameters = [torch.nn.Parameter(_square(device, dtype)) for _ in range(count)]
        with torch.enable_grad():
            made = make(parameters, **settings)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        made.step()
        with mapping(device):
            made.step()
            needed, _ = _weighed(made.step, device)
        rows.append((state_bytes(made) / (count * TENSOR_BYTES), needed / TENSOR_BYTES))
    (copies, few), (_, many) = rows
    of_all = max(0.0, (many - few) / (N_TENSORS[1] - N_TENSORS[0]))
    of_largest = max(0.0, few - N_TENSORS[0] * of_all)
    return OptimizerNeeds(round(copies, 2), round(2 * of_largest) / 2, round(2 * of_all) / 2)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors that an optimizer keeps."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def _square(device: torch.device, dtype: torch.dtype) -> Tensor:
    side = int((TENSOR_BYTES / dtype.itemsize) ** 0.5)
    return (
        torch.linspace(-1.0, 1.0, side * (TENSOR_BYTES // dtype.itemsize // side), device=device)
        .to(dtype)
        .view(side, -1)
    )


def _weighed(run: Callable[[], T], place: torch.device) -> tuple[float, T]:
    reset_peak(place)
    before = memory_bytes(place)
    result = run()
    return max(0.0, float(peak_memory_bytes(place) - before)), result
