"""What memory a rank uses, and how glibc hands it out.

The memory of a rank is what training allocates on it, on top of what the process had before: its stage's
parameters, gradients, optimizer state, activations, messages, what kernels need in passing. The interpreter
and its libraries are not part of it, nor is memory that an allocator keeps for later. On a GPU torch counts
it. On a CPU it shows in the process's resident memory while every tensor is mapped for itself (`mapping`).

A fresh activation that is mapped costs a page fault per 4 KiB, in every step again: 1.1 to 1.7 times the step
of ResNet-18 and VGG-11 on a CPU. Keeping freed memory in the heap avoids it (`tune_allocator`), but a heap
with holes is a quarter larger than what is in it. So memory is counted in few steps and enforced on devices
that are emulated with a limit; all other steps keep the heap.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SWITCH = "HETPIPE_TUNE_ALLOCATOR"  # "0" leaves glibc as it is

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc refuses more (HEAP_MAX_SIZE / 2)
_NEVER_TRIM = 2**31 - 1
_MAPPED = 2**16  # bytes from which a tensor is mapped for itself

_LARGEST_HOLE = 2**32
_IS_MAPPED = 2  # in the word before a block, glibc's flag of one that is not of the heap

_keeps = False  # what glibc was told last
_plugs: list[int] = []


def tune_allocator(*, mapped: bool = False) -> bool:
    """Lets glibc keep freed activations instead of returning them to the kernel.

    Args:
        mapped: The contrary: what is freed is returned at once, so that the process's resident memory is
            what is in use.

    Returns:
        False where it was switched off (``HETPIPE_TUNE_ALLOCATOR=0``) or the C library has no ``mallopt``.
    """
    global _keeps
    if os.environ.get(SWITCH, "1") == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _MAPPED if mapped else _LARGEST_MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, _NEVER_TRIM),
        (_M_TOP_PAD, 2**20),
    )
    taken = [mallopt(ctypes.c_int(key), ctypes.c_int(value)) for key, value in settings]
    _keeps = not mapped
    _open_holes()
    if mapped:
        _fill_holes()
    return all(taken)


def _fill_holes() -> None:
    """Takes what is free in the heap, so that it serves no tensor; its pages go back to the kernel."""
    return_freed_memory()
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", ctypes.CDLL(None)))
    size = _LARGEST_HOLE
    while size >= _MAPPED:
        found = allocate(size)
        if found is None or ctypes.c_size_t.from_address(found - 8).value & _IS_MAPPED:
            _free(found)
            size //= 2
        else:
            _plugs.append(found)


def _open_holes() -> None:
    while _plugs:
        _free(_plugs.pop())


def _free(block: int | None) -> None:
    ctypes.CDLL(None).free(ctypes.c_void_p(block))


@contextmanager
def mapping(device: torch.device) -> Iterator[None]:
    """Memory can be counted exactly inside; on a GPU it always can."""
    kept = _keeps
    if device.type == "cpu":
        tune_allocator(mapped=True)
    try:
        yield
    finally:
        if device.type == "cpu" and kept:
            tune_allocator()


def return_freed_memory() -> None:
    """Gives what the heap keeps back to the kernel, before memory is measured or limited."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def reset_peak(device: torch.device | None = None) -> None:
    """Starts a new measurement of `peak_memory_bytes`."""
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory_bytes(device: torch.device | None = None) -> int:
    """What this rank holds now: resident bytes of the process without files, or bytes on its GPU."""
    if device is not None and device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return status_bytes("RssAnon")


def peak_memory_bytes(device: torch.device | None = None) -> int:
    """The most that this rank held since `reset_peak`, counted as in `memory_bytes`."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return status_bytes("VmHWM") - status_bytes("RssFile") - status_bytes("RssShmem")


def status_bytes(key: str) -> int:
    """One entry of ``/proc/self/status``, such as ``VmRSS``."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key} line")
