"""Launchers: refuse wrong input before a process starts, and end a failed run with one cause.

    a rank fails ──► the others are told by the engine, and end by themselves      up to GRACE_S
                     SIGTERM to who is left: raises the cause where it is           up to GRACE_S
                     SIGKILL

`ProcessLauncher` then raises what the rank raised that failed first, not what its peers made of it.
"""

import logging
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException, start_processes

from lightning_hetpipe.errors import RankFailedError, UnsupportedError

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as _Processes
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as _Subprocesses
else:
    _Processes = _Subprocesses = object

GRACE_S = 10.0
_REPORT = "report"  # the file in which rank 0 hands back plan, profile and timeline

log = logging.getLogger(__name__)


class SubprocessLauncher(_Subprocesses):
    """Restarts the user's script for each further rank, once the input is known to be right.

    Combined with the launcher class of one Lightning namespace.
    """

    check: Callable[[Any], None]

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if trainer is not None:
            self.check(trainer)
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._call_children_scripts()
            # Lightning's own observer kills all at once, before a rank could say why it ends.
            threading.Thread(target=_oversee, args=(self.procs,), name="hetpipe-oversee", daemon=True).start()
        import_module("lightning.fabric.utilities.distributed")._set_num_threads_if_needed(
            num_processes=self.num_processes
        )
        return function(*args, **kwargs)


def _oversee(children: Sequence["Popen[bytes]"]) -> None:
    """Ends what is left of all ranks some time after one of them failed; runs beside rank 0."""
    while not any(child.poll() for child in children):
        if all(child.poll() == 0 for child in children):
            return
        time.sleep(0.2)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        time.sleep(GRACE_S)
        log.warning("a rank ended %g s ago; sending %s to those that still run", GRACE_S, signum.name)
        for child in children:
            child.send_signal(signum)  # to none that has ended
        os.kill(os.getpid(), signum)


class ProcessLauncher(_Processes):
    """Forks or spawns all ranks, once the input is known to be right; rank 0 hands back plan and timeline.

    Combined with the launcher class of one Lightning namespace.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        strategy: Any = self._strategy
        if trainer is not None:
            strategy.check(trainer)
        lightning = import_module("lightning.fabric.strategies.launchers.multiprocessing")
        if self._start_method != "fork":
            lightning._check_missing_main_guard()
        elif torch.cuda.is_available():  # without a GPU, PyTorch takes every fork of a fork for a bad one
            lightning._check_bad_cuda_fork()
        fits = trainer is not None and trainer.state.fn == "fit"
        if fits and self._already_fit:
            raise UnsupportedError(
                "trainer.fit() was called a second time, but the ranks of the first one have ended: make a "
                "new Trainer, or start the ranks by strategy='hetpipe', whose processes stay"
            )
        os.environ["MASTER_PORT"] = str(strategy.cluster_environment.main_port)
        results = mp.get_context(self._start_method).SimpleQueue()
        with tempfile.TemporaryDirectory(prefix="hetpipe-") as folder:
            self._endings = Path(folder)
            inputs = [trainer, function, args, kwargs, results]
            if self._start_method == "spawn":
                inputs.append(lightning._GlobalStateSnapshot.capture())
            ranks = start_processes(  # type: ignore[no-untyped-call]
                self._wrapping_function,
                args=inputs,
                nprocs=strategy.num_processes,
                start_method=self._start_method,
                join=False,
            )
            self.procs = ranks.processes
            try:
                while not ranks.join(grace_period=GRACE_S):
                    pass
            except ProcessException as error:
                exit_codes = [process.exitcode for process in ranks.processes]
                cause, trace = find_cause(error, read_endings(self._endings), exit_codes)
                raise cause from trace
            report = self._endings / _REPORT
            self._report = report.read_bytes() if report.exists() else None
        output = results.get()
        if trainer is None:
            return output
        self._already_fit |= fits
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Any,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_queue: Any,
        global_states: Any = None,
    ) -> None:
        strategy: Any = self._strategy
        try:
            if self._start_method == "fork" and trainer is not None and trainer.state.fn == "fit":
                check_autograd()
            super()._wrapping_function(
                process_idx, trainer, function, args, kwargs, return_queue, global_states
            )
        except BaseException as error:
            strategy.on_exception(error)
            Ending.of(error, process_idx).write(self._endings)
            raise

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        strategy: Any = self._strategy
        # In a file: nobody reads the queue before all ranks have ended, and a pipe holds 64 KiB.
        (self._endings / _REPORT).write_bytes(strategy.report())
        extra: dict[str, Any] = super().get_extra_results(trainer)
        return extra

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        strategy: Any = self._strategy
        if self._report is not None:
            strategy.take_report(self._report)
        super().update_main_process_results(trainer, extra)


def check_autograd() -> None:
    """Refuses a forked process in which PyTorch will not run a backward (where it sees a GPU).

    Raises:
        UnsupportedError: The process that forked it has run one.
    """
    try:
        torch.ones((), requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "fork-based multiprocessing" not in str(error):
            raise
        raise UnsupportedError(
            "the ranks were forked from a process in which a backward has already run (tracing or profiling "
            "a model runs one too), and PyTorch runs none in such a fork: use strategy='hetpipe' or "
            "'hetpipe_spawn', or fork before the first backward (in a notebook: restart the kernel)"
        ) from None


@dataclass(frozen=True)
class Ending:
    """How a rank ended that raised.

    Attributes:
        rank: Which one.
        at_s: When, by the clock of the host.
        message: Its last error.
        trace: The traceback as text.
        blames: What it said of another rank that failed; None if the error is its own.
        pickled: The error; empty if it does not pickle.
    """

    rank: int
    at_s: float
    message: str
    trace: str
    blames: str | None
    pickled: bytes

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Ending":
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = b""
        return cls(rank, time.monotonic(), str(error), traceback.format_exc(), _blamed(error, rank), pickled)

    def write(self, folder: Path) -> None:
        (folder / f"rank{self.rank}").write_bytes(pickle.dumps(self))


def read_endings(folder: Path) -> list[Ending]:
    """Those of all ranks that raised, the earliest first."""
    endings: list[Ending] = [pickle.loads(path.read_bytes()) for path in folder.glob("rank*")]
    return sorted(endings, key=lambda ending: ending.at_s)


def _blamed(error: BaseException, rank: int) -> str | None:
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, RankFailedError):
            return str(link)
        for note in getattr(link, "__notes__", ()):
            if note.startswith("raised by rank ") and note.split()[3] != str(rank):
                return str(link)
        link = link.__cause__ or link.__context__
    return None


def find_cause(
    first: ProcessException, endings: Sequence[Ending], exit_codes: Sequence[int | None]
) -> tuple[BaseException, BaseException | None]:
    """What made a run fail, and the traceback of the rank as a cause of it.

    Args:
        first: What torch says of the process that ended first.
        endings: Of the ranks that raised, the earliest first.
        exit_codes: By rank; negative: the signal.
    """
    said = {ending.blames for ending in endings if ending.blames}
    died = {rank: code for rank, code in enumerate(exit_codes) if code is not None and code < 0}
    rank = first.error_index
    own = [ending for ending in endings if ending.blames is None]
    if rank not in died and own:
        trace = ProcessRaisedException(
            f"on rank {own[0].rank}:\n{own[0].trace}", own[0].rank, first.error_pid
        )
        return (pickle.loads(own[0].pickled), trace) if own[0].pickled else (trace, None)
    return RankFailedError(_describe_loss(rank, said, died, exit_codes)), None


def _describe_loss(
    rank: int, said: set[str], died: Mapping[int, int], exit_codes: Sequence[int | None]
) -> str:
    lost = {text: who for who in died for text in said if text.startswith(f"rank {who} was lost")}
    if rank not in died:
        if not lost:
            return min(said, default=f"rank {rank} ended with exit code {exit_codes[rank]}")
        rank = next(iter(lost.values()))
    name = signal.Signals(-died[rank]).name
    start = f"rank {rank} was lost"
    text = next((text for text, who in lost.items() if who == rank), f"{start}: its process ended")
    hint = "; the system may have been short of memory" if name == "SIGKILL" else ""
    return text.replace(start, f"{start} ({name})", 1) + hint
