"""Watches over the ranks: who failed first, who is gone, who does not answer.

    every rank   ──beat──►  store  ◄──failure (the first one stays)──  the rank that failed,
                              │                                         or one that saw another go
    every watch  ◄── failure, beats ──┘   then: shut the connections down, so that no wait goes on

One thread per rank does all that touches the store, because a store whose host is stopped blocks.
"""

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_hetpipe.engine.c10d import Store
from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.schedule.action import Action

FAILURE, BEAT, LEFT = "failure", "beat", "left"
_POLL_S = 0.2
_BEAT_S = 0.5
SILENT_S = 4 * _BEAT_S


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong in this run.

    Attributes:
        rank: The rank that failed or was lost.
        reason: What happened to it.
        action: What it was doing or was expected to do, such as ``2F3``; empty where unknown.
        lost: True if others noticed it, False if the rank said so itself.
    """

    rank: int
    reason: str
    action: str = ""
    lost: bool = True

    @property
    def micro_batch(self) -> int | None:
        """The micro-batch of the action, if it has one."""
        try:
            return Action.parse(self.action).micro_batch
        except ScheduleError:
            return None

    def __str__(self) -> str:
        where = f" in {self.action}" if self.action else ""
        if self.micro_batch is not None:
            where += f" (micro-batch {self.micro_batch})"
        return f"rank {self.rank} {'was lost' if self.lost else 'failed'}{where}: {self.reason}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Failure":
        return cls(**json.loads(text))


class Watch:
    """The watching thread of one rank.

    Args:
        store: Only this thread uses it.
        store_rank: The rank whose process serves the store; None if no rank does.
        timeout_s: A rank that is silent for longer counts as lost.
        on_failure: Called from the watching thread, once.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        store_rank: int | None,
        timeout_s: float,
        on_failure: Callable[[], None],
    ) -> None:
        self.failure: Failure | None = None
        self.doing = ""  # told with each beat
        self._store, self._rank, self._world_size = store, rank, world_size
        self._store_rank, self._timeout_s, self._on_failure = store_rank, timeout_s, on_failure
        self._identities: dict[int, _Identity] = {}
        self._changed_at: dict[int, float] = {}
        self._beats: dict[int, bytes] = {}
        self._left: set[int] = set()
        self._count = 0
        self._answered_at = time.monotonic()
        # A signal handler may put a job while the main thread puts one: only this kind of queue allows it.
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], threading.Event]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hetpipe-watch", daemon=True)

    def start(self) -> None:
        """Announces this rank, waits for all others, and begins to watch."""
        mine = _Identity.of_this_process()
        self._store.set(f"{BEAT}/{self._rank}", "0")
        self._store.set(f"identity/{self._rank}", json.dumps(asdict(mine)))
        for rank in range(self._world_size):
            identity = _Identity(**json.loads(self._store.get(f"identity/{rank}")))
            if identity.host == mine.host:
                self._identities[rank] = identity
            self._changed_at[rank] = time.monotonic()
        self._thread.start()

    def report(self, failure: Failure, wait_s: float = 2.0) -> Failure:
        """Records a failure unless another was first; returns the first."""
        self._do(lambda: self._record(failure), wait_s)
        return self.failure or failure

    def look(self, wait_s: float = 2.0) -> Failure | None:
        """The first failure, if any, as of now."""
        if self.failure is None:
            self._do(self._look, wait_s)
        return self.failure

    def cause(self, wait_s: float) -> Failure | None:
        """Who is to blame for a wait that broke: the recorded failure, or a rank that does not live.

        A peer's connection may close before the peer has said why, so this looks for a while.
        """
        deadline = time.monotonic() + wait_s
        while True:
            found = self.look(min(wait_s, 1.0)) or self._dead_rank()
            if found is not None or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S / 2)

    def _dead_rank(self) -> Failure | None:
        for rank, identity in self._identities.items():
            state = identity.state()
            if rank not in self._left and state != "runs":
                return self._lost(rank, f"its process {state}")
        now = time.monotonic()
        if self._store_rank is not None and now - self._answered_at > SILENT_S:
            return self._lost(self._store_rank, "the store that it serves does not answer")
        for rank, changed_at in self._changed_at.items():
            if rank not in self._left | {self._rank} and now - changed_at > SILENT_S:
                return self._lost(rank, f"no sign of life for {now - changed_at:.1f} s")
        return None

    def close(self, wait_s: float = 2.0) -> None:
        """Says goodbye and stops watching."""
        if self._thread.is_alive() and not self._stop.is_set():
            self._do(lambda: self._store.set(f"{BEAT}/{self._rank}", LEFT), wait_s)
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_POLL_S * 2)

    def _do(self, job: Callable[[], Any], wait_s: float) -> None:
        done = threading.Event()
        self._jobs.put((job, done))
        deadline = time.monotonic() + wait_s
        while not done.wait(0.05) and self._thread.is_alive() and time.monotonic() < deadline:
            pass

    def _run(self) -> None:
        next_beat_s = 0.0
        while not self._stop.is_set():
            job, done = None, None
            with contextlib.suppress(queue.Empty):
                job, done = self._jobs.get(timeout=_POLL_S)
            try:
                if job is not None:
                    job()
                elif self.failure is None:
                    self._look()
                if time.monotonic() >= next_beat_s and not self._stop.is_set():
                    next_beat_s = time.monotonic() + _BEAT_S
                    self._beat()
                self._answered_at = time.monotonic()
            except Exception as error:
                self._lose_store(error)
            finally:
                if done is not None:
                    done.set()

    def _look(self) -> None:
        if self._store.check([FAILURE]):
            self._found(Failure.from_json(self._store.get(FAILURE)))

    def _record(self, failure: Failure) -> None:
        self._found(Failure.from_json(self._store.compare_set(FAILURE, "", failure.to_json())))

    def _found(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self._on_failure()

    def _beat(self) -> None:
        now = time.monotonic()
        stopped = now - self._answered_at > self._timeout_s / 2  # this rank itself did not run
        self._count += 1
        if self._rank not in self._left:
            self._store.set(f"{BEAT}/{self._rank}", f"{self._count} {self.doing}")
        beats = self._store.multi_get([f"{BEAT}/{rank}" for rank in range(self._world_size)])
        for rank, beat in enumerate(beats):
            if stopped or self._beats.get(rank) != beat:
                self._beats[rank], self._changed_at[rank] = beat, now
            if beat == LEFT.encode():
                self._left.add(rank)
        if self.failure is not None:
            return
        for rank in range(self._world_size):
            if rank in self._left | {self._rank}:
                continue
            state = self._identities[rank].state() if rank in self._identities else "runs"
            if state == "ended":
                self._record(self._lost(rank, "its process ended"))
            elif now - self._changed_at[rank] > self._timeout_s:
                self._record(self._lost(rank, f"no sign of life for {self._timeout_s:g} s"))

    def _lose_store(self, error: Exception) -> None:
        """Nothing can be recorded any more, so this rank decides for itself."""
        self._stop.set()
        if self._store_rank is None:
            self._found(Failure(self._rank, f"the store is gone ({error})".splitlines()[0]))
        elif self._store_rank not in self._left:
            self._found(self._lost(self._store_rank, "the store that it serves is gone"))

    def _lost(self, rank: int, reason: str) -> Failure:
        action = self._beats.get(rank, b"").decode().partition(" ")[2]
        return Failure(rank, reason, action)


@dataclass(frozen=True)
class _Identity:
    """A process, so that others on the same host can see whether it runs."""

    host: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls) -> "_Identity":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        host = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return cls(host, os.getpid(), _stat(os.getpid())[1])

    def state(self) -> str:
        """``runs``, ``is stopped`` or ``ended``."""
        try:
            state, started = _stat(self.pid)
        except OSError:
            return "ended"
        if started != self.started or state in "ZX":
            return "ended"
        return "is stopped" if state in "Tt" else "runs"


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return fields[0], fields[19]
