"""From the arguments of a call to the graph's named inputs, and back."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_hetpipe.errors import GraphError


@dataclass(frozen=True)
class Binding:
    """How a call's arguments become named tensors.

    Attributes:
        signature: Of the module's ``forward``; keyword and positional calls bind alike.
        structure: Of the bound arguments, nested containers included.
        leaves: One entry per leaf: the input's name, or the constant that was there.
        labels: One label per leaf, for messages.
    """

    signature: inspect.Signature
    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]
    is_input: tuple[bool, ...]
    labels: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs, in the order of the arguments."""
        return tuple(leaf for leaf, is_input in zip(self.leaves, self.is_input) if is_input)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a call, by input name.

        Raises:
            GraphError: The call differs from the traced one in structure or in a constant.
        """
        leaves, structure = pytree.tree_flatten(_arguments(self.signature, args, kwargs))
        if structure != self.structure:
            raise GraphError(
                f"the module was traced with arguments {self.structure} and is now called with "
                f"{structure}: call it the same way each time"
            )
        inputs: dict[str, Tensor] = {}
        for leaf, known, is_input, label in zip(leaves, self.leaves, self.is_input, self.labels):
            if isinstance(leaf, Tensor) != is_input or not (is_input or _equal(leaf, known)):
                raise GraphError(
                    f"argument {label} was {'a tensor' if is_input else repr(known)} when the module was "
                    f"traced and is now {'a tensor' if isinstance(leaf, Tensor) else repr(leaf)}: only "
                    "tensors may change between calls"
                )
            if is_input:
                inputs[known] = leaf
        return inputs

    def unbind(self, inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call arguments in which every tensor is replaced by ``inputs[name]``."""
        leaves = [inputs[leaf] if is_input else leaf for leaf, is_input in zip(self.leaves, self.is_input)]
        arguments = pytree.tree_unflatten(leaves, self.structure)
        bound = inspect.BoundArguments(self.signature, arguments)
        return bound.args, bound.kwargs


def make_binding(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
    """Names the tensors of an example call after their arguments.

    Raises:
        GraphError: The arguments do not fit, hold no tensor, or hold something that is neither a
            tensor nor a plain constant.
    """
    signature = inspect.signature(module.forward)
    arguments = _arguments(signature, args, kwargs)
    with_paths, structure = pytree.tree_flatten_with_path(arguments)
    leaves: list[Any] = []
    is_input: list[bool] = []
    labels: list[str] = []
    taken: set[str] = set()
    for path, leaf in with_paths:
        label = re.sub(r"\W+", "_", pytree.keystr(path)).strip("_") or "input"
        labels.append(label)
        is_input.append(isinstance(leaf, Tensor))
        if isinstance(leaf, Tensor):
            name = label if label.isidentifier() else f"input_{label}"
            while name in taken:
                name += "_"
            taken.add(name)
            leaves.append(name)
        elif leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
            leaves.append(leaf)
        else:
            raise GraphError(
                f"argument {label} is a {type(leaf).__name__}; the pipelined module takes tensors, "
                "containers of tensors, and plain constants"
            )
    if not taken:
        raise GraphError(f"{type(module).__name__} is called without any tensor: nothing to send to a stage")
    return Binding(signature, structure, tuple(leaves), tuple(is_input), tuple(labels))


def _arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise GraphError(f"the call does not fit forward{signature}: {error}") from error
    bound.apply_defaults()
    return dict(bound.arguments)


def _equal(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)
