"""The optimizer that a run will have, looked at before there is a plan: what it keeps, needs and costs."""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_hetpipe.planner.cost import ADAM
from lightning_hetpipe.profiling.device import Optimizer
from lightning_hetpipe.profiling.weigh import weigh_optimizer

log = logging.getLogger(__name__)


def optimizer_of(module: Any) -> Optimizer | None:
    """Class and settings of the (first) optimizer that ``configure_optimizers`` returns.

    Lightning calls it again when the module is cut into stages, for the optimizer that trains; so no random
    number is moved, and attributes that it sets are taken back.

    Returns:
        None where there is none, or where it cannot be told yet.
    """
    before = dict(vars(module))
    try:
        with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            made = _first(module.configure_optimizers())
    except Exception as error:
        log.info("configure_optimizers cannot be asked before there is a plan: %r", error)
        return None
    finally:
        vars(module).clear()
        vars(module).update(before)
    if made is None:
        return None
    known = inspect.signature(type(made).__init__).parameters
    return Optimizer(type(made), {name: made.defaults[name] for name in known if name in made.defaults})


def state_copies(optimizer: Optimizer | None, device: torch.device) -> float:
    """State values that an optimizer keeps per parameter, counted after a step; Adam's 2 where unknown.

    It also loads what torch loads at an optimizer's first step, before memory is counted.
    """
    if optimizer is None:
        return ADAM
    try:
        return weigh_optimizer(optimizer.make, optimizer.settings, device).copies
    except Exception as error:
        log.info("%s cannot step on its own, planning as for Adam: %r", optimizer, error)
        return ADAM


def _first(made: Any) -> torch.optim.Optimizer | None:
    """The first optimizer in what ``configure_optimizers`` may return."""
    if isinstance(made, torch.optim.Optimizer):
        return made
    if isinstance(made, Mapping):
        return _first(made.get("optimizer"))
    if isinstance(made, (list, tuple)):
        return next(filter(None, map(_first, made)), None)
    return None
