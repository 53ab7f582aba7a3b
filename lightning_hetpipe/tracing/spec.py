"""What a tensor looks like, without the tensor."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and whether a gradient flows back.

    Attributes:
        shape: All dimensions, the batch included.
        dtype: As it travels; under autocast this differs from the parameters' dtype.
        requires_grad: True where the backward sends a gradient of the same shape and dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """The spec of an existing tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def size_bytes(self) -> int:
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor with these properties and arbitrary content."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)


# The graph's inputs by name, for one micro-batch.
Signature = tuple[tuple[str, TensorSpec], ...]


def signature_of(inputs: Mapping[str, Tensor]) -> Signature:
    """The signature of bound inputs, in the order of the graph."""
    return tuple((name, TensorSpec.of(tensor)) for name, tensor in inputs.items())
