"""The strategy's collectives: what Lightning and user code ask of all ranks at once."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_hetpipe.engine.session import Engine
from lightning_hetpipe.strategy.exchange import Exchange
from lightning_hetpipe.strategy.saving import Saving, refuse_lost_optimizers


class Together(Saving):
    """Asks all ranks; while rank 0 runs user code alone, it asks itself, as a single device would.

    Combined with the ParallelStrategy of one Lightning namespace.
    """

    _exchange: Exchange | None
    _engine: Engine | None

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None, "setup_environment has not run"
        return self._exchange

    @property
    def _alone(self) -> bool:
        return self.world_size == 1 or self._runs_user_code_alone()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The tensor itself: all ranks of the one replica hold the same value."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        if not self._alone and self._exchange is not None and not self._is_interrupted():
            self._exchange.gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._alone or self._exchange is None:
            return obj
        if src == 0:
            return self._exchange.broadcast(obj)
        return self._exchange.gather(obj)[src]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._alone:
            return tensor
        with self.exchange.blaming():
            # Ranks on GPUs and on CPUs meet in host memory, where the default group of all of them is.
            gathered: Tensor = super().all_gather(tensor.cpu(), group, sync_grads)
            return gathered.to(tensor.device)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._exchange is None:  # this process started the ranks; they have ended, their weights are here
            refuse_lost_optimizers(checkpoint, filepath)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with self.exchange.blaming():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Clipping and loss scaling look at the gradients of all ranks; the update takes its time on each."""
        assert self._engine is not None
        emulator = self._engine.emulator

        def step() -> Any:
            with emulator.waiting():
                return closure()

        with self.exchange.blaming(), emulator.section():
            return super().optimizer_step(optimizer, step, *args, **kwargs)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._alone:
            return bool(decision)
        decisions = self.exchange.gather(bool(decision))
        return (False not in decisions) if all else (True in decisions)
