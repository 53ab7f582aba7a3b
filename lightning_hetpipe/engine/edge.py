"""One end of a one-way connection between two ranks, with messages posted ahead and held until taken."""

import time
from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_hetpipe.engine.c10d import Group, Work
from lightning_hetpipe.engine.control import Control
from lightning_hetpipe.engine.emulate import LinkClock, wait_until
from lightning_hetpipe.engine.message import Layout

AHEAD = 2  # receives posted per edge: one under way while the one before it is used
_HOST = torch.device("cpu")


class Edge:
    """One end of a one-way connection between two ranks.

    Args:
        name: Unique among all edges, equal on both ends.
        ranks: Sender and receiver.
        clock: The sender's clock of an emulated link, shared by the edges that use it.
        nccl: The ends are two GPUs.
    """

    def __init__(
        self,
        control: Control,
        name: str,
        ranks: tuple[int, int],
        *,
        device: torch.device,
        clock: LinkClock | None = None,
        nccl: bool = False,
    ) -> None:
        self.name, self.stamped = name, clock is not None
        self._control, self._clock, self._device = control, clock, device
        self._wire = device if nccl else _HOST
        self._nccl = nccl
        # A receive that NCCL waits for occupies the GPU, so it is posted when its turn has come.
        self._ahead = 0 if nccl else AHEAD
        self._peer = ranks[1] if ranks[0] == control.rank else ranks[0]
        self._peer_index = ranks.index(self._peer)
        self._group: Group = (
            control.create_device_group(name, ranks, device) if nccl else control.create_group(name, ranks)
        )
        self._sent: dict[str, tuple[Work, Tensor]] = {}
        self._coming: deque[tuple[str, Layout]] = deque()
        self._posted: deque[tuple[Layout, Work, Tensor]] = deque()
        if nccl:
            self._meet(sends=ranks[0] == control.rank)

    def send(self, label: str, layout: Layout, values: Mapping[str, Tensor]) -> None:
        """Sends a message without waiting for it to be taken."""
        buffer = layout.pack(values, self._wire, label)
        if self._clock is not None:
            layout.stamp(buffer, self._clock.stamp(layout.payload_bytes, time.monotonic()))
        with self._control.naming(self._peer, label):
            work = self._group.send([self._on_wire(buffer)], self._peer_index, 0)
        self._sent[label] = (work, buffer)

    def release(self, label: str) -> None:
        """Waits until a message is taken and lets go of its buffer."""
        if label in self._sent:
            work, _ = self._sent.pop(label)
            self._wait(work, f"taking {label}")

    def release_all(self) -> None:
        for label in tuple(self._sent):
            self.release(label)

    def expect(self, messages: Iterable[tuple[str, Layout]]) -> None:
        """Announces the messages of a step, in the order of their arrival; posts the first ones."""
        self._coming.extend(messages)
        while self._coming and len(self._posted) < self._ahead:
            self._post()

    def receive(self, label: str) -> dict[str, Tensor]:
        """The next message, once it may be consumed."""
        if not self._posted:
            self._post()
        layout, work, buffer = self._posted.popleft()
        self._wait(work, label)
        if self._coming and self._ahead:
            self._post()
        if layout.stamped:
            wait_until(layout.read_stamp(buffer))
        return layout.unpack(buffer, self._device)

    def _post(self) -> None:
        label, layout = self._coming.popleft()
        buffer = layout.empty(self._wire)
        with self._control.naming(self._peer, label):
            work = self._group.recv([self._on_wire(buffer)], self._peer_index, 0)
        self._posted.append((layout, work, buffer))

    def _wait(self, work: Work, expected: str) -> None:
        wait = self._control.wait_on_device if self._nccl else self._control.wait
        wait(work, self._peer, expected)

    def _on_wire(self, buffer: Tensor) -> Tensor:
        """NCCL knows fewer dtypes than torch, so it gets bytes."""
        return buffer.reshape(-1).view(torch.uint8) if self._nccl else buffer

    def _meet(self, *, sends: bool) -> None:
        """Connects both ends of an NCCL edge now, while all ranks go through the edges in one order.

        NCCL connects at the first transfer and both ends wait there; if each began with another edge,
        they would wait for ever.
        """
        token, label = torch.zeros(1, device=self._device), f"connecting {self.name}"
        transfer = self._group.send if sends else self._group.recv
        with self._control.naming(self._peer, label):
            work = transfer([token], self._peer_index, 0)
        self._wait(work, label)
