"""What a rank does when it is asked to end."""

from typing import Any

from lightning_hetpipe.engine.control import Control
from lightning_hetpipe.errors import RankFailedError

_LOOK_S = 1.0


class Sigterm:
    """Stands in for Lightning's handler, which waits for all ranks inside the signal handler.

    A launcher ends the other ranks when one has failed: that rank is to be named. Any other SIGTERM of
    rank 0 ends the run at the next batch, on all ranks.
    """

    def __init__(self, control: Control, trainer: Any) -> None:
        self._control, self._trainer = control, trainer

    def __call__(self, signum: int, frame: Any) -> None:
        if self._control.failed:
            return  # it ends already
        cause = self._control.cause(_LOOK_S)
        if cause is not None:
            raise RankFailedError(cause)
        connector, launcher = self._trainer._signal_connector, self._trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        connector.received_sigterm = True
