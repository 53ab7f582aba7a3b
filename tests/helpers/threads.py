"""Members of a group as threads of one process: collectives without processes or sockets."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 60.0


@dataclass
class Table:
    """Where the members of one group lay down what the others read."""

    n: int
    barrier: threading.Barrier = field(init=False)
    laid: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.n, timeout=PATIENCE_S)
        self.laid = [None] * self.n

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Everybody's values by rank; nobody goes on before all have them."""
        self.laid[rank] = value
        self.barrier.wait()
        everyone = list(self.laid)
        self.barrier.wait()
        return everyone


class Done:
    def wait(self) -> bool:
        return True


class ThreadMember:
    """One member: the protocol `Members`."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._table.n

    def allreduce(self, tensors: list[Tensor]) -> Done:
        (tensor,) = tensors
        everyone = self._table.exchange(self._rank, tensor.detach().clone())
        total = everyone[0].clone()
        for other in everyone[1:]:
            total += other
        with torch.no_grad():
            tensor.copy_(total)
        return Done()

    def broadcast(self, tensor: Tensor, root: int) -> Done:
        everyone = self._table.exchange(self._rank, tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(everyone[root])
        return Done()

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> Done:
        everyone = self._table.exchange(self._rank, torch.split(input.detach().clone(), list(input_sizes)))
        with torch.no_grad():
            output.copy_(torch.cat([parts[self._rank] for parts in everyone]))
        return Done()


def run_members(n: int, work: Callable[[ThreadMember], Any]) -> list[Any]:
    """What ``work`` returns for each of ``n`` members that run at once; raises what the first one raised."""
    table = Table(n)
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadMember(table, rank))
        except BaseException as error:
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
