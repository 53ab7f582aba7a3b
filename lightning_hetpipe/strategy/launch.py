"""Launchers that refuse wrong input before they start a process, and bring the plan back afterwards."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as _Processes
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as _Subprocesses
else:
    _Processes = _Subprocesses = object


class SubprocessLauncher(_Subprocesses):
    """Restarts the user's script for each further rank, once the input is known to be right.

    Combined with the launcher class of one Lightning namespace.
    """

    check: Callable[[Any], None]

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if trainer is not None:
            self.check(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class ProcessLauncher(_Processes):
    """Forks or spawns all ranks, once the input is known to be right; rank 0 hands back plan and timeline.

    Combined with the launcher class of one Lightning namespace.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        strategy: Any = self._strategy
        if trainer is not None:
            strategy.check(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        strategy: Any = self._strategy
        extra: dict[str, Any] = super().get_extra_results(trainer)
        return extra | {"hetpipe": strategy.report()}

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        strategy: Any = self._strategy
        strategy.take_report(extra.pop("hetpipe"))
        super().update_main_process_results(trainer, extra)
