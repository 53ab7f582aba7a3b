"""What all ranks say to each other around a step, and how they learn that one of them failed.

    rank 0   header ──► every rank     operation, samples, signature
             ... the actions ...
             footer ──► every rank     error flag, loss, logs

Messages have one fixed size; an object follows only when the message says so. All waits of the
engine go through `Control.wait`, which turns a broken or overdue one into `RankFailedError`.
"""

import contextlib
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_hetpipe.engine.c10d import (
    Collectives,
    Group,
    PrefixStore,
    Store,
    Work,
    gloo_device,
    gloo_group,
    nccl_group,
)
from lightning_hetpipe.engine.sockets import Sockets
from lightning_hetpipe.engine.watch import SILENT_S, Failure, Watch
from lightning_hetpipe.errors import RankFailedError, StepError

N_NUMBERS = 16
_MESSAGE_BYTES = 8 * (3 + 2 * N_NUMBERS)
_POLL_S = 50e-6
_FIXED, _OBJECT, _GATHER_SIZE, _GATHER = range(4)  # tags


@dataclass(frozen=True)
class Message:
    """What rank 0 tells all ranks.

    Attributes:
        operation: The sender's code for what follows.
        integers, floats: Up to 16 of each.
        object: Anything that pickles; sent only if it is not None.
    """

    operation: int = 0
    integers: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    object: Any = None


class Control:
    """The control group of one rank, created once per process by all ranks together.

    Args:
        store: Reached by all ranks.
        rank, world_size: This rank, and how many there are. A world of one needs no store.
        timeout_s: Bounds every wait.
        store_rank: The rank whose process serves the store; None if none does (torchrun's agent, a file).
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        store_rank: int | None = 0,
    ) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._sockets = Sockets()
        self._device_groups: list[Group] = []
        self.failed = False  # this rank ends by an exception, its own or what it was told of another
        self._closed = False
        self._held: list[tuple[Work, Tensor, int]] = []
        self._posted: tuple[Work, Tensor] | None = None
        self.store: Store | None = None
        self._group: Group | None = None
        self._watch: Watch | None = None
        if world_size == 1:
            return
        if store is None:
            raise ValueError(f"{world_size} ranks need a store")
        self.store = PrefixStore("hetpipe", store)
        watch_store = self.store.clone()
        watch_store.set_timeout(timedelta(seconds=timeout_s))
        self._watch = Watch(
            watch_store,
            rank,
            world_size,
            store_rank=store_rank,
            timeout_s=timeout_s,
            on_failure=self._disconnect,
        )
        self._watch.start()
        self._device = gloo_device()
        self._group = self.create_group("control", tuple(range(world_size)))
        self._post()

    def create_group(self, name: str, ranks: tuple[int, ...]) -> Collectives:
        """A gloo group of these ranks; all of them call this in the same order of names."""
        assert self.store is not None
        store = PrefixStore(name, self.store)
        with self.joining(name):
            return gloo_group(store, ranks.index(self.rank), len(ranks), self._device, self.timeout_s)

    def create_device_group(self, name: str, ranks: tuple[int, int], device: torch.device) -> Group:
        """An NCCL group of two ranks, each with a GPU of its own; nothing is connected yet."""
        assert self.store is not None
        # Whoever is overdue is to be named by `wait_on_device`; NCCL would end the process.
        patience_s = 2 * self.timeout_s + 60
        with self.naming(None, f"joining group {name}"):
            store = PrefixStore(name, self.store)
            group = nccl_group(store, ranks.index(self.rank), len(ranks), device, patience_s)
        self._device_groups.append(group)
        return group

    def close_device_groups(self) -> None:
        """Closes all NCCL groups, whatever is under way in them."""
        groups, self._device_groups = self._device_groups, []  # two threads may want this at once
        for group in groups:
            with contextlib.suppress(RuntimeError):
                group.abort()

    @property
    def doing(self) -> str:
        """What this rank does now; told to the others if it is lost."""
        return self._watch.doing if self._watch else ""

    @doing.setter
    def doing(self, action: str) -> None:
        if self._watch:
            self._watch.doing = action

    def share(self, message: Message | None = None) -> Message:
        """Hands rank 0's message to every rank; the others call this without one.

        Rank 0 goes on at once; it waits for the transfers at the next call.

        Raises:
            RankFailedError: A rank failed, was lost, or did not answer in time.
        """
        self.check()
        if self.rank == 0:
            if message is None:
                raise ValueError("rank 0 shares a message, the others receive it")
            self._send_to_all(message)
            return message
        assert self._posted is not None
        work, buffer = self._posted
        self.wait(work, 0, "sending the next header or footer")
        received, size_bytes = _decode(buffer)
        if size_bytes:
            received = Message(
                received.operation, received.integers, received.floats, self._receive(0, size_bytes, _OBJECT)
            )
        self._post()
        return received

    def gather(self, value: Any) -> list[Any] | None:
        """Collects one object of every rank, by rank, on rank 0; the others get None."""
        self.check()
        if self.rank != 0:
            assert self._group is not None
            data = _to_bytes(value)
            size = torch.tensor([data.numel()])
            with self.naming(0, "gathering"):
                works = [
                    self._group.send([size], 0, _GATHER_SIZE),
                    self._group.send([data], 0, _GATHER),
                ]
                for work in works:
                    work.wait()
            return None
        values = [value]
        for rank in range(1, self.world_size):
            size = torch.empty(1, dtype=torch.int64)
            assert self._group is not None
            with self.naming(rank, "gathering"):
                self._group.recv([size], rank, _GATHER_SIZE).wait()
            values.append(self._receive(rank, int(size), _GATHER))
        return values

    def wait(self, work: Work, peer: int, expected: str) -> None:
        """Waits for a transfer with a peer that is expected to do something.

        Raises:
            RankFailedError: It broke or took longer than the timeout; names the rank that caused it.
        """
        with self.naming(peer, expected):
            work.wait()

    def wait_on_device(self, work: Work, peer: int, expected: str) -> None:
        """`wait` for a transfer between GPUs: returns once it is over, not once it is queued.

        Raises:
            RankFailedError: As for `wait`.
        """
        deadline_s = time.monotonic() + self.timeout_s
        with self.naming(peer, expected):
            while not work.is_completed():
                self.check()
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"timed out after {self.timeout_s:g} s")
                time.sleep(_POLL_S)
            self.check()  # a transfer that was broken off counts as completed
            work.wait()

    @contextmanager
    def naming(self, peer: int | None, expected: str) -> Iterator[None]:
        """Turns an error of a transfer within into one that names the rank which caused it."""
        try:
            yield
        except RankFailedError:
            raise
        except RuntimeError as error:
            self._raise_lost(peer, expected, error)

    @contextmanager
    def joining(self, name: str) -> Iterator[None]:
        """A gloo group that is made inside ends its waits when a rank fails."""
        with self.naming(None, f"joining group {name}"), self._sockets.record():
            yield

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Turns the error of another group's collective into one that names the rank which broke it.

        Any other error passes.
        """
        try:
            yield
        except RankFailedError:
            raise
        except RuntimeError as error:
            cause = self._watch.cause(2 * SILENT_S) if self._watch and "gloo" in str(error) else None
            if cause is None:
                raise
            assert self._watch is not None
            cause = self._watch.report(cause)
            self._disconnect()
            raise RankFailedError(str(cause)) from error

    def check(self) -> None:
        """Raises if another rank is known to have failed.

        Raises:
            RankFailedError: Names it.
        """
        if self._watch is not None and self._watch.failure is not None:
            raise RankFailedError(str(self._watch.failure))

    def cause(self, wait_s: float) -> str | None:
        """Why the run has failed or is about to; None if all ranks live and nobody failed.

        May be called in a signal handler.
        """
        cause = self._watch.cause(wait_s) if self._watch else None
        return None if cause is None else str(cause)

    def fail(self, error: BaseException, action: str = "") -> None:
        """Tells all ranks that this one failed, and closes its connections."""
        self.failed = True
        if self._watch is None or isinstance(error, RankFailedError):
            return
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        self._watch.report(Failure(self.rank, reason, action or self.doing, lost=False))
        self._disconnect()

    @property
    def failure(self) -> Failure | None:
        """The first failure of the run, as far as this rank knows."""
        return self._watch.failure if self._watch else None

    def close(self) -> None:
        """Leaves the control group, once the last footer was received; later calls do nothing."""
        if self._closed or self._watch is None:
            return
        self._closed = True
        try:
            if self.failure is None:
                self._flush()
        finally:
            self._watch.close()
            self._disconnect()
            self._held, self._posted, self._group = [], None, None

    def _disconnect(self) -> None:
        """Wakes this rank's waits and its peers'; any thread may call it."""
        self._sockets.shut_down()
        self.close_device_groups()

    def _raise_lost(self, peer: int | None, expected: str, error: RuntimeError) -> NoReturn:
        assert self._watch is not None
        overdue = "timed out" in str(error).lower()
        # A rank whose wait is overdue closes its connections; the rank it waited for is to be named first.
        cause = self._watch.cause(2 * SILENT_S if overdue else 3 * SILENT_S)
        if peer is None:
            cause = cause or Failure(self.rank, f"{expected}: {error}".splitlines()[0], lost=False)
            if cause.lost and not cause.action:  # the others of a collective are expected at the same action
                cause = replace(cause, action=self.doing)
        elif cause is None:
            what = f"let rank {self.rank} wait for {self.timeout_s:g} s, though its process runs"
            cause = Failure(peer, what if overdue else f"closed its connection to rank {self.rank}", expected)
        elif cause.lost and cause.rank == peer:
            cause = replace(cause, action=expected)
        if self._watch.failure is None:
            cause = self._watch.report(cause)
        self._disconnect()
        raise RankFailedError(str(cause)) from error

    def _send_to_all(self, message: Message) -> None:
        self._flush()
        if self._group is None:
            return
        data = None if message.object is None else _to_bytes(message.object)
        buffer = _encode(message, 0 if data is None else data.numel())
        for rank in range(1, self.world_size):
            with self.naming(rank, "receiving the last footer"):
                self._held.append((self._group.send([buffer], rank, _FIXED), buffer, rank))
                if data is not None:
                    self._held.append((self._group.send([data], rank, _OBJECT), data, rank))

    def _flush(self) -> None:
        held, self._held = self._held, []
        for work, _, rank in held:
            self.wait(work, rank, "receiving the last header or footer")

    def _post(self) -> None:
        if self.rank != 0 and self._group is not None:
            buffer = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8)
            with self.naming(0, "sending the next header or footer"):
                self._posted = (self._group.recv([buffer], 0, _FIXED), buffer)

    def _receive(self, rank: int, size_bytes: int, tag: int) -> Any:
        assert self._group is not None
        data = torch.empty(size_bytes, dtype=torch.uint8)
        with self.naming(rank, "handing over an object"):
            self._group.recv([data], rank, tag).wait()
        # The bytes come from a rank of this job, over a connection that the job made.
        return pickle.loads(data.numpy().tobytes())


def _to_bytes(value: Any) -> Tensor:
    try:
        data = pickle.dumps(value)
    except Exception as error:  # whatever a user's class raises
        raise StepError(
            f"a value that all ranks get cannot be pickled: {error}. Steps and hooks may return, and pass to "
            "the module, tensors, numbers, text, and objects of classes at the top level of a module."
        ) from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _encode(message: Message, size_bytes: int) -> Tensor:
    counts = len(message.integers), len(message.floats)
    if max(counts) > N_NUMBERS:
        raise ValueError(f"a message with {counts} numbers does not fit; {N_NUMBERS} of each kind do")
    integers = torch.zeros(3 + N_NUMBERS, dtype=torch.int64)
    integers[:3] = torch.tensor([message.operation, size_bytes, counts[0] * 100 + counts[1]])
    integers[3 : 3 + counts[0]] = torch.tensor(message.integers, dtype=torch.int64)
    floats = torch.zeros(N_NUMBERS, dtype=torch.float64)
    floats[: counts[1]] = torch.tensor(message.floats, dtype=torch.float64)
    return torch.cat([integers.view(torch.uint8), floats.view(torch.uint8)])


def _decode(buffer: Tensor) -> tuple[Message, int]:
    split = 8 * (3 + N_NUMBERS)
    operation, size_bytes, counts, *integers = buffer[:split].view(torch.int64).tolist()
    floats = buffer[split:].view(torch.float64).tolist()
    return (
        Message(operation, tuple(integers[: counts // 100]), tuple(floats[: counts % 100])),
        size_bytes,
    )
