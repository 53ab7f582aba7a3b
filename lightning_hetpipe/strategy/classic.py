"""`HetPipeStrategy` for the namespace ``pytorch_lightning``, whose classes are others."""

from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightning_hetpipe.strategy.core import PipelineStrategy
from lightning_hetpipe.strategy.launch import ProcessLauncher, SubprocessLauncher


class _Subprocesses(SubprocessLauncher, _SubprocessScriptLauncher):  # type: ignore[misc]
    pass


class _Processes(ProcessLauncher, _MultiProcessingLauncher):  # type: ignore[misc]
    pass


class HetPipeStrategy(PipelineStrategy, ParallelStrategy):  # type: ignore[misc]  # the other namespace
    __doc__ = PipelineStrategy.__doc__
    namespace = "pytorch_lightning"
    subprocess_launcher = _Subprocesses
    process_launcher = _Processes
