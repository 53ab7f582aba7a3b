"""Makes a slower, smaller device out of a CPU, and a slower link out of loopback.

compute   |####|                     cpu seconds c
section   |####|..sleep..|           wall seconds c / speed
message   sent ──► |start ... bytes/bandwidth ... |latency| may be consumed (the stamp)
"""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator

from lightning_hetpipe.cluster import Device, Link
from lightning_hetpipe.profiling.memory import status_bytes
from lightning_hetpipe.units import format_bytes

Clock = Callable[[], float]

# What the kernel counts and no device has: the interpreter's heap, and pages that tensors do not fill (a
# stage that used 285 of 286 MiB by `profiling.memory` took 298 by the kernel's count).
_INTERPRETER_BYTES = 4 * 2**20
_ROUNDING = 0.06


class Emulator:
    """Stretches the compute sections of one rank, and limits what it may allocate.

    A device without `Emulation` runs at its own speed and without a limit.

    Args:
        device: The device that this rank stands for.
        cpu_clock: Seconds of computing so far; by default those of this thread, or those of the
            process where the device has several threads.
    """

    def __init__(
        self,
        device: Device,
        *,
        cpu_clock: Clock | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.speed = device.emulation.speed if device.emulation else 1.0
        self.memory_bytes = device.emulation.memory_bytes if device.emulation else None
        self._cpu_clock = cpu_clock or (time.thread_time if device.threads == 1 else time.process_time)
        self._clock = clock
        self._sleep = sleep
        self._overshoot_s = 0.0
        self._begun: tuple[float, float] | None = None  # wall and cpu clock, inside a section
        self._limited = False

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """A compute section: takes ``cpu seconds / speed`` of wall time, if it took less."""
        if self.speed == 1.0:
            yield
            return
        self._begun = self._clock(), self._cpu_clock()
        try:
            yield
        except BaseException:
            self._begun = None
            raise
        self._stretch()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait for other devices inside a section: what was computed before it is stretched first."""
        if self._begun is None:
            yield
            return
        self._stretch()
        yield
        self._begun = self._clock(), self._cpu_clock()

    def _stretch(self) -> None:
        assert self._begun is not None
        (start_s, cpu_s), self._begun = self._begun, None
        end_s = start_s + (self._cpu_clock() - cpu_s) / self.speed
        wanted_s = max(0.0, end_s - self._clock())
        paid_s = min(self._overshoot_s, wanted_s)  # an earlier sleep that was too long
        begun_s, pause_s = self._clock(), wanted_s - paid_s
        if pause_s > 0:
            self._sleep(pause_s)
            self._overshoot_s += self._clock() - begun_s - pause_s
        self._overshoot_s = max(0.0, self._overshoot_s - paid_s)

    @property
    def is_limited(self) -> bool:
        """Whether `limit_memory` is in force."""
        return self._limited

    def limit_memory(self, held_bytes: int = 0) -> None:
        """Caps what this process may allocate on top of what it has (``RLIMIT_DATA``).

        Args:
            held_bytes: What it has already and the device's memory must hold too: its stage's parameters.
        """
        if self.memory_bytes is None:
            return
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        own = int(max(0, self.memory_bytes - held_bytes) * (1 + _ROUNDING)) + _INTERPRETER_BYTES
        soft = status_bytes("VmData") + own
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard < 0 else min(soft, hard), hard))
        self._limited = True

    def lift_memory_limit(self) -> None:
        """Takes the cap away, so that a rank that ran into it can still say so."""
        if self._limited:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
            self._limited = False

    def out_of_memory(self, error: BaseException) -> str | None:
        """What to say about an error that the cap caused; None for any other error."""
        if not self._limited or self.memory_bytes is None or not _is_allocation_failure(error):
            return None
        return (
            f"the device's emulated memory limit of {format_bytes(self.memory_bytes)} is exceeded "
            f"({_first_line(error)}). Use smaller micro-batches, fewer in flight, or fewer layers here"
        )


class LinkClock:
    """When messages over one directed link may be consumed, one after the other.

    Args:
        link: Bandwidth and latency to keep to.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._free_at_s = 0.0

    def stamp(self, size_bytes: int, now_s: float) -> float:
        """The time at which a message that is sent now may be consumed, in the clock of ``now_s``."""
        start_s = max(now_s, self._free_at_s)
        self._free_at_s = start_s + size_bytes / self.link.bandwidth_bytes_per_s
        return self._free_at_s + self.link.latency_s


def wait_until(stamp_s: float) -> None:
    """Sleeps until the monotonic clock shows that time."""
    while (left_s := stamp_s - time.monotonic()) > 0:
        time.sleep(left_s)


_SIGNS = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "out of memory", "bad allocation")


def _is_allocation_failure(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
