r"""Chooses how a group executes each operation of its stage: whole on everyone, or shared by channels.

Every operation lists its *ways*: which form it takes each input in, which form its result has, how
much of the arithmetic a member does, and which collectives it needs itself. A value that is needed
in another form than it has is *converted*; a conversion is paid once, however many consumers
share it (V = bytes of the whole value, forward / backward):

    from \ to     replicated            copied                sharded
    replicated    -                     0 / all-reduce V      0 / all-gather V
    copied        0 / 0                 -                     0 / 0
    sharded       all-gather V / 0      all-gather V /        -
                                        reduce-scatter V

The choice is a dynamic programme over the operations in execution order whose state is the forms in
which each live value exists. It is exact while at most ``BEAM`` states are alive (chains, residual
and squeeze-excite blocks: fewer than 200); beyond that (dense blocks) the cheapest ``BEAM`` are kept.
This module knows no torch.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

BEAM = 256
# Bytes of the whole tensor up to which one all-to-all gathers faster than one broadcast per shard
# (gloo, 3 ranks at 5:2:1 on one host: equal near 256 KB, 25 against 11 ms at 8 MB).
SMALL_BYTES = 256 * 1024


class Form(StrEnum):
    """How a value lies on the members of a group; `collective` says what gradient goes with it."""

    REPLICATED = "replicated"
    COPIED = "copied"
    SHARDED = "sharded"


@dataclass(frozen=True)
class Sharding:
    """Intervals of one dimension, one per member.

    Attributes:
        dim: The dimension that is cut, counted from the front.
        bounds: Member ``i`` holds ``bounds[i]`` to ``bounds[i + 1]``; the last bound is the size.
    """

    dim: int
    bounds: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    def aligned(self, unit: int) -> bool:
        """Whether every cut is a multiple of ``unit``."""
        return all(bound % unit == 0 for bound in self.bounds)

    def scaled(self, factor: int, dim: int) -> "Sharding":
        """The same cuts where every channel has become ``factor`` elements of ``dim``."""
        return Sharding(dim, tuple(bound * factor for bound in self.bounds))


@dataclass(frozen=True)
class Way:
    """One way to execute an operation.

    Attributes:
        name: ``whole``, ``local``, ``column``, ``row``, ``row+scatter`` or ``heads``.
        inputs: The form of each input.
        output: The form of the result.
        shared: True when a member does only its fraction of the arithmetic.
        forward, backward: Collectives of the operation itself: (kind, bytes of the whole tensor).
    """

    name: str
    inputs: tuple[Form, ...]
    output: Form
    shared: bool = False
    forward: tuple[tuple[str, float], ...] = ()
    backward: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Operation:
    """One node of the stage.

    Attributes:
        name: Unique; also the name of its result.
        inputs: Names of the values it takes, in the order of the ways' forms.
        ways: At least one.
        work: Arithmetic of forward and backward together, in FLOP-like units of the cost.
        size_bytes: Of its whole result.
        gradient: Whether a gradient flows back through its result.
        sharding: How its result is cut when sharded; None where it cannot be.
        tensor: False for results (tuples, sizes) that cannot be converted.
        label: What it is, for the listing.
        note: Why it is not shared, where that is worth a word.
    """

    name: str
    inputs: tuple[str, ...]
    ways: tuple[Way, ...]
    work: float = 0.0
    size_bytes: float = 0.0
    gradient: bool = True
    sharding: Sharding | None = None
    tensor: bool = True
    label: str = ""
    note: str = ""


@dataclass(frozen=True)
class Conversion:
    """A value brought into another form before an operation."""

    value: str
    source: Form
    target: Form


class Cost(Protocol):
    """Seconds of what a group does."""

    def compute_s(self, work: float, shared: bool) -> float:
        """Of the slowest member, for work that is shared or done whole by everyone."""

    def collective_s(self, kind: str, size_bytes: float) -> float:
        """Of ``all_gather``, ``reduce_scatter`` or ``all_reduce`` of a whole tensor of that size."""


@dataclass(frozen=True)
class GroupCost:
    """Speeds proportional to the shares, one latency and one bandwidth.

    Attributes:
        shares: Fractions of the members, summing to 1.
        work_per_s: Speed of the whole group.
        latency_s: Of one round of messages.
        bandwidth_bytes_per_s: Of a link between two members.
    """

    shares: tuple[float, ...]
    work_per_s: float = 50e9
    latency_s: float = 0.3e-3
    bandwidth_bytes_per_s: float = 1e9

    def compute_s(self, work: float, shared: bool) -> float:
        return work / self.work_per_s / (1 if shared else min(self.shares) / sum(self.shares))

    def collective_s(self, kind: str, size_bytes: float) -> float:
        """As `collective` performs them: ``n`` members, ``V`` bytes, ``f`` the largest and least share.

        all_reduce                    2(n-1) rounds of V/n
        reduce_scatter, small gather  one round; a member sends or takes max((n-1) f_max, 1 - f_min) V
        large gather                  a broadcast per shard: n rounds, V bytes in all
        """
        n, total = len(self.shares), sum(self.shares)
        if kind == "all_reduce":
            rounds, moved = 2 * (n - 1), 2 * (n - 1) / n
        elif kind == "all_gather" and size_bytes > SMALL_BYTES:
            rounds, moved = n, 1.0
        else:
            rounds, moved = 1, max((n - 1) * max(self.shares), total - min(self.shares)) / total
        return rounds * self.latency_s + moved * size_bytes / self.bandwidth_bytes_per_s


def n_operations(kind: str, size_bytes: float, n_members: int) -> int:
    """How often a collective costs what one between two members does, as `collective` performs it.

    A sum takes the rounds of two members ``n - 1`` times, a large gather is a broadcast per shard.
    """
    if kind == "all_reduce":
        return n_members - 1
    return n_members if kind == "all_gather" and size_bytes > SMALL_BYTES else 1


@dataclass(frozen=True)
class Choice:
    """The way of every operation, and the conversions before it.

    Attributes:
        ways: By operation.
        conversions: By the operation that needs them first, in the order to perform them.
        seconds: What the cost says of one forward and backward.
        exact: False when the beam dropped a state.
    """

    ways: Mapping[str, Way]
    conversions: Mapping[str, tuple[Conversion, ...]]
    seconds: float
    exact: bool = True


_COLLECTIVES_OF: dict[tuple[Form, Form], tuple[str | None, str | None]] = {
    (Form.REPLICATED, Form.COPIED): (None, "all_reduce"),
    (Form.REPLICATED, Form.SHARDED): (None, "all_gather"),
    (Form.COPIED, Form.REPLICATED): (None, None),
    (Form.COPIED, Form.SHARDED): (None, None),
    (Form.SHARDED, Form.REPLICATED): ("all_gather", None),
    (Form.SHARDED, Form.COPIED): ("all_gather", "reduce_scatter"),
}

_State = tuple[frozenset[Form], ...]  # the forms in which each live value exists, in order of the live values
_Moves = dict[tuple[Way, _State], tuple[float, tuple[Conversion, ...], _State] | None]


@dataclass
class _Path:
    seconds: float
    way: Way | None = None
    conversions: tuple[Conversion, ...] = ()
    before: "_Path | None" = field(default=None, repr=False)


def choose(operations: Sequence[Operation], cost: Cost, beam: int = BEAM) -> Choice:
    """The cheapest ways and conversions.

    Args:
        operations: In execution order; each input is an earlier operation's name.
        cost: Seconds of compute and collectives.
        beam: States kept; fewer are quicker, and exact for fewer models.
    """
    table = {operation.name: operation for operation in operations}
    last_use = {name: i for i, operation in enumerate(operations) for name in operation.inputs}
    live: list[str] = []
    paths: dict[_State, _Path] = {(): _Path(0.0)}
    exact = True
    for index, operation in enumerate(operations):
        places = [live.index(name) for name in operation.inputs]
        alive = [place for place, name in enumerate(live) if last_use[name] > index]
        used_later = operation.name in last_use
        moves: _Moves = {}
        found: dict[_State, _Path] = {}
        for state, path in paths.items():
            taken = tuple(state[place] for place in places)
            for way in operation.ways:
                if (way, taken) not in moves:
                    moves[way, taken] = _move(operation, way, taken, table, cost)
                move = moves[way, taken]
                if move is None:
                    continue
                seconds, conversions, given = move
                after = list(state)
                for place, forms in zip(places, given):
                    after[place] = forms
                key = tuple(after[place] for place in alive) + (frozenset({way.output}),) * used_later
                total = path.seconds + seconds
                if key not in found or total < found[key].seconds - 1e-15:
                    found[key] = _Path(total, way, conversions, path)
        assert found, f"operation {operation.name} has no way that its inputs allow"
        if len(found) > beam:
            exact = False
            found = dict(heapq.nsmallest(beam, found.items(), key=lambda item: item[1].seconds))
        paths = found
        live = [live[place] for place in alive] + [operation.name] * used_later
    return _read_back(operations, min(paths.values(), key=lambda path: path.seconds), exact)


def _read_back(operations: Sequence[Operation], best: _Path, exact: bool) -> Choice:
    ways: dict[str, Way] = {}
    conversions: dict[str, tuple[Conversion, ...]] = {}
    path: _Path | None = best
    for operation in reversed(operations):
        assert path is not None
        assert path.way is not None
        ways[operation.name] = path.way
        conversions[operation.name] = path.conversions
        path = path.before
    return Choice(ways, conversions, best.seconds, exact)


def _move(
    operation: Operation, way: Way, taken: _State, table: Mapping[str, Operation], cost: Cost
) -> tuple[float, tuple[Conversion, ...], _State] | None:
    """Seconds, new conversions and the inputs' forms after them; None where a value has no such form."""
    seconds = cost.compute_s(operation.work, way.shared)
    for kind, size_bytes in way.forward:
        seconds += cost.collective_s(kind, size_bytes)
    if operation.gradient:
        for kind, size_bytes in way.backward:
            seconds += cost.collective_s(kind, size_bytes)
    conversions = []
    given = list(taken)
    for place, (name, form) in enumerate(zip(operation.inputs, way.inputs)):
        if form in taken[place]:
            continue
        value = table[name]
        if not value.tensor or (form is Form.SHARDED and value.sharding is None):
            return None
        price, source = min((_conversion_s(value, source, form, cost), source) for source in taken[place])
        seconds += price
        conversions.append(Conversion(name, source, form))
        given[place] = taken[place] | {form}
    return seconds, tuple(conversions), tuple(given)


def _conversion_s(value: Operation, source: Form, target: Form, cost: Cost) -> float:
    forward, backward = _COLLECTIVES_OF[source, target]
    seconds = cost.collective_s(forward, value.size_bytes) if forward else 0.0
    if backward and value.gradient:
        seconds += cost.collective_s(backward, value.size_bytes)
    return seconds


def collectives_of(
    operation: Operation, choice: Choice, table: Mapping[str, Operation]
) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """What the operation and the conversions before it communicate, forward and backward: kind, bytes."""
    way = choice.ways[operation.name]
    forward, backward = list(way.forward), list(way.backward) if operation.gradient else []
    for conversion in choice.conversions[operation.name]:
        value = table[conversion.value]
        there, back = _COLLECTIVES_OF[conversion.source, conversion.target]
        if there:
            forward.append((there, value.size_bytes))
        if back and value.gradient:
            backward.append((back, value.size_bytes))
    return forward, backward


def collectives(operation: Operation, choice: Choice, table: Mapping[str, Operation]) -> list[str]:
    """What the operation communicates, as ``forward: all_gather x`` lines for people."""
    lines = []
    for conversion in choice.conversions[operation.name]:
        forward, backward = _COLLECTIVES_OF[conversion.source, conversion.target]
        if not table[conversion.value].gradient:
            backward = None
        if forward or backward:
            lines.append(f"{conversion.value}: {forward or '-'}/{backward or '-'}")
    way = choice.ways[operation.name]
    if way.forward or way.backward:
        forward = "+".join(kind for kind, _ in way.forward) or "-"
        backward = "+".join(kind for kind, _ in way.backward) or "-"
        lines.append(f"{forward}/{backward}")
    return lines
