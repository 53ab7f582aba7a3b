"""What a stage needs of the devices that share it: who they are, and three collectives."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> bool: ...


class Members(Protocol):
    """The members of a group, seen from one of them; any process group will do.

    Every member calls the same methods in the same order.
    """

    def rank(self) -> int:
        """Which member this is."""

    def size(self) -> int:
        """How many there are."""

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """Sums a contiguous tensor in place."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Fills a contiguous tensor with the root's."""

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Work:
        """Sends consecutive parts of a flat tensor to the members, and takes theirs."""
