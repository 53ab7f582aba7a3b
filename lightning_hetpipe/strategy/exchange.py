"""Small objects from rank 0 to all, and from all to all, over a process group of their own.

The default group belongs to Lightning, which broadcasts on it in signal handlers too.
"""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetpipe.errors import HetPipeError

_FIRST_BYTES = 4096  # one message carries nearly every step's logs
_HEADER_BYTES = 8


class Exchange:
    """Broadcasts from rank 0 and gathers among all ranks; does nothing where there is one rank."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group: Any = None
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        return self._send(value) if self.leads else self._receive()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def lead(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` on rank 0 and gives its result to all; an error is raised on all."""
        if self.world_size == 1:
            return work()
        if not self.leads:
            return _unwrap(self._receive())
        try:
            outcome = ("value", work())
        except Exception as error:
            self._send(("error", describe(error)))
            raise
        self._send(outcome)
        return outcome[1]

    def agree(self, work: Callable[[], Any]) -> list[Any]:
        """Runs ``work`` on every rank and gives all results to all; the first error is raised on all."""
        mine: BaseException | None = None
        try:
            outcome = ("value", work())
        except Exception as error:
            mine, outcome = error, ("error", describe(error))
        outcomes = self.gather(outcome)
        if mine is not None:
            raise mine
        return [_unwrap(outcome) for outcome in outcomes]

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _send(self, value: Any) -> Any:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        head = len(data).to_bytes(_HEADER_BYTES, "little") + data[: _FIRST_BYTES - _HEADER_BYTES]
        first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        dist.broadcast(first, 0, group=self._group)
        if rest := data[_FIRST_BYTES - _HEADER_BYTES :]:
            dist.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8), 0, group=self._group)
        return value

    def _receive(self) -> Any:
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        dist.broadcast(first, 0, group=self._group)
        head = first.numpy().tobytes()
        size = int.from_bytes(head[:_HEADER_BYTES], "little")
        data = head[_HEADER_BYTES : _HEADER_BYTES + size]
        if size > len(data):
            rest = torch.empty(size - len(data), dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self._group)
            data += rest.numpy().tobytes()
        return pickle.loads(data)


def describe(error: BaseException) -> tuple[type[Exception], str]:
    """An error in a form that survives the journey: its own kind if it is ours, its text in any case."""
    if isinstance(error, HetPipeError):
        return type(error), str(error)
    return RuntimeError, f"{type(error).__name__}: {error}"


def _unwrap(outcome: tuple[str, Any]) -> Any:
    kind, value = outcome
    if kind == "error":
        error_type, message = value
        raise error_type(message)
    return value
