"""What memory a rank uses, and how glibc hands it out.

A fresh activation above glibc's mmap threshold costs a page fault per 4 KiB, in every step again:
1.1 to 1.7 times the step of ResNet-18 and VGG-11 on a CPU. Keeping freed memory in the heap avoids it.
"""

import ctypes
import os
from pathlib import Path

import torch

SWITCH = "HETPIPE_TUNE_ALLOCATOR"  # "0" leaves glibc as it is

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc refuses more (HEAP_MAX_SIZE / 2)
_NEVER_TRIM = 2**31 - 1


def tune_allocator() -> bool:
    """Lets glibc keep freed activations instead of returning them to the kernel.

    Returns:
        False where it was switched off (``HETPIPE_TUNE_ALLOCATOR=0``) or the C library has no ``mallopt``.
    """
    if os.environ.get(SWITCH, "1") == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, _NEVER_TRIM),
        (_M_TOP_PAD, 2**20),
    )
    taken = [mallopt(ctypes.c_int(key), ctypes.c_int(value)) for key, value in settings]
    return all(taken)


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
    """What this rank holds now: resident bytes of the process, or bytes allocated on its GPU."""
    if device is not None and device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return status_bytes("VmRSS")


def peak_memory_bytes(device: torch.device | None = None) -> int:
    """The most that this rank held since `reset_peak`, counted as in `memory_bytes`."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return status_bytes("VmHWM")


def status_bytes(key: str) -> int:
    """One entry of ``/proc/self/status``, such as ``VmRSS``."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key} line")
