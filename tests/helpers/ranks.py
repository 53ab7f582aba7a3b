"""Runs a function on several forked gloo ranks, for tests of what ranks do together."""

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it on their first step: once here, not once in every rank
import torch.distributed as dist

# Autograd starts its threads once, at the first backward, one per device. FakeTensorMode makes it believe in
# a cuda device, and a process that has such threads cannot fork ranks that run a backward. So, first, here:
torch.ones(1, requires_grad=True).sum().backward()


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Calls ``fn(rank, *args)`` on ``n`` forked processes that share a gloo process group.

    A rank ends as soon as its function does: where others may still hear from it, end with a barrier.

    Returns:
        What each rank returned, by rank.

    Raises:
        BaseException: The exception of the child that failed first; its traceback is a note.
        TimeoutError: Some rank was still running after ``timeout_s``.
    """
    context = multiprocessing.get_context("fork")
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        children = []
        readers: dict[Any, int] = {}
        for rank in range(n):
            reader, writer = context.Pipe(duplex=False)
            target = (rank, n, fn, args, Path(folder) / "store", timeout_s, writer)
            child = context.Process(target=_child, args=target, daemon=False)
            child.start()
            writer.close()
            children.append(child)
            readers[reader] = rank
        try:
            deadline = time.monotonic() + timeout_s
            while readers:
                ready = wait(list(readers), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {sorted(readers.values())} still run after {timeout_s} s")
                failures = []
                for reader in ready:
                    rank = readers.pop(reader)
                    time_of_failure, outcome = _receive(reader, rank)
                    if time_of_failure is None:
                        results[rank] = outcome
                    else:
                        failures.append((time_of_failure, rank, outcome))
                if failures:
                    raise min(failures, key=lambda failure: failure[:2])[2]
        finally:
            for child in children:
                child.join(0.0 if len(results) < n else 5.0)
                if child.is_alive():
                    child.kill()
                    child.join()
    return [results[rank] for rank in range(n)]


def _receive(reader: Any, rank: int) -> tuple[float | None, Any]:
    try:
        outcome: tuple[float | None, Any] = pickle.loads(reader.recv_bytes())
    except EOFError:
        return time.monotonic(), RuntimeError(f"rank {rank} died without a word")
    return outcome


def _child(
    rank: int,
    n: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    store: Path,
    timeout_s: float,
    writer: Connection,
) -> None:
    torch.set_num_threads(1)
    code = 0
    try:
        if n > 1:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(store), n),
                rank=rank,
                world_size=n,
                timeout=timedelta(seconds=timeout_s),
            )
        outcome: tuple[float | None, Any] = (None, fn(rank, *args))
        payload = pickle.dumps(outcome)
    except BaseException as error:
        code = 1
        error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
        try:
            payload = pickle.dumps((time.monotonic(), error))
            pickle.loads(payload)
        except Exception:
            payload = pickle.dumps((time.monotonic(), RuntimeError(traceback.format_exc())))
    with contextlib.suppress(BrokenPipeError):
        writer.send_bytes(payload)
    writer.close()
    os._exit(code)  # neither pytest's nor the parent's exit handlers run in a child
