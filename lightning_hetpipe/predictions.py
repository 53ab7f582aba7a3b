"""What a plan should give, and what else was considered."""

from dataclasses import dataclass

from lightning_hetpipe.checks import is_number, require
from lightning_hetpipe.errors import PlanError


@dataclass(frozen=True)
class Prediction:
    """What the simulator says about a plan.

    Attributes:
        step_s: Seconds of one optimizer step.
        images_per_s: Samples per second.
        busy: Fraction of the step each stage computes.
        memory_bytes: Predicted peak of each rank, 0 for idle ones.
        forward_s, backward_s: Seconds of one micro-batch on each stage.
        cut_bytes: What enters each stage per micro-batch, forward.
        lower_bound_s: No order of the same actions can be faster.
        images_per_s_bound: ``1 / Σ(1/T_d)``-style sum of what every device reaches alone.
    """

    step_s: float
    images_per_s: float
    busy: tuple[float, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    cut_bytes: tuple[int, ...] = ()
    lower_bound_s: float = 0.0
    images_per_s_bound: float = 0.0

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if isinstance(type(self).__dataclass_fields__[key].default, tuple):
                known = isinstance(value, tuple) and all(map(is_number, value))
                require(known, PlanError, key, value, "a tuple of finite numbers >= 0")
            else:
                require(is_number(value), PlanError, key, value, "a finite number >= 0")


@dataclass(frozen=True)
class Alternative:
    """A row of the comparison: what else was considered, and what it would have given."""

    name: str
    images_per_s: float
    step_s: float
    memory_bytes: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        for key in ("images_per_s", "step_s", "memory_bytes"):
            value = getattr(self, key)
            require(is_number(value), PlanError, key, value, "a finite number >= 0")
