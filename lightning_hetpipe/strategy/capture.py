"""The arguments with which the user's step calls the pipelined module, found by running it up to there.

The batch that is looked at is not lost, no random number is moved, nothing is logged.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_hetpipe.strategy.batch import count_samples
from lightning_hetpipe.strategy.data import can_be_read_beside, first_of, peek
from lightning_hetpipe.strategy.logs import LogRecorder
from lightning_hetpipe.strategy.steps import ModuleCall, StandIn, SuspendedStep

# Gives the user's step call on rank 0, where the module is known by name.
Capture = Callable[[StandIn], "Captured"]
_HOST = torch.device("cpu")  # where the module is, until it is partitioned


@dataclass(frozen=True)
class Captured:
    """One call of the pipelined module by the user's step, on a whole batch.

    Attributes:
        args, kwargs: Of the call; tensors on the CPU, detached.
        gradients: For each tensor leaf of the arguments, whether it requires grad.
        batch_size: Samples of the batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: tuple[bool, ...]
    batch_size: int

    def arguments(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments on a device, as leaves that require grad where the step's did."""
        flags = iter(self.gradients)

        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(device).requires_grad_(next(flags))

        args, kwargs = pytree.tree_map(placed, (self.args, self.kwargs))
        return args, kwargs


def capture_from_loader(trainer: Any, strategy: Any) -> Capture | None:
    """How rank 0 captures the call that ``training_step`` makes on the first batch.

    The batch is still there when training begins, and no random number is drawn that training would
    have drawn differently. Called on all ranks.

    Returns:
        None if there is no training data.
    """
    loop = trainer.fit_loop
    loop.setup_data()
    loader = loop._combined_loader
    if loader is None:
        return None
    beside = all(can_be_read_beside(each) for each in loader.flattened)
    peeked = None if beside else peek(loop._data_fetcher)
    if loop.max_batches == 0 or not (beside or peeked is not None):
        return None
    module = trainer.lightning_module

    def capture(stand_in: StandIn) -> Captured:
        batch = peeked
        with _unmoved_generators():
            if batch is None:
                firsts = [first_of(each) for each in loader.flattened]
                batch = pytree.tree_unflatten(firsts, loader._spec) if loader._spec is not None else firsts[0]
            batch = strategy.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = strategy.batch_to_device(batch, _HOST, dataloader_idx=0)
            arguments = loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)
            step = lambda: module.training_step(*arguments.values())  # noqa: E731
            with torch.enable_grad(), strategy.precision_plugin.train_step_context():
                return _capture(module, stand_in, step, "training_step", count_samples(batch))

    return capture


def capture_from_step(
    module: Any, step: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Capture:
    """How rank 0 captures the call that an evaluation step makes on the batch at hand.

    Args:
        args, kwargs: Of the step; the batch comes first.
    """

    def capture(stand_in: StandIn) -> Captured:
        there = args, kwargs
        if module.device != _HOST:
            there = move_data_to_device(there, _HOST)
        with _unmoved_generators():
            run = lambda: step(*there[0], **there[1])  # noqa: E731
            return _capture(module, stand_in, run, name, count_samples(args[0]))

    return capture


def _capture(module: Any, stand_in: StandIn, step: Callable[[], Any], name: str, n_samples: int) -> Captured:
    suspended = SuspendedStep(stand_in, step, name)
    hook, module._current_fx_name = module._current_fx_name, name
    device, module._device = module._device, _HOST
    stand_in.install()
    try:
        with LogRecorder(module).active():
            call = suspended.start()
            return _detach(call, n_samples)
    finally:
        suspended.abandon()
        stand_in.remove()
        module._current_fx_name = hook
        module._device = device


def _unmoved_generators() -> AbstractContextManager[None]:
    """Puts all random states back; those of GPUs only where a GPU is in use."""
    return isolate_rng(include_cuda=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _detach(call: ModuleCall, n_samples: int) -> Captured:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    gradients = tuple(leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor))
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, (call.args, call.kwargs)
    )
    return Captured(args, kwargs, gradients, n_samples)
