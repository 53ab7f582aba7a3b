"""The strategy's side of checkpoints: what Lightning calls to write one, and to read one back."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hetpipe.errors import StepError, UnsupportedError
from lightning_hetpipe.stage.norm import convert_norm
from lightning_hetpipe.strategy import checkpoint as state
from lightning_hetpipe.strategy.options import Options
from lightning_hetpipe.strategy.partition import OwnerMap
from lightning_hetpipe.strategy.pipelined import find_pipelined
from lightning_hetpipe.strategy.sharded import is_sharded, load_sharded, save_sharded
from lightning_hetpipe.strategy.shards import consolidate, cut_optimizer_state, cut_state

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Strategy
else:
    _Strategy = object


class Saving(_Strategy):
    """Writes one ordinary file (``file``), or a directory to which every rank writes (``directory``).

    Combined with the ParallelStrategy of one Lightning namespace.
    """

    options: Options
    _group: Any  # gloo, all ranks; None where there is one rank

    @property
    def checkpoint_io(self) -> Any:
        """The user's choice; by default, and inside a wrapping plugin, one that writes atomically."""
        if self._checkpoint_io is None:
            self._checkpoint_io = state.AtomicCheckpointIO()
        elif getattr(self._checkpoint_io, "checkpoint_io", self) is None:
            self._checkpoint_io.checkpoint_io = state.AtomicCheckpointIO()  # type: ignore[attr-defined]
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All names on every rank; values only where this rank holds them."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return state.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._runs_user_code_alone():
            raise StepError(
                f"a checkpoint ({filepath}) was asked for inside a step or hook that runs on rank 0 only, "
                "but every rank holds a part of the model: save in a callback, or after the run"
            )
        interrupted = self._is_interrupted()
        owners = self._owners()
        if owners.shards and not interrupted:
            assert self.lightning_module is not None
            checkpoint = consolidate(
                checkpoint, self.lightning_module, self.optimizers, owners, self.global_rank, self._group
            )
        if self.options.checkpoint == "directory":
            save_sharded(
                checkpoint, filepath, rank=self.global_rank, group=self._group, interrupted=interrupted
            )
            return
        state.save_checkpoint(
            checkpoint,
            filepath,
            io=self.checkpoint_io,
            rank=self.global_rank,
            group=self._group,
            interrupted=interrupted,
            storage_options=storage_options,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if "://" not in str(checkpoint_path) and is_sharded(Path(checkpoint_path)):
            return load_sharded(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self.options.norm == "group":
            _convert_like(self.lightning_module, self.options.module, checkpoint["state_dict"])
        own = cut_state(checkpoint["state_dict"], self._owners(), self.global_rank)
        state.load_model_state(self.lightning_module, own, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        module, owners, rank = self.lightning_module, self._owners(), self.global_rank
        assert module is not None
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            own = cut_optimizer_state(saved, module, optimizer, owners, rank)
            state.load_optimizer_state(optimizer, own)
        state.restore_rng(checkpoint, self.global_rank, self.world_size)

    def _is_interrupted(self) -> bool:
        """Whether the run ends by an exception: the other ranks may be gone, or elsewhere."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and trainer.state.status == "interrupted"

    def _owners(self) -> OwnerMap:
        """Which rank holds what of the module; nothing is shared before a plan is in force."""
        return OwnerMap({})

    def _runs_user_code_alone(self) -> bool:
        """Whether the other ranks wait while this one runs user code."""
        return False


def refuse_lost_optimizers(checkpoint: Mapping[str, Any], filepath: Any) -> None:
    """Refuses a checkpoint to resume from, where the ranks that had the optimizers have ended.

    Raises:
        UnsupportedError: It is not one of the weights only.
    """
    if "optimizer_states" in checkpoint:
        raise UnsupportedError(
            f"a checkpoint ({filepath}) was asked for after the ranks that trained have ended, and with them "
            "the optimizers' state: save while they run (ModelCheckpoint does), save the weights alone "
            "(weights_only=True), or start the ranks by strategy='hetpipe', whose processes stay"
        )


def _convert_like(module: Any, wanted: str, state: Mapping[str, Any]) -> None:
    """Makes GroupNorm of BatchNorm if the file was written so: Lightning loads before the set-up converts."""
    name, pipelined = find_pipelined(module, wanted)
    prefix = f"{name}." if name else ""
    own = {f"{prefix}{key}" for key in pipelined.state_dict() if key.endswith("running_mean")}
    if own.isdisjoint(state):
        convert_norm(pipelined, "group")
