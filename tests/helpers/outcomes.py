"""Forks ranks around a store that rank 0 serves, and tells how each of them ended."""

import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # for the first backward; once here, not in each child
from torch.distributed import Store, TCPStore

from lightning_hetpipe.errors import RankFailedError


@dataclass
class Outcome:
    """How one rank ended: with a value, an error, or (``ended`` False) not by itself."""

    ended: bool = False
    value: Any = None
    error: BaseException | None = None
    notes: tuple[str, ...] = ()
    at_s: float = 0.0  # monotonic
    exit_code: int | None = None  # negative: the signal


def outcomes(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 40.0) -> list[Outcome]:
    """Calls ``fn(rank, store, *args)`` in ``n`` forked processes.

    A rank may kill or stop itself; it is then killed once all others are through, or at ``timeout_s``.
    """
    port = _free_port()
    context = multiprocessing.get_context("fork")
    found = [Outcome() for _ in range(n)]
    readers, children = {}, []
    for rank in range(n):
        reader, writer = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(rank, n, port, fn, args, writer))
        child.start()
        writer.close()
        readers[reader] = rank
        children.append(child)
    deadline = time.monotonic() + timeout_s
    while readers and time.monotonic() < deadline:
        for reader in wait(list(readers), timeout=0.2):
            rank = readers.pop(reader)
            try:
                found[rank] = pickle.loads(reader.recv_bytes())
            except EOFError:
                children[rank].join(5)
        if all(_is_stopped(children[rank].pid) for rank in readers.values()):
            break
    for child in children:
        child.join(5.0 if found[children.index(child)].ended else 0.0)
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            child.join()
    for rank, outcome in enumerate(found):
        outcome.exit_code = children[rank].exitcode
        if outcome.ended and outcome.exit_code != 0:
            outcome.ended = False  # it reported and then hung
    return found


def values(found: list[Outcome]) -> list[Any]:
    """What all ranks returned; raises what one of them raised."""
    for outcome in found:
        if outcome.error is not None:
            raise outcome.error
    assert all(outcome.ended for outcome in found), "a rank did not end"
    return [outcome.value for outcome in found]


def messages(found: list[Outcome], culprit: int, how: str) -> list[str]:
    """What all ranks but the culprit raised, which must be `RankFailedError`; it fell as ``how`` says."""
    texts = []
    for rank, outcome in enumerate(found):
        if rank == culprit:
            assert isinstance(outcome.error, ZeroDivisionError if how == "raise" else type(None))
            continue
        assert outcome.ended, f"rank {rank} hangs or died (exit code {outcome.exit_code})"
        assert isinstance(outcome.error, RankFailedError), outcome
        texts.append(str(outcome.error))
    return texts


def _child(rank: int, n: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...], writer: Any) -> None:
    torch.set_num_threads(1)
    store: Store = TCPStore(
        "127.0.0.1", port, n, is_master=rank == 0, timeout=timedelta(seconds=20), wait_for_workers=False
    )
    try:
        outcome = Outcome(True, fn(rank, store, *args))
    except BaseException as error:
        error.add_note(traceback.format_exc())
        outcome = Outcome(True, error=error, notes=tuple(error.__notes__))
    outcome.at_s = time.monotonic()
    try:
        writer.send_bytes(pickle.dumps(outcome))
    except Exception:
        outcome.error = RuntimeError(f"{outcome.error!r} {outcome.notes}")
        writer.send_bytes(pickle.dumps(outcome))
    if rank == 0:
        _linger(n, store, rank)
    else:
        _say_bye(store, rank)
    os._exit(0)


def _say_bye(store: Store, rank: int) -> None:
    try:
        store.set(f"bye/{rank}", "1")
    except Exception:
        return


def _linger(n: int, store: Store, rank: int) -> None:
    """The store's host leaves a little after the others, as a launcher's does."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and not store.check([f"bye/{peer}" for peer in range(1, n)]):
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_stopped(pid: int | None) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
