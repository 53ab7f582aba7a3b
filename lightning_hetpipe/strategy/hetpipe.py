"""`HetPipeStrategy` for ``lightning.pytorch``."""

from typing import Any

from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightning_hetpipe.strategy.core import PipelineStrategy
from lightning_hetpipe.strategy.launch import ProcessLauncher, SubprocessLauncher


class _Subprocesses(SubprocessLauncher, _SubprocessScriptLauncher):
    pass


class _Processes(ProcessLauncher, _MultiProcessingLauncher):
    pass


class HetPipeStrategy(PipelineStrategy, ParallelStrategy):
    __doc__ = PipelineStrategy.__doc__
    namespace = "lightning.pytorch"
    subprocess_launcher = _Subprocesses
    process_launcher = _Processes


def strategy_class(namespace: str) -> type[Any]:
    """The strategy for a Lightning namespace."""
    if namespace == "lightning.pytorch":
        return HetPipeStrategy
    from lightning_hetpipe.strategy import classic

    return classic.HetPipeStrategy
