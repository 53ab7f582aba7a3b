"""Values from outside: of the right kind, or refused with their name, their value and what is taken."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

from lightning_hetpipe.errors import HetPipeError


def require(holds: bool, error: type[HetPipeError], name: str, value: object, accepts: str) -> None:
    """Raises ``error`` unless ``holds``.

    >>> from lightning_hetpipe.errors import PlanError
    >>> require(False, PlanError, "micro_batch", 2.5, "samples, a whole number from 1 on")
    Traceback (most recent call last):
    lightning_hetpipe.errors.PlanError: micro_batch=2.5 was asked for: give samples, a whole number from 1 on
    """
    if not holds:
        raise error(f"{name}={value!r} was asked for: give {accepts}")


def is_whole(value: Any, least: int = 1) -> bool:
    """Whether a value is an integer (no bool) of at least that much."""
    return isinstance(value, Integral) and not _is_flag(value) and int(value) >= least


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that is not negative (no bool)."""
    return isinstance(value, Real) and not _is_flag(value) and 0 <= float(value) < math.inf


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a sequence, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_name(value: Any) -> bool:
    """Whether a value is a name, or a number that names (YAML reads ``[1, 2]`` so)."""
    return (isinstance(value, str) and value != "") or is_whole(value, 0)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def frozen(value: Any) -> Any:
    """What JSON or YAML gave, with lists as tuples.

    >>> frozen({"stages": [[0, 4], [4, 9]]})
    {'stages': ((0, 4), (4, 9))}
    """
    if isinstance(value, list):
        return tuple(map(frozen, value))
    if isinstance(value, Mapping):
        return {key: frozen(entry) for key, entry in value.items()}
    return value
