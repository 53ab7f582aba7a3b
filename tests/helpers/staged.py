"""Runs a traced module as a chain of stages in one process, and compares with the module itself."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_hetpipe.tracing import TensorSpec, Traced, trace


def loss_of(output: Any) -> Tensor:
    """A loss that gives every element of every returned tensor another weight."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weights = torch.linspace(-1, 1, leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape)
            total = total + (leaf * weights).sum()
    return total


def run_staged(
    traced: Traced, starts: Sequence[int], inputs: Mapping[str, Tensor], backward: bool
) -> tuple[Any, dict[str, Tensor]]:
    """Forward and backward with every boundary cut; the output, and the gradients of the inputs."""
    stops = [*starts[1:], len(traced.graph)]
    stages = [traced.stage(start, stop) for start, stop in zip(starts, stops)]
    specs = traced.shapes({name: TensorSpec.of(tensor) for name, tensor in inputs.items()})
    made = dict(inputs)
    entered, left = [], []
    for stage in stages:
        values = {
            name: made[name].detach().requires_grad_(made[name].requires_grad) for name in stage.input_names
        }
        kept = {name: value.clone() for name, value in values.items()}
        outputs = stage(values)
        assert tuple(outputs) == stage.output_names
        for name, tensor in outputs.items():
            assert (tuple(tensor.shape), tensor.dtype) == (specs[name].shape, specs[name].dtype), name
            assert not backward or tensor.requires_grad == specs[name].requires_grad, name
        for name, value in values.items():
            assert torch.equal(value, kept[name]), f"{name} was changed in place"
        entered.append(values)
        left.append(outputs)
        made.update({name: tensor for name, tensor in outputs.items() if name not in values})
    result = stages[-1].output(left[-1])
    gradients: dict[str, Tensor] = {}
    if not backward:
        return result, gradients
    loss_of(result).backward()
    for index in reversed(range(len(stages))):
        if index < len(stages) - 1:
            pairs = [
                (tensor, gradients[name])
                for name, tensor in left[index].items()
                if name in gradients and tensor.requires_grad
            ]
            if pairs:
                tensors, incoming = zip(*pairs)
                torch.autograd.backward(tensors, incoming)
        for name, value in entered[index].items():
            if value.grad is not None:
                gradients[name] = gradients[name] + value.grad if name in gradients else value.grad
    return result, {name: gradients[name] for name in inputs if name in gradients}


def assert_parity(
    make: Callable[[], nn.Module],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    partitions: Sequence[Sequence[int]] = (),
    modes: Sequence[bool] = (True, False),
    everywhere: bool = True,
    blocks: str | None = None,
    prepare: Callable[[nn.Module], object] = lambda module: None,
) -> Traced:
    """Checks outputs, gradients and buffers of staged runs against the module run whole.

    Cuts everywhere at once, and at each of the given partitions (fractions of the layers).
    """
    torch.manual_seed(0)
    module = make().double()
    prepare(module)
    kwargs = dict(kwargs or {})
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = [set(child.__dict__) for child in module.modules()]
    generator = torch.get_rng_state()
    traced = trace(module, args, kwargs, blocks=blocks)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert all(child.training is True for child in module.modules())
    assert attributes == [set(child.__dict__) for child in module.modules()]
    n_layers = len(traced.graph)
    chosen = [sorted({0, *(int(at * n_layers) for at in partition)}) for partition in partitions]
    for training in modes:
        for starts in [*([list(range(n_layers))] if everywhere else []), *chosen]:
            _compare(module, traced, before, starts, args, kwargs, training)
    return traced


def _compare(
    module: nn.Module,
    traced: Traced,
    before: Mapping[str, Tensor],
    starts: Sequence[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    training: bool,
) -> None:
    module.train(training)
    module.zero_grad()
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(before[name])
    whole = copy.deepcopy(module)
    inputs = traced.bind(*_copied(args, kwargs))
    with torch.set_grad_enabled(training):
        args, kwargs = _copied(args, kwargs)
        torch.manual_seed(1)
        expected = whole(*pytree.tree_map(_not_a_leaf, args), **pytree.tree_map(_not_a_leaf, kwargs))
        if training:
            loss_of(expected).backward()
        torch.manual_seed(1)
        result, gradients = run_staged(traced, starts, inputs, backward=training)
    module.train()
    leaves, structure = pytree.tree_flatten(result)
    expected_leaves, expected_structure = pytree.tree_flatten(expected)
    assert structure == expected_structure
    for leaf, wanted in zip(leaves, expected_leaves):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(leaf, wanted, rtol=1e-9, atol=1e-10)
        else:
            assert leaf == wanted
    torch.testing.assert_close(dict(module.named_buffers()), dict(whole.named_buffers()))
    if not training:
        return
    for (name, parameter), (_, twin) in zip(module.named_parameters(), whole.named_parameters()):
        assert (parameter.grad is None) == (twin.grad is None), name
        if twin.grad is not None:
            torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-7, atol=1e-8)
    for name, tensor in traced.bind(args, kwargs).items():
        assert (name in gradients) == (tensor.grad is not None), name
        if tensor.grad is not None:
            torch.testing.assert_close(gradients[name], tensor.grad, rtol=1e-7, atol=1e-8)


def _copied(args: Any, kwargs: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: (
            leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        ),
        (args, kwargs),
    )


def _not_a_leaf(leaf: Any) -> Any:
    return leaf * 1 if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
