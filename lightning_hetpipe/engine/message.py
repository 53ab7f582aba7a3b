"""The layout of a message: which tensors, where in the buffer, and the stamp of an emulated link.

    one tensor        |tensor|                              as it is, no copy
    several           |a......|b...|c........|              one buffer, each aligned to 16 bytes
    emulated link     |stamp..|a......|b...|                when it may be consumed

Shapes and dtypes come from the plan on both sides. Gloo would take a short message for a full one,
reinterpret a dtype, and abort the process on a long one, so the sender checks against the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from lightning_hetpipe.errors import StepError

_ALIGN = 16


class Spec(Protocol):
    """What is known of a value before it exists."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def requires_grad(self) -> bool: ...


Specs = Mapping[str, Spec]  # the values of one micro-batch, by name


@dataclass(frozen=True)
class Entry:
    """One tensor of a message, ``offset`` bytes into the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Layout:
    """One message.

    Attributes:
        entries: In the order of the route; empty if nothing is sent at all.
        size_bytes: Of the buffer.
        stamped: True on an emulated link.
    """

    entries: tuple[Entry, ...]
    size_bytes: int
    stamped: bool = False

    @classmethod
    def of(cls, names: Sequence[str], specs: Specs, *, stamped: bool = False) -> "Layout":
        """Places these values one after the other."""
        offset = _ALIGN if stamped else 0
        entries = []
        for name in names:
            shape, dtype = tuple(specs[name].shape), specs[name].dtype
            size_bytes = prod(shape) * dtype.itemsize
            entries.append(Entry(name, shape, dtype, offset, size_bytes))
            offset += -(-size_bytes // _ALIGN) * _ALIGN
        return cls(tuple(entries), offset if entries else 0, stamped)

    @property
    def packed(self) -> bool:
        """True if the tensors are copied into one buffer of bytes."""
        return self.stamped or len(self.entries) > 1

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(entry.size_bytes for entry in self.entries)

    def empty(self, device: torch.device) -> Tensor:
        """A buffer that the message fits into."""
        if self.packed:
            return torch.empty(self.size_bytes, dtype=torch.uint8, device=device)
        entry = self.entries[0]
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)

    def pack(self, values: Mapping[str, Tensor], device: torch.device, sender: str) -> Tensor:
        """The buffer to send from a device, without its stamp; packed where the values are.

        Raises:
            StepError: A value is not what the plan says.
        """
        for entry in self.entries:
            _check(entry, values[entry.name], sender)
        if not self.packed:
            return values[self.entries[0].name].to(device).contiguous()
        buffer = self.empty(values[self.entries[0].name].device)
        for entry in self.entries:
            self._view(buffer, entry).copy_(values[entry.name])
        return buffer.to(device)

    def unpack(self, buffer: Tensor, device: torch.device) -> dict[str, Tensor]:
        """The tensors of a received buffer, on a device."""
        buffer = buffer.to(device)
        if not self.packed:
            return {self.entries[0].name: buffer}
        return {entry.name: self._view(buffer, entry) for entry in self.entries}

    def stamp(self, buffer: Tensor, stamp_s: float) -> None:
        buffer[:8].view(torch.float64)[0] = stamp_s

    def read_stamp(self, buffer: Tensor) -> float:
        return float(buffer[:8].view(torch.float64)[0])

    def _view(self, buffer: Tensor, entry: Entry) -> Tensor:
        return buffer[entry.offset : entry.offset + entry.size_bytes].view(entry.dtype).view(entry.shape)


def _check(entry: Entry, value: Tensor, sender: str) -> None:
    if tuple(value.shape) != entry.shape or value.dtype != entry.dtype:
        raise StepError(
            f"{sender} made {entry.name!r} with shape {tuple(value.shape)} and dtype {value.dtype}, but "
            f"the plan says {entry.shape} and {entry.dtype}: both must follow from the shapes of the inputs"
        )
