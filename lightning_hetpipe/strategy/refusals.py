"""What a pipeline cannot honour, refused before any process is started, with the reason."""

from typing import Any

from lightning_hetpipe.errors import UnsupportedError

# Callbacks by class name: both Lightning namespaces have their own classes.
_CALLBACKS = {
    "ModelPruning": "it looks at all weights at once, and each rank holds its own stage only",
    "StochasticWeightAveraging": "it copies and averages the whole model on every rank; use "
    "WeightAveraging or EMAWeightAveraging, which follow the stages",
    "BatchSizeFinder": "it changes the batch size by trial, and a plan is made for one batch size; "
    "the planner chooses the micro-batch, use `hetpipe plan` for the batch",
    "BackboneFinetuning": "it compares weights that other ranks hold",
}
_OPTIMIZERS = {
    "LBFGS": "it evaluates the step several times and decides on all weights at once",
}


def refuse_module(module: Any) -> None:
    """Refuses what the LightningModule asks for and the pipeline cannot do.

    Raises:
        UnsupportedError: Manual optimisation, or a step that takes the data iterator itself.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{name} uses manual optimisation (automatic_optimization = False): its training_step drives "
            "backward and step itself, but only rank 0 runs it and the gradients are made on all ranks. "
            "Use automatic optimisation, or another strategy."
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        function = getattr(type(module), step, None)
        code = getattr(function, "__code__", None)
        if code is not None and "dataloader_iter" in code.co_varnames[: code.co_argcount]:
            raise UnsupportedError(
                f"{name}.{step} takes dataloader_iter: the batch must be known before the step runs, to cut "
                f"it into micro-batches. Write {step}(self, batch, batch_idx)."
            )


def refuse_callbacks(callbacks: list[Any]) -> None:
    """Refuses callbacks that need the whole model on one rank.

    Raises:
        UnsupportedError: There is one.
    """
    for callback in callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS and "lightning" in kind.__module__:
                raise UnsupportedError(
                    f"the callback {type(callback).__name__} cannot work in a pipeline: "
                    f"{_CALLBACKS[kind.__name__]}. Remove it."
                )


# Optimizers by class name in lower case: several packages have one of each.
_WHOLE_TENSORS = {
    "adafactor": "it scales by rows, columns and norms of whole weights",
    "muon": "it orthogonalises whole weights",
    "lamb": "it scales by norms of whole weights",
    "lars": "it scales by norms of whole weights",
}


def refuse_optimizers(optimizers: list[Any], *, shared_by_channels: bool = False) -> None:
    """Refuses optimizers that the pipeline cannot step.

    Args:
        optimizers: Those of the run.
        shared_by_channels: Whether some weights are cut among the devices of a group.

    Raises:
        UnsupportedError: One needs all weights or several evaluations. (Lightning refuses several.)
    """
    for optimizer in optimizers:
        for kind in type(optimizer).__mro__:
            if kind.__name__ in _OPTIMIZERS:
                raise UnsupportedError(
                    f"the optimizer {type(optimizer).__name__} cannot work in a pipeline: "
                    f"{_OPTIMIZERS[kind.__name__]}. Use a first-order optimizer such as AdamW or SGD."
                )
        if shared_by_channels:
            refuse_cut_weights(type(optimizer))


def refuse_cut_weights(optimizer: Any) -> None:
    """Refuses the class of an optimizer that needs whole weights, where devices share them by channels.

    Raises:
        UnsupportedError: It is one of these.
    """
    for kind in getattr(optimizer, "__mro__", ()):
        reason = _WHOLE_TENSORS.get(kind.__name__.lower())
        if reason is not None:
            raise UnsupportedError(
                f"the optimizer {optimizer.__name__} cannot train weights that devices share by channels: "
                f"{reason}. Use an elementwise one such as AdamW or SGD, share the stages by samples, or say "
                "merge='never'."
            )
