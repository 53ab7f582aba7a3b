"""Moves values between stages: one process group per edge and direction.

    0SEND_F3 ──► edge (0, 1, F) ──► 1RECV_F3        receives are posted ahead,
    0RECV_B3 ◄── edge (1, 0, B) ◄── 1SEND_B3        sends are held until they are taken

Where several ranks hold a stage, each pair of ranks has an edge, and `pieces` says which rows it carries.
A gloo edge moves host memory (a CUDA tensor is staged); NCCL serves edges between two GPUs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hetpipe.cluster import Cluster, Link
from lightning_hetpipe.engine.control import Control
from lightning_hetpipe.engine.edge import Edge
from lightning_hetpipe.engine.emulate import LinkClock
from lightning_hetpipe.engine.message import Layout, Specs
from lightning_hetpipe.engine.pieces import Holding, Rows, overlaps
from lightning_hetpipe.engine.places import backend_between, processor
from lightning_hetpipe.graph import READER, Route
from lightning_hetpipe.schedule.action import Action, Kind


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


@dataclass(frozen=True)
class Part:
    """What one message has of one value.

    Attributes:
        rows: Of the micro-batch; None for a value without rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Rows | None = None
    requires_grad: bool = False


@dataclass
class Transport:
    """The edges of one rank under one plan.

    Build it with `connect`, on all ranks together.

    Attributes:
        holdings: Of every stage, and of the reader.
        axes: The dimension of each value that counts the samples; values without one are not here.
    """

    control: Control
    device: torch.device
    routes: dict[tuple[int, int], Route]
    holdings: Mapping[int, Holding]
    axes: Mapping[str, int]
    edges: dict[tuple[EdgeKey, int, int], Edge] = field(default_factory=dict)  # by edge, sender, receiver
    shared: dict[tuple[int, int], Edge] = field(default_factory=dict)
    kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # what this rank sends to itself

    def begin(self, actions: Sequence[Action], specs: Sequence[Specs]) -> None:
        """Posts the first receives of a step."""
        coming: dict[tuple[EdgeKey, int, int], list[tuple[str, Layout]]] = {}
        for action in actions:
            if action.kind.is_receive:
                for sender, parts in self._parts_from(action, specs):
                    if sender != self.control.rank:
                        where = EdgeKey.of(action), sender, self.control.rank
                        message = str(action.counterpart), self._layout(where, parts)
                        coming.setdefault(where, []).append(message)
        for where, messages in coming.items():
            self.edges[where].expect(messages)

    def send(self, action: Action, values: Mapping[str, Tensor], specs: Sequence[Specs]) -> None:
        """Sends the values of a route, or its gradients, to whoever needs this rank's rows of them."""
        assert action.peer is not None
        assert action.micro_batch is not None
        key, me, known = EdgeKey.of(action), self.control.rank, specs[action.micro_batch]
        for receiver in self.holdings[action.peer].ranks:
            parts = self._parts(key, me, receiver, known)
            if not parts:
                continue
            cut = {part.name: self._cut(part, values[part.name], action.stage, known) for part in parts}
            if receiver == me:
                self.kept[str(action)] = cut
            else:
                where = key, me, receiver
                self.edges[where].send(str(action), self._layout(where, parts), cut)

    def receive(self, action: Action, specs: Sequence[Specs]) -> dict[str, Tensor]:
        """The values of a route, or its gradients, as this rank holds them; empty if none is wanted."""
        label = str(action.counterpart)
        found: dict[str, list[Tensor]] = {}
        for sender, parts in self._parts_from(action, specs):
            if sender == self.control.rank:
                values = self.kept.pop(label)
            else:
                values = self.edges[EdgeKey.of(action), sender, self.control.rank].receive(label)
            for part in parts:
                found.setdefault(part.name, []).append(values[part.name])
        assert action.micro_batch is not None
        known = specs[action.micro_batch]
        return {
            name: join(found.get(name, []), self.axes.get(name, 0))
            if name in found
            else self.empty(name, action.stage, known)
            for name in self._names(EdgeKey.of(action), known)
        }

    def release(self, sends: Iterable[Action]) -> None:
        """Lets go of the buffers of messages that were taken."""
        for action in sends:
            assert action.peer is not None
            for receiver in self.holdings[action.peer].ranks:
                edge = self.edges.get((EdgeKey.of(action), self.control.rank, receiver))
                if edge is not None:
                    edge.release(str(action))

    def end(self) -> None:
        """Waits until all messages of the step are taken."""
        for edge in (*self.edges.values(), *self.shared.values()):
            edge.release_all()

    def carries(self, send: Action, sender: int, receiver: int, specs: Sequence[Specs]) -> bool:
        """Whether there is anything to send from one rank to another."""
        assert send.micro_batch is not None
        return bool(self._parts(EdgeKey.of(send), sender, receiver, specs[send.micro_batch]))

    def is_local(self, source: int, target: int) -> bool:
        """Whether two stages are on one and the same rank, so that values need not travel."""
        return self.holdings[source].ranks == self.holdings[target].ranks

    def empty(self, name: str, stage: int, known: Specs) -> Tensor:
        """An uninitialised tensor like a value, or its gradient, with the rows that this rank holds."""
        shape = list(known[name].shape)
        if name in self.axes:
            start, stop = self._held(name, stage, known)
            shape[self.axes[name]] = stop - start
        return torch.empty(shape, dtype=known[name].dtype, device=self.device)

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

    def _parts_from(self, action: Action, specs: Sequence[Specs]) -> Iterator[tuple[int, list[Part]]]:
        """What this rank receives in an action, by sender, in the order of the rows."""
        assert action.peer is not None
        assert action.micro_batch is not None
        key, known = EdgeKey.of(action), specs[action.micro_batch]
        for sender in self.holdings[action.peer].ranks:
            parts = self._parts(key, sender, self.control.rank, known)
            if parts:
                yield sender, parts

    def _parts(self, key: EdgeKey, sender: int, receiver: int, known: Specs) -> list[Part]:
        source, target = self.holdings[key.source], self.holdings[key.target]
        parts = []
        for name in self._names(key, known):
            axis, shape = self.axes.get(name), tuple(known[name].shape)
            if axis is None:
                if sender == source.ranks[0]:
                    parts.append(Part(name, shape, known[name].dtype))
                continue
            rows = overlaps(source, target, shape[axis]).get((sender, receiver))
            if rows is not None:
                extent = (*shape[:axis], rows[1] - rows[0], *shape[axis + 1 :])
                parts.append(Part(name, extent, known[name].dtype, rows))
        return parts

    def _names(self, key: EdgeKey, known: Specs) -> Sequence[str]:
        if key.direction == "F":
            return self.routes[key.source, key.target].values
        route = self.routes[key.target, key.source]
        return [name for name in route.gradients if known[name].requires_grad]

    def _held(self, name: str, stage: int, known: Specs) -> Rows:
        return self.holdings[stage].held(known[name].shape[self.axes[name]])[self.control.rank]

    def _cut(self, part: Part, value: Tensor, stage: int, known: Specs) -> Tensor:
        """The part's rows of a value of which this rank holds some."""
        if part.rows is None:
            return value
        first, _ = self._held(part.name, stage, known)
        return value.narrow(self.axes[part.name], part.rows[0] - first, part.rows[1] - part.rows[0])

    def _layout(self, where: tuple[EdgeKey, int, int], parts: Sequence[Part]) -> Layout:
        specs = {part.name: part for part in parts}
        return Layout.of(list(specs), specs, stamped=self.edges[where].stamped)


def join(pieces: Sequence[Tensor], axis: int) -> Tensor:
    """The pieces one after the other."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), axis)


def connect(
    control: Control,
    name: str,
    routes: Iterable[Route],
    holdings: Sequence[Holding],
    *,
    device: torch.device,
    axes: Mapping[str, int] | None = None,
    cluster: Cluster | None = None,
    owners: Iterable[Sequence[int]] = (),
) -> Transport:
    """Opens this rank's edges; all ranks call it together, with equal arguments but for the device.

    Args:
        name: Unique among the plans of this process.
        routes: What the stages send to each other.
        holdings: The ranks of each stage.
        axes: Where a group shares a stage, the dimension of each value that counts the samples.
        cluster: Rank ``i`` is its device ``i``; tells which links are emulated and which ranks have GPUs.
        owners: Sets of ranks that hold the same parameters and sum their gradients.

    Raises:
        RankFailedError: A rank did not come.
    """
    routes = list(routes)
    held = {READER: Holding((0,))} | dict(enumerate(holdings))
    by_ends = {(route.source, route.target): route for route in routes}
    transport = Transport(control, device, by_ends, held, axes or {})
    clocks: dict[tuple[int, int], LinkClock] = {}
    processors = _processors(control, device, cluster)

    def edge(key: str, ranks: tuple[int, int]) -> Edge:
        link = emulated_link(cluster, ranks)
        return Edge(
            control,
            f"{name}/{key}",
            ranks,
            device=device,
            clock=None if link is None else clocks.setdefault(ranks, LinkClock(link)),
            nccl=link is None and backend_between(*(processors[rank] for rank in ranks)) == "nccl",
        )

    for key, sender, receiver in _edges(routes, held):
        if control.rank in (sender, receiver):
            label = f"{key.source}-{key.target}{key.direction}"
            if len(held[key.source].ranks) + len(held[key.target].ranks) > 2:
                label += f"/{sender}-{receiver}"
            transport.edges[key, sender, receiver] = edge(label, (sender, receiver))
    pairs = {(a, b) for group in owners for a in group for b in group if a != b}
    for ranks in sorted(pairs):
        if control.rank in ranks:
            transport.shared[ranks] = edge(f"shared{ranks[0]}-{ranks[1]}", ranks)
    return transport


def _edges(routes: Iterable[Route], holdings: Mapping[int, Holding]) -> list[tuple[EdgeKey, int, int]]:
    """All edges with their sender and receiver, in one order for all ranks."""
    found = []
    for route in routes:
        keys = [EdgeKey(route.source, route.target, "F")]
        if route.gradients:
            keys.append(EdgeKey(route.target, route.source, "B"))
        for key in keys:
            for sender in holdings[key.source].ranks:
                for receiver in holdings[key.target].ranks:
                    if sender != receiver:
                        found.append((key, sender, receiver))
    return sorted(found)


def emulated_link(cluster: Cluster | None, ranks: tuple[int, int]) -> Link | None:
    """The link from one rank to another if it is emulated."""
    if cluster is None:
        return None
    link = cluster.link(cluster.devices[ranks[0]].name, cluster.devices[ranks[1]].name)
    return link if link.emulated else None


def _processors(control: Control, device: torch.device, cluster: Cluster | None) -> list[str | None]:
    """The GPU of each rank; None for a rank on a CPU."""
    if cluster is None or control.store is None:
        return [None] * control.world_size
    if cluster.devices[control.rank].kind == "cuda":
        control.store.set(f"processor{control.rank}", processor(device) or "")
    with control.naming(None, "learning who computes where"):
        return [
            (control.store.get(f"processor{rank}").decode() or None) if each.kind == "cuda" else None
            for rank, each in enumerate(cluster.devices)
        ]


@dataclass(frozen=True)
class _Known:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


def _specs_of(tensors: Mapping[str, Tensor]) -> dict[str, _Known]:
    return {name: _Known(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
