"""Objects from rank 0 to all, and from all to all, around the engine's own messages.

The default process group is left to Lightning, which broadcasts on it in signal handlers too.
"""

from collections.abc import Callable
from typing import Any

from lightning_hetpipe.engine.control import Control, Message
from lightning_hetpipe.errors import HetPipeError, RankFailedError


class Exchange:
    """Hands values around among all ranks; does nothing where there is one rank."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.blaming = control.blaming  # around collectives of other groups
        self.rank = control.rank
        self.world_size = control.world_size
        self.leading = False  # rank 0 runs something in `lead` now

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, where user code runs."""
        return self.rank == 0

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        if self.leads:
            self._control.share(Message(object=value))
            return value
        return self._control.share().object

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = self.broadcast(self._control.gather(value))
        return values

    def lead(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` on rank 0 and gives its result to all; an error is raised on all."""
        if self.world_size == 1:
            return work()
        if not self.leads:
            return unwrap(self.broadcast())
        self.leading = True
        try:
            outcome = ("value", work())
        except Exception as error:
            self.broadcast(("error", describe(error)))
            raise
        finally:
            self.leading = False
        self.broadcast(outcome)
        return outcome[1]

    def agree(self, work: Callable[[], Any]) -> list[Any]:
        """Runs ``work`` on every rank and gives all results to all; the first error is raised on all."""
        mine: Exception | None = None
        try:
            outcome = ("value", work())
        except RankFailedError:
            raise
        except Exception as error:
            mine, outcome = error, ("error", describe(error))
        outcomes = self.gather(outcome)
        if mine is not None:
            raise mine
        return [unwrap(outcome, rank) for rank, outcome in enumerate(outcomes)]


def describe(error: BaseException) -> tuple[type[Exception], str]:
    """An error in a form that survives the journey: its own kind if it is ours, its text in any case."""
    if isinstance(error, HetPipeError):
        return type(error), str(error)
    return RuntimeError, f"{type(error).__name__}: {error}"


def unwrap(outcome: tuple[str, Any], rank: int = 0) -> Any:
    """The value of an outcome that another rank had.

    Raises:
        HetPipeError: Of the kind that the other rank raised; a RuntimeError for any other error.
    """
    kind, value = outcome
    if kind == "error":
        error_type, message = value
        error = error_type(message)
        error.add_note(f"raised by rank {rank}")
        raise error
    return value
