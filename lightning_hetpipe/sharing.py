"""What a group can share of a model, without torch: its operations, and the ways to divide each by channels.

A profile carries this, so that planning knows which collectives a run of layers needs on a group, and
how many bytes they move; `stage.layout` chooses among the ways, in the planner as on the devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SharedWay:
    """One way to execute an operation on a group (`stage.layout.Way`), per sample.

    Attributes:
        name: Such as ``column``.
        inputs: The form of each input.
        output: The form of the result.
        shared: True when a member does only its fraction of the arithmetic.
        forward, backward: Collectives of the operation itself: kind, bytes of the whole tensor per sample.
        most: Members of the largest group that can do it so.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    shared: bool
    forward: tuple[tuple[str, float], ...]
    backward: tuple[tuple[str, float], ...]
    most: int


@dataclass(frozen=True)
class SharedOperation:
    """One operation of the model (`stage.layout.Operation`), per sample.

    Attributes:
        name: Also that of its result.
        layer: The layer that it belongs to; -1 for an input of the model.
        inputs: Operations whose results it takes.
        ways: At least one.
        work: Arithmetic of forward and backward together.
        size_bytes: Of its whole result.
        gradient: Whether a gradient flows back through its result.
        cut: Whether its result can be cut by channels.
        tensor: False for results that cannot be converted.
    """

    name: str
    layer: int
    inputs: tuple[str, ...]
    ways: tuple[SharedWay, ...]
    work: float
    size_bytes: float
    gradient: bool
    cut: bool
    tensor: bool


@dataclass(frozen=True)
class Sharing:
    """What groups need to know of a model.

    Attributes:
        operations: In execution order.
        most: Members of the largest group that was asked about.
        rowless: Values that a stage shared by samples can neither take nor give: none of their dimensions
            counts the samples.
        coupled: Layers that compute something else from a part of the samples: BatchNorm with statistics
            of its own.
    """

    operations: tuple[SharedOperation, ...]
    most: int
    rowless: tuple[str, ...] = ()
    coupled: tuple[int, ...] = ()


def read_sharing(data: Mapping[str, Any] | None) -> Sharing | None:
    """Rebuilds a `Sharing` from what `dataclasses.asdict` made of it, lists as tuples."""
    if data is None:
        return None
    operations = tuple(
        SharedOperation(**{**entry, "ways": tuple(SharedWay(**way) for way in entry["ways"])})
        for entry in data["operations"]
    )
    return Sharing(operations, data["most"], data["rowless"], data["coupled"])
