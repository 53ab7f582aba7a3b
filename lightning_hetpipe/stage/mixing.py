"""Whether the samples that go through a stage together change each other's results, found by trying.

    4 samples          0 1 2 3 ──► layer ──► 0 1 2 3
    sample 2 changed   0 1 * 3 ──► layer ──► 0 1 * 3   fine        * 1 * 3   it mixes samples

No rule could know every operation that mixes: a mean over the batch, a flip or roll of it, a reshape that
pairs samples, a product of the batch with itself. BatchNorm, which `norm=` answers for, does not count.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.stateless import _reparametrize_module

from lightning_hetpipe.tracing import Traced

N_TRIED = 4

Values = dict[str, Tensor]


def mixing_layer(
    traced: Traced, start: int, stop: int, inputs: Mapping[str, Tensor], axes: Mapping[str, int]
) -> str | None:
    """Name of the first of these layers after which a sample depends on another one; None if none does.

    Parameters, buffers and random state stay as they are. Weights on the meta device are drawn.

    Args:
        traced: The pipelined module, not yet partitioned.
        start, stop: The layers of the stage.
        inputs: Of the pipelined module: a call with at least two samples.
        axes: The dimension of each value that counts the samples.

    Raises:
        RuntimeError: The layers cannot run on so few samples.
    """
    values = {name: _take(value, axes.get(name), N_TRIED) for name, value in inputs.items()}
    stage = traced.stage(start, stop, returns=False)
    root = stage.root
    assert isinstance(root, nn.Module)
    with _undisturbed(root):
        if start:
            values |= _run(traced, 0, start, values)
        runs = [values]
        counts = {value.shape[axes[name]] for name, value in values.items() if name in axes}
        for sample in range(max(counts, default=0)):
            changed = {
                name: _change(values[name], axes[name], sample) for name in stage.input_names if name in axes
            }
            runs.append(values | changed)
        for layer in range(start, stop):
            made = [_run(traced, layer, layer + 1, each) for each in runs]
            for name, value in made[0].items():
                if name in axes and any(
                    _leaks(value, other[name], axes[name], sample) for sample, other in enumerate(made[1:])
                ):
                    return traced.graph.layers[layer].name
            runs = [each | new for each, new in zip(runs, made)]
    return None


def _run(traced: Traced, start: int, stop: int, values: Values) -> Values:
    torch.manual_seed(0)
    made: Values = traced.stage(start, stop, returns=False)(values)
    return made


@contextmanager
def _undisturbed(root: nn.Module) -> Iterator[None]:
    """Within it nothing that a forward does to the module lasts, and BatchNorm keeps samples apart."""
    state = {name: buffer.detach().clone() for name, buffer in root.named_buffers()}
    state |= {
        name: nn.Parameter(torch.randn(tensor.shape, dtype=tensor.dtype) * 0.02)
        for name, tensor in root.named_parameters()
        if tensor.is_meta
    }
    norms = [layer for layer in root.modules() if isinstance(layer, _BatchNorm) and layer.training]
    for layer in norms:
        layer.training = False
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            _reparametrize_module(root, state, tie_weights=True),
        ):
            yield
    finally:
        for layer in norms:
            layer.training = True


def _take(value: Tensor, axis: int | None, n: int) -> Tensor:
    return value.detach() if axis is None else value.detach().narrow(axis, 0, min(n, value.shape[axis]))


def _change(value: Tensor, axis: int, sample: int) -> Tensor:
    """The value with one sample's numbers replaced: by others of the same size, or by the next sample's."""
    changed = value.clone()
    row = changed.select(axis, sample)
    if value.is_floating_point() or value.is_complex():
        row += torch.randn_like(row) * (1.0 + value.abs().mean())
    else:
        row.copy_(value.select(axis, (sample + 1) % value.shape[axis]))
    return changed


def _leaks(value: Tensor, changed: Tensor, axis: int, sample: int) -> bool:
    """Whether other samples than the changed one differ by more than rounding."""
    others = [i for i in range(value.shape[axis]) if i != sample]
    before, after = (each.index_select(axis, torch.tensor(others)) for each in (value, changed))
    if not value.is_floating_point():
        return not torch.equal(before, after)
    scale = before.abs().max() if before.numel() else before.new_zeros(())
    rounding = torch.finfo(value.dtype).eps ** 0.5
    return bool(((after - before).abs() > rounding * scale).any())
