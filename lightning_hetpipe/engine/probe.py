"""Measures the links between ranks over the transport's own edges.

    a   order ──►       message ──────►         message ──────►         taken - sent = one way
    b          ◄── ack           taken ◄── reply         taken ◄── reply

On one machine both ends read the same clock. Between machines only round trips can be seen: the two
latencies together, split evenly, and each direction's own bandwidth. Nothing that is declared about a
link is read: an emulated one is merely slow.

Links are kept between runs. A few messages over each pair that was measured then tell whether they hold.
"""

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_hetpipe.cluster import ANY, Cluster, Device, Link
from lightning_hetpipe.engine.control import Control, Message
from lightning_hetpipe.engine.edge import Edge
from lightning_hetpipe.engine.message import Layout
from lightning_hetpipe.engine.transport import connect
from lightning_hetpipe.profiling.cache import links_file
from lightning_hetpipe.profiling.fit import fit_line
from lightning_hetpipe.profiling.measure import settle
from lightning_hetpipe.tracing import TensorSpec

SIZES_BYTES = (2**10, 2**13, 2**16, 2**19, 2**22)
PAIRS_PER_CLASS = 3  # measured; the others are alike
BUDGET_S = 0.5  # per direction, once the bandwidth shows in the times
_LEAST, _MOST = 2, 5  # messages of one size
_REST_S = 0.001  # long enough for a receiver to fall asleep in its wait, as it does in a pipeline
_FASTEST_S_PER_BYTE = 1e-13
SAME_LINK = 0.25  # relative difference of a message's time within which a kept link holds
_NOISE_S = 1e-3  # and what a busy processor may add to it
_CHECKS, _CHECK_S = 3, 10e-3  # messages, and seconds that one takes on the link
_TRIES = 2  # a busy moment is no other link

T = TypeVar("T")
Pair = tuple[int, int]
Times = dict[int, list[float]]  # by size in bytes


Send = Callable[["_Line", Pair], "Sent"]  # what one end does; the other answers


@dataclass(frozen=True)
class Place:
    """Where a process runs: equal clocks can be compared, equal machines disturb each other."""

    machine: str
    clock: str
    network: str


@dataclass
class Sent:
    """What the sender of a direction saw: when it sent, and how long the reply took to come."""

    at_s: Times
    trip_s: Times


def measure_links(control: Control, name: str, cluster: Cluster, device: torch.device) -> tuple[Link, ...]:
    """Latency and bandwidth of every directed pair of ranks, measured or kept. All ranks call it together.

    Pairs between the same kinds of devices on the same hosts under the same rule of the cluster are one
    class: a few of them are measured, all get the median. What an earlier run kept for the same machines is
    used again if messages still take what it predicts.

    Args:
        control: Of this rank.
        name: Unique among the plans and measurements of this process.
        cluster: Rank ``i`` is its device ``i``.
        device: Where this rank computes; messages begin and end there.

    Returns:
        One link per directed pair, equal on all ranks; none in a world of one.

    Raises:
        RankFailedError: A rank failed or did not answer.
    """
    n_ranks = control.world_size
    if n_ranks == 1:
        return ()
    try:
        places: list[Place] = tell_all(control, _place())
        classes = _classes(cluster, places)
        pairs = _representatives(classes)
        names = [device.name for device in cluster.devices]
        edges = connect(control, name, (), (), device=device, cluster=cluster, owners=pairs).shared
        rounds = _rounds(pairs, [place.machine for place in places])
        exchange = partial(_exchange, control, rounds, edges, device)
        file = links_file(_key(cluster, places, classes))
        for kept in lead(control, file.entries):
            predicted = {(link.source, link.target): link for link in kept}
            known = predicted.keys() == set(permutations(names, 2))
            if known and any(_hold(predicted, names, exchange) for _ in range(_TRIES)):
                return tuple(kept)
        sent, taken = exchange(lambda line, pair: _send(line))
        return lead(control, lambda: file.keep(_links(cluster, places, classes, sent, taken), lambda _: None))
    except BaseException as error:
        control.fail(error, "measuring links")
        raise


def _exchange(
    control: Control,
    rounds: Sequence[Sequence[Pair]],
    edges: Mapping[Pair, Edge],
    device: torch.device,
    send: Send,
) -> tuple[dict[Pair, Sent], dict[Pair, Times]]:
    """What both ends of all pairs saw, each direction after the other; equal on all ranks."""
    sent: dict[Pair, Sent] = {}
    taken: dict[Pair, Times] = {}
    for together in rounds:
        mine: tuple[dict[Pair, Sent], dict[Pair, Times]] = {}, {}
        for pair in (pair for pair in together if control.rank in pair):
            for source, target in (pair, pair[::-1]):
                there, back = edges[source, target], edges[target, source]
                if control.rank == source:
                    mine[0][source, target] = send(_Line(there, back, device), (source, target))
                else:
                    mine[1][source, target] = _answer(_Line(back, there, device))
        for others_sent, others_taken in tell_all(control, mine):
            sent |= others_sent
            taken |= others_taken
    return sent, taken


def _hold(
    kept: Mapping[tuple[str, str], Link],
    names: Sequence[str],
    exchange: Callable[[Send], tuple[dict[Pair, Sent], dict[Pair, Times]]],
) -> bool:
    """Whether a message that takes a while still takes what kept links predict (the best of some)."""

    def predict(pair: Pair, size: int) -> float:
        there, back = names[pair[0]], names[pair[1]]
        return kept[there, back].transfer_s(size) + kept[back, there].latency_s

    def send(line: "_Line", pair: Pair) -> Sent:
        bandwidth = kept[names[pair[0]], names[pair[1]]].bandwidth_bytes_per_s
        size = int(min(max(bandwidth * _CHECK_S, SIZES_BYTES[0]), SIZES_BYTES[-1]))
        _round_trip(line, SIZES_BYTES[0], 1)  # warms up
        at_s, trip_s = _round_trip(line, size, _CHECKS)
        line.end()
        return Sent({size: at_s}, {size: trip_s})

    sent, _ = exchange(send)
    return all(
        abs(min(trips) - predict(pair, size)) <= SAME_LINK * predict(pair, size) + _NOISE_S
        for pair, found in sent.items()
        for size, trips in found.trip_s.items()
    )


def _send(line: "_Line") -> Sent:
    """Sends messages of growing size until the budget is spent."""
    found = Sent({}, {})
    warm_s = _round_trip(line, SIZES_BYTES[0], 1)[1][0]
    begun_s = time.monotonic()
    for index, size in enumerate(SIZES_BYTES):
        left_s = BUDGET_S - (time.monotonic() - begun_s)
        expected_s = _expected(found, size, warm_s)
        if index > 1 and _LEAST * expected_s > left_s and _shows_bandwidth(found):
            break
        share = 1.0 if size == SIZES_BYTES[-1] else 0.5
        repeats = min(_MOST, max(int(share * left_s / expected_s), _LEAST))
        found.at_s[size], found.trip_s[size] = _round_trip(line, size, repeats)
    line.end()
    return found


def _round_trip(line: "_Line", size: int, repeats: int) -> tuple[list[float], list[float]]:
    """When messages of a size were sent, and the seconds until each was answered."""
    line.send("order", torch.tensor([size, repeats]))
    line.receive("ack", _ORDER)
    message = torch.zeros(size, dtype=torch.uint8, device=line.device)
    sent, trips = [], []
    for _ in range(repeats):
        time.sleep(_REST_S)
        sent.append(time.monotonic())
        line.send("message", message)
        line.receive("reply", _ORDER)
        trips.append(time.monotonic() - sent[-1])
    return sent, trips


def _answer(line: "_Line") -> Times:
    """Takes what the sender orders; tells when each message was there."""
    taken: Times = {}
    while True:
        size, repeats = line.receive("order", _ORDER).tolist()
        line.expect("message", TensorSpec((size,), torch.uint8), repeats)
        line.send("ack", torch.zeros(2, dtype=torch.int64))
        if repeats == 0:
            return taken
        taken[size] = []  # anew after the warm-up
        for _ in range(repeats):
            line.take("message")
            taken[size].append(time.monotonic())
            line.send("reply", torch.zeros(2, dtype=torch.int64))


_ORDER = TensorSpec((2,), torch.int64)


@dataclass
class _Line:
    """Both edges between two ranks, from one end."""

    there: Edge
    back: Edge
    device: torch.device

    def send(self, label: str, value: Tensor) -> None:
        self.there.release(label)  # the one before it
        layout = _layout(TensorSpec.of(value), self.there)
        self.there.send(label, layout, {"x": value.to(self.device)})

    def end(self) -> None:
        """Sends the other end home."""
        self.send("order", torch.zeros(2, dtype=torch.int64))
        self.receive("ack", _ORDER)

    def expect(self, label: str, spec: TensorSpec, count: int) -> None:
        self.back.expect([(label, _layout(spec, self.back))] * count)

    def take(self, label: str) -> Tensor:
        value = self.back.receive(label)["x"]
        settle(self.device)
        return value

    def receive(self, label: str, spec: TensorSpec) -> Tensor:
        self.expect(label, spec, 1)
        return self.take(label)


def _layout(spec: TensorSpec, edge: Edge) -> Layout:
    return Layout.of(("x",), {"x": spec}, stamped=edge.stamped)


def _shows_bandwidth(found: Sent) -> bool:
    """Whether size makes a difference beside the latency; the next size takes a few round trips otherwise."""
    trips = list(found.trip_s.values())
    return statistics.median_low(trips[-1]) > 1.5 * statistics.median_low(trips[0])


def _expected(found: Sent, size: int, warm_s: float) -> float:
    """Seconds of a round trip of that size, from the last two sizes."""
    known = [(done, statistics.median_low(trips)) for done, trips in found.trip_s.items()]
    if not known:
        return warm_s + _REST_S
    if len(known) == 1:
        return known[0][1] + _REST_S
    (smaller, less_s), (larger, more_s) = known[-2:]
    slope = max(0.0, more_s - less_s) / (larger - smaller)
    return more_s + slope * (size - larger) + _REST_S


def _links(
    cluster: Cluster,
    places: Sequence[Place],
    classes: Mapping[Pair, object],
    sent: Mapping[Pair, Sent],
    taken: Mapping[Pair, Times],
) -> tuple[Link, ...]:
    """A link per directed pair: the median of its class."""
    of_class: dict[object, list[tuple[float, float]]] = {}
    for pair in sent:
        one_clock = places[pair[0]].clock == places[pair[1]].clock
        of_class.setdefault(classes[pair], []).append(_fit(sent[pair], taken[pair], one_clock))
    links = {
        key: Link(*(statistics.median(column) for column in zip(*figures)))
        for key, figures in of_class.items()
    }
    names = [device.name for device in cluster.devices]
    return tuple(
        replace(links[key], source=names[source], target=names[target])
        for (source, target), key in classes.items()
    )


def _key(cluster: Cluster, places: Sequence[Place], classes: Mapping[Pair, object]) -> dict[str, object]:
    """All that links are known to depend on; a machine that was started anew is another one."""
    return {
        "devices": [f"{device.name} {device.kind_key}" for device in cluster.devices],
        "places": [asdict(place) for place in places],
        "classes": [f"{pair} {key}" for pair, key in sorted(classes.items())],
        "torch": torch.__version__,
    }


def _fit(sent: Sent, taken: Times, one_clock: bool) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second of one direction."""
    one_way = {size: [end - begin for begin, end in zip(sent.at_s[size], taken[size])] for size in sent.at_s}
    if one_clock and all(
        0 < way < trip for size in one_way for way, trip in zip(one_way[size], sent.trip_s[size])
    ):
        times, share = one_way, 1.0
    else:
        times, share = sent.trip_s, 0.5
    fixed_s, s_per_byte = fit_line({size: statistics.median_low(row) for size, row in times.items()})
    return share * fixed_s, 1 / max(s_per_byte, _FASTEST_S_PER_BYTE)


def _classes(cluster: Cluster, places: Sequence[Place]) -> dict[Pair, object]:
    """Directed pairs with equal entries are alike."""
    devices = cluster.devices
    ends = [
        (device.host, device.kind, device.model, place.machine, place.network)
        for device, place in zip(devices, places)
    ]
    return {
        (a, b): (
            ends[a],
            ends[b],
            _are_one(devices[a], devices[b]),
            replace(cluster.link(devices[a].name, devices[b].name), source=ANY, target=ANY),
        )
        for a, b in permutations(range(len(places)), 2)
    }


def _are_one(a: Device, b: Device) -> bool:
    """Whether two ranks share a GPU."""
    return a.index is not None and (a.host, a.kind, a.index) == (b.host, b.kind, b.index)


def _representatives(classes: Mapping[Pair, object]) -> list[Pair]:
    """The pairs to measure, both directions each: some of every class."""
    chosen: list[Pair] = []
    counts: Counter[object] = Counter()
    for pair in sorted(pair for pair in classes if pair[0] < pair[1]):
        directions = {classes[pair], classes[pair[::-1]]}
        if any(counts[key] < PAIRS_PER_CLASS for key in directions):
            chosen.append(pair)
            counts.update(directions)
    return chosen


def _rounds(pairs: Sequence[Pair], machines: Sequence[str]) -> list[list[Pair]]:
    """Pairs that are measured at once, because no machine takes part in two of them."""
    rounds: list[tuple[list[Pair], set[str]]] = []
    for pair in pairs:
        used = {machines[rank] for rank in pair}
        for together, busy in rounds:
            if not used & busy:
                together.append(pair)
                busy |= used
                break
        else:
            rounds.append(([pair], used))
    return [together for together, _ in rounds]


def tell_all(control: Control, value: Any) -> Any:
    """Every rank's value, by rank, on every rank; also keeps the ranks in step."""
    values = control.gather(value)
    return control.share(None if values is None else Message(object=values)).object


def lead(control: Control, make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank."""
    made: T = control.share(Message(object=make()) if control.rank == 0 else None).object
    return made


def machine() -> str:
    """Names this machine until it is started anew."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _place() -> Place:
    here = machine()
    return Place(here, f"{here} {_namespace('time')}", _namespace("net"))


def _namespace(kind: str) -> str:
    path = f"/proc/self/ns/{kind}"
    return os.readlink(path) if os.path.exists(path) else ""
