"""A rank's membership in the group that shares its stage: collectives that can be interrupted and named.

A lost member makes the waits of the others fail like any other wait of the engine. Waiting is not
computing: the emulator stretches what was computed before a collective, and not the wait. On emulated links
a collective takes what its bytes take on the slowest link of the group, from when the last member comes;
the group's other traffic on that link does not slow it down. CUDA tensors go through host memory.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import sleep

from torch import Tensor

from lightning_hetpipe.cluster import Link
from lightning_hetpipe.engine.c10d import Collectives, Work
from lightning_hetpipe.engine.control import Control
from lightning_hetpipe.engine.emulate import Emulator


class Membership:
    """Connects to the other members; all of them create it together.

    Args:
        name: Unique among all groups, equal on all members.
        ranks: The members, in order.
        link: The slowest of the emulated links between them; None where none is emulated.
    """

    def __init__(
        self, control: Control, name: str, ranks: tuple[int, ...], emulator: Emulator, link: Link | None
    ) -> None:
        self.ranks = ranks
        self._control, self._emulator, self._link = control, emulator, link
        self._group: Collectives = control.create_group(name, ranks)
        self._label = f"a collective of ranks {', '.join(map(str, ranks))}"

    def rank(self) -> int:
        return self.ranks.index(self._control.rank)

    def size(self) -> int:
        return len(self.ranks)

    def allreduce(self, tensors: list[Tensor]) -> "Collective":
        """Sums a tensor over the members, in place."""
        (tensor,) = tensors
        host = tensor.cpu()
        n = self.size()
        with self._guarded():
            work = self._group.allreduce([host])
        return Collective(self, work, host, tensor, 2 * (n - 1), host.nbytes / n)

    def broadcast(self, tensor: Tensor, root: int) -> "Collective":
        """Gives all members the root's values."""
        host = tensor.cpu()
        with self._guarded():
            work = self._group.broadcast(host, root)
        return Collective(self, work, host, tensor, 1, host.nbytes)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> "Collective":
        """Exchanges consecutive parts of flat tensors."""
        host, me = output.cpu(), self.rank()
        kept = max(input.numel() - input_sizes[me], output.numel() - output_sizes[me])
        with self._guarded():
            work = self._group.alltoall_base(host, input.cpu(), list(output_sizes), list(input_sizes))
        return Collective(self, work, host, output, 1, kept * input.element_size())

    def finish(self, work: Work, rounds: int, round_bytes: float) -> None:
        """Waits for a collective of so many rounds on the slowest link."""
        with self._emulator.waiting(), self._guarded():
            work.wait()
            if self._link is not None:
                sleep(rounds * self._link.transfer_s(round_bytes))

    def _guarded(self) -> AbstractContextManager[None]:
        return self._control.naming(None, self._label)


@dataclass(frozen=True)
class Collective:
    """One under way; the result lies in the caller's tensor once it was waited for."""

    membership: Membership
    work: Work
    host: Tensor
    target: Tensor
    rounds: int
    round_bytes: float

    def wait(self) -> bool:
        self.membership.finish(self.work, self.rounds, self.round_bytes)
        if self.host is not self.target:
            self.target.copy_(self.host)
        return True
