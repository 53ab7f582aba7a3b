"""Moves values between stages: one process group per edge and direction.

    0SEND_F3 ──► edge (0, 1, F) ──► 1RECV_F3        receives are posted ahead,
    0RECV_B3 ◄── edge (1, 0, B) ◄── 1SEND_B3        sends are held until they are taken

A gloo edge moves host memory (a CUDA tensor is staged); NCCL serves edges between two CUDA ranks.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hetpipe.cluster import Cluster, Link
from lightning_hetpipe.engine.c10d import Group, PrefixStore, Work, nccl_group
from lightning_hetpipe.engine.control import Control
from lightning_hetpipe.engine.emulate import LinkClock, wait_until
from lightning_hetpipe.engine.message import Layout, Specs
from lightning_hetpipe.errors import UnsupportedError
from lightning_hetpipe.graph import READER, Route
from lightning_hetpipe.schedule.action import Action, Kind

AHEAD = 2  # receives posted per edge: one under way while the one before it is used
_HOST = torch.device("cpu")


class EdgeKey(NamedTuple):
    """A direction of a route: ``F`` from its source to its target, ``B`` back."""

    source: int
    target: int
    direction: str

    @classmethod
    def of(cls, action: Action) -> "EdgeKey":
        """The edge that a transfer uses."""
        assert action.peer is not None
        direction = "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
        ends = (action.stage, action.peer) if action.kind.is_send else (action.peer, action.stage)
        return cls(*ends, direction)


class Edge:
    """One end of a one-way connection between two ranks.

    Args:
        name: Unique among all edges, equal on both ends.
        ranks: Sender and receiver.
        link: What lies between them; None for the link as it is.
        clock: The sender's clock of the link, shared by the edges that use it.
        nccl: Both ends are CUDA ranks.
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
        self._peer = ranks[1] if ranks[0] == control.rank else ranks[0]
        self._peer_index = ranks.index(self._peer)
        self._group: Group = (
            _nccl_group(control, name, ranks, device) if nccl else control.create_group(name, ranks)
        )
        self._sent: dict[str, tuple[Work, Tensor]] = {}
        self._coming: deque[tuple[str, Layout]] = deque()
        self._posted: deque[tuple[Layout, Work, Tensor]] = deque()

    def send(self, label: str, layout: Layout, values: Mapping[str, Tensor]) -> None:
        """Sends a message without waiting for it to be taken."""
        buffer = layout.pack(values, self._wire, label)
        if self._clock is not None:
            layout.stamp(buffer, self._clock.stamp(layout.payload_bytes, time.monotonic()))
        with self._control.naming(self._peer, label):
            self._sent[label] = (self._group.send([buffer], self._peer_index, 0), buffer)

    def release(self, label: str) -> None:
        """Waits until a message is taken and lets go of its buffer."""
        if label in self._sent:
            work, _ = self._sent.pop(label)
            self._control.wait(work, self._peer, f"taking {label}")

    def release_all(self) -> None:
        for label in tuple(self._sent):
            self.release(label)

    def expect(self, messages: Iterable[tuple[str, Layout]]) -> None:
        """Announces the messages of a step, in the order of their arrival; posts the first ones."""
        self._coming.extend(messages)
        while self._coming and len(self._posted) < AHEAD:
            self._post()

    def receive(self, label: str) -> dict[str, Tensor]:
        """The next message, once it may be consumed."""
        layout, work, buffer = self._posted.popleft()
        self._control.wait(work, self._peer, label)
        if self._coming:
            self._post()
        if layout.stamped:
            wait_until(layout.read_stamp(buffer))
        return layout.unpack(buffer, self._device)

    def _post(self) -> None:
        label, layout = self._coming.popleft()
        buffer = layout.empty(self._wire)
        with self._control.naming(self._peer, label):
            self._posted.append((layout, self._group.recv([buffer], self._peer_index, 0), buffer))


@dataclass
class Transport:
    """The edges of one rank under one plan.

    Build it with `connect`, on all ranks together.
    """

    control: Control
    device: torch.device
    routes: dict[tuple[int, int], Route]
    edges: dict[EdgeKey, Edge] = field(default_factory=dict)
    shared: dict[tuple[int, int], Edge] = field(default_factory=dict)

    def begin(self, actions: Sequence[Action], specs: Sequence[Specs]) -> None:
        """Posts the first receives of a step."""
        coming: dict[EdgeKey, list[tuple[str, Layout]]] = {}
        for action in actions:
            if action.kind.is_receive and (layout := self._layout(action, specs)).entries:
                coming.setdefault(EdgeKey.of(action), []).append((str(action.counterpart), layout))
        for key, messages in coming.items():
            self.edges[key].expect(messages)

    def send(self, action: Action, values: Mapping[str, Tensor], specs: Sequence[Specs]) -> None:
        """Sends the values of a route, or its gradients."""
        layout = self._layout(action, specs)
        if layout.entries:
            self.edges[EdgeKey.of(action)].send(str(action), layout, values)

    def receive(self, action: Action, specs: Sequence[Specs]) -> dict[str, Tensor]:
        """The values of a route, or its gradients; empty if no gradient is wanted."""
        if not self._layout(action, specs).entries:
            return {}
        return self.edges[EdgeKey.of(action)].receive(str(action.counterpart))

    def release(self, sends: Iterable[Action]) -> None:
        """Lets go of the buffers of messages that were taken."""
        for action in sends:
            self.edges[EdgeKey.of(action)].release(str(action))

    def end(self) -> None:
        """Waits until all messages of the step are taken."""
        for edge in (*self.edges.values(), *self.shared.values()):
            edge.release_all()

    def sum_over(self, ranks: Sequence[int], tensors: Sequence[Tensor], label: str) -> list[Tensor]:
        """Sums tensors over ranks that hold the same ones; adds in rank order, so all get equal sums."""
        names = [str(index) for index in range(len(tensors))]
        own = dict(zip(names, tensors))
        parts = {self.control.rank: own}
        peers = [rank for rank in ranks if rank != self.control.rank]
        here = self.control.rank
        for peer in peers:
            incoming, outgoing = self.shared[peer, here], self.shared[here, peer]
            incoming.expect([(label, Layout.of(names, _specs_of(own), stamped=incoming.stamped))])
            outgoing.send(label, Layout.of(names, _specs_of(own), stamped=outgoing.stamped), own)
        for peer in peers:
            parts[peer] = self.shared[peer, here].receive(label)
        totals = []
        for name in names:
            total = parts[min(ranks)][name].clone()
            for rank in sorted(ranks)[1:]:
                total += parts[rank][name]
            totals.append(total)
        for peer in peers:
            self.shared[here, peer].release(label)
        return totals

    def _layout(self, action: Action, specs: Sequence[Specs]) -> Layout:
        assert action.micro_batch is not None
        key, known = EdgeKey.of(action), specs[action.micro_batch]
        if key.direction == "F":
            names: Sequence[str] = self.routes[key.source, key.target].values
        else:
            route = self.routes[key.target, key.source]
            names = [name for name in route.gradients if known[name].requires_grad]
        return Layout.of(names, known, stamped=self.edges[key].stamped)


def connect(
    control: Control,
    name: str,
    routes: Iterable[Route],
    ranks_of_stage: Sequence[Sequence[int]],
    *,
    device: torch.device,
    cluster: Cluster | None = None,
    owners: Iterable[Sequence[int]] = (),
) -> Transport:
    """Opens this rank's edges; all ranks call it together, with equal arguments but for the device.

    Args:
        name: Unique among the plans of this process.
        routes: What the stages send to each other.
        ranks_of_stage: Whose stages they are.
        cluster: Rank ``i`` is its device ``i``; tells which links are emulated and which ranks have CUDA.
        owners: Sets of ranks that hold the same parameters and sum their gradients.

    Raises:
        UnsupportedError: A stage is shared by several ranks.
        RankFailedError: A rank did not come.
    """
    routes = list(routes)
    transport = Transport(control, device, {(route.source, route.target): route for route in routes})
    clocks: dict[tuple[int, int], LinkClock] = {}

    def edge(key: str, ranks: tuple[int, int]) -> Edge:
        link = _emulated(cluster, ranks)
        return Edge(
            control,
            f"{name}/{key}",
            ranks,
            device=device,
            clock=None if link is None else clocks.setdefault(ranks, LinkClock(link)),
            nccl=cluster is not None and all(cluster.devices[rank].kind == "cuda" for rank in ranks),
        )

    for key, ranks in _edges(routes, ranks_of_stage):
        if control.rank in ranks:
            transport.edges[key] = edge(f"{key.source}-{key.target}{key.direction}", ranks)
    pairs = {(a, b) for group in owners for a in group for b in group if a != b}
    for ranks in sorted(pairs):
        if control.rank in ranks:
            transport.shared[ranks] = edge(f"shared{ranks[0]}-{ranks[1]}", ranks)
    return transport


def _edges(
    routes: Iterable[Route], ranks_of_stage: Sequence[Sequence[int]]
) -> list[tuple[EdgeKey, tuple[int, int]]]:
    """All edges and their sender and receiver, in one order for all ranks."""
    held = {READER: (0,)} | {stage: tuple(ranks) for stage, ranks in enumerate(ranks_of_stage)}
    found = {}
    for route in routes:
        ends = held[route.source], held[route.target]
        if ends[0] == ends[1]:
            continue
        if any(len(ranks) != 1 for ranks in ends):
            raise UnsupportedError(
                f"the route from stage {route.source} to {route.target} joins several ranks ({ends}); "
                "give each of these stages one device"
            )
        (sender,), (receiver,) = ends
        found[EdgeKey(route.source, route.target, "F")] = (sender, receiver)
        if route.gradients:
            found[EdgeKey(route.target, route.source, "B")] = (receiver, sender)
    return sorted(found.items())


def _emulated(cluster: Cluster | None, ranks: tuple[int, int]) -> Link | None:
    if cluster is None:
        return None
    link = cluster.link(cluster.devices[ranks[0]].name, cluster.devices[ranks[1]].name)
    return link if link.emulated else None


def _nccl_group(control: Control, name: str, ranks: tuple[int, int], device: torch.device) -> Group:
    assert control.store is not None
    store = PrefixStore(f"nccl/{name}", control.store)
    with control.naming(None, f"joining group {name}"):
        return nccl_group(store, ranks.index(control.rank), len(ranks), device, control.timeout_s)


@dataclass(frozen=True)
class _Known:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


def _specs_of(tensors: Mapping[str, Tensor]) -> dict[str, _Known]:
    return {name: _Known(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
