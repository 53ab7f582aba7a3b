"""Devices, the links between them, and the cluster they make up.

A cluster is written by hand (YAML) or found at start. A device that carries an
`Emulation` is a slice of a real CPU that pretends to be slower or smaller;
only `lightning_hetpipe.engine.emulate` looks at those settings.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lightning_hetpipe.checks import is_number, is_whole, require
from lightning_hetpipe.errors import ClusterError
from lightning_hetpipe.units import parse_bytes, parse_bytes_per_s, parse_seconds

ANY = "*"


@dataclass(frozen=True)
class Emulation:
    """How a real CPU pretends to be another device.

    Attributes:
        speed: Fraction of the CPU's own speed, in (0, 1].
        memory_bytes: What the rank may allocate; None for no limit.
    """

    speed: float = 1.0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        slowed = is_number(self.speed) and 0 < self.speed <= 1
        accepts = "a fraction in (0, 1]; a device can only be slowed down"
        require(slowed, ClusterError, "speed", self.speed, accepts)
        _require_memory("memory_bytes", self.memory_bytes)


@dataclass(frozen=True)
class Device:
    """One worker's processor.

    Attributes:
        name: Unique within the cluster.
        kind: What torch calls the device type: ``cpu``, ``cuda``, ...
        model: What the maker calls it; devices of equal `kind_key` share measurements.
        host: Devices of one host share memory and are reached without the network.
        index: Which accelerator of its host, as torch counts them; ranks with equal indices share it.
            None on a CPU, and until a cluster counts its host's devices of that kind.
        memory_bytes: What a stage may use; None for unknown or unlimited.
        threads: Intra-op threads of a CPU rank.
        emulation: Set on emulated devices only.
        flops_per_s, memory_bytes_per_s: Published peaks, for planning without measuring.
        source: Where the published figures are from.
    """

    name: str
    kind: str = "cpu"
    model: str = ""
    host: str = "localhost"
    index: int | None = None
    memory_bytes: int | None = None
    threads: int = 1
    emulation: Emulation | None = None
    flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for key in ("name", "kind", "model", "host", "source"):
            value = getattr(self, key)
            require(isinstance(value, str), ClusterError, key, value, f"the {key} of a device as text")
        if not self.name or ANY in self.name:
            raise ClusterError(f"device name {self.name!r} must be non-empty and without '*'")
        if not is_whole(self.threads):
            raise ClusterError(f"device {self.name!r} asks for {self.threads!r} threads: give >= 1")
        _require_memory(f"memory_bytes of device {self.name!r}", self.memory_bytes)
        if self.index is not None:
            accepts = "a whole number from 0 on, or None"
            require(is_whole(self.index, 0), ClusterError, f"index of {self.name!r}", self.index, accepts)
        if self.emulation is not None:
            given = isinstance(self.emulation, Emulation)
            require(
                given, ClusterError, f"emulation of {self.name!r}", self.emulation, "an Emulation, or None"
            )
        for key in ("flops_per_s", "memory_bytes_per_s"):
            value = getattr(self, key)
            accepts = "a number > 0, or None"
            known = value is None or (is_number(value) and value > 0)
            require(known, ClusterError, f"{key} of {self.name!r}", value, accepts)
        if self.index is not None and self.kind == "cpu":
            raise ClusterError(
                f"device {self.name!r} of kind {self.kind!r} has index {self.index}: an index counts the "
                "accelerators of a host from 0; a cpu has none"
            )
        if self.emulation is not None and self.kind != "cpu":
            raise ClusterError(
                f"device {self.name!r} of kind {self.kind!r} has an emulated speed: only a cpu can pretend "
                "to be slower. Leave its speed out"
            )

    @property
    def kind_key(self) -> tuple[object, ...]:
        """Devices with equal keys are interchangeable for the profiler and the planner."""
        return (self.kind, self.model, self.memory_bytes, self.threads, self.emulation)


@dataclass(frozen=True)
class Link:
    """A directed path between two devices, or a rule for many of them.

    Attributes:
        latency_s: Seconds before the first byte arrives.
        bandwidth_bytes_per_s: Sustained rate.
        source, target: A device name, a host name, or ``*`` for any.
        emulated: True when the transport has to keep messages back to these figures.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    source: str = ANY
    target: str = ANY
    emulated: bool = False

    def __post_init__(self) -> None:
        for key in ("source", "target"):
            value = getattr(self, key)
            require(isinstance(value, str), ClusterError, key, value, "a device name, a host name, or '*'")
        emulated = isinstance(self.emulated, bool)
        require(emulated, ClusterError, "emulated", self.emulated, "True or False")
        figures = self.latency_s, self.bandwidth_bytes_per_s
        if not all(map(is_number, figures)) or not self.bandwidth_bytes_per_s > 0:
            raise ClusterError(
                f"link {self.source} -> {self.target} has latency {self.latency_s!r} s and bandwidth "
                f"{self.bandwidth_bytes_per_s!r} bytes/s: give a latency >= 0 and a bandwidth > 0"
            )

    def transfer_s(self, size_bytes: float) -> float:
        """Seconds until a message of this size may be consumed."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


MESSAGE_BYTES = 1e6  # of a message that links are compared by


def slowest_link(links: Iterable[Link]) -> Link:
    """The link that a message of `MESSAGE_BYTES` takes longest over."""
    return max(links, key=lambda link: link.transfer_s(MESSAGE_BYTES))


# What two processes of one host reach over loopback; a measured profile replaces it.
LOOPBACK = Link(latency_s=0.5e-3, bandwidth_bytes_per_s=1e9)


@dataclass(frozen=True)
class Cluster:
    """All devices, in rank order, and the rules that give each pair its link.

    Attributes:
        name: For tables and file names.
        devices: Device ``i`` belongs to rank ``i`` unless a plan permutes them. An accelerator without
            an index gets its position among its host's devices of that kind.
        links: Rules; the last one that matches a pair wins. `LOOPBACK` where none does.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = field(default=())

    def __post_init__(self) -> None:
        require(
            isinstance(self.name, str), ClusterError, "name", self.name, "the name of the cluster as text"
        )
        for key, kind in (("devices", Device), ("links", Link)):
            values = getattr(self, key)
            right = isinstance(values, (tuple, list)) and all(isinstance(each, kind) for each in values)
            require(right, ClusterError, key, values, f"a tuple of {kind.__name__} values")
            object.__setattr__(self, key, tuple(values))
        if not self.devices:
            raise ClusterError(f"cluster {self.name!r} has no devices")
        object.__setattr__(self, "devices", _numbered(self.devices))
        names = [device.name for device in self.devices]
        twice = (
            sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        )
        if twice:
            raise ClusterError(f"cluster {self.name!r} names devices twice: {', '.join(twice)}")
        known = {ANY, *names, *(device.host for device in self.devices)}
        for link in self.links:
            for end in (link.source, link.target):
                if end not in known:
                    raise ClusterError(
                        f"cluster {self.name!r} has a link at {end!r}, which is neither a device "
                        f"nor a host; known are {', '.join(sorted(known - {ANY}))}"
                    )

    @cached_property
    def _by_name(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    def device(self, name: str) -> Device:
        """The device of that name.

        Raises:
            ClusterError: There is none.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise ClusterError(
                f"device {name!r} is not in cluster {self.name!r}; it has {', '.join(self._by_name)}"
            ) from None

    def link(self, source: str, target: str) -> Link:
        """The directed link from one device to another, with both ends filled in."""
        ends = [{ANY, name, self.device(name).host} for name in (source, target)]
        for rule in reversed(self.links):
            if rule.source in ends[0] and rule.target in ends[1]:
                return replace(rule, source=source, target=target)
        return replace(LOOPBACK, source=source, target=target)

    def subset(self, names: tuple[str, ...]) -> "Cluster":
        """The same cluster with only these devices, in this order."""
        devices = tuple(self.device(name) for name in names)
        known = {ANY, *names, *(device.host for device in devices)}
        links = tuple(link for link in self.links if {link.source, link.target} <= known)
        return replace(self, devices=devices, links=links)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> "Cluster":
        """Builds a cluster from the form that YAML files use (see ``conf/cluster``).

        Raises:
            ClusterError: A key is unknown, missing, or has an impossible value.
        """
        return _read_cluster(data)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "Cluster":
        """Reads a cluster file.

        Raises:
            ClusterError: The file is missing, is not YAML, or does not describe a cluster.
        """
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterError(f"cluster file {path} cannot be read: {error}") from error
        except yaml.YAMLError as error:
            raise ClusterError(f"cluster file {path} is not YAML: {error}") from error
        try:
            return cls.from_mapping(data)
        except ClusterError as error:
            raise ClusterError(f"{path}: {error}") from error

    def to_mapping(self) -> dict[str, Any]:
        """The inverse of `from_mapping`, with plain numbers in SI units."""
        return {
            "name": self.name,
            "devices": [_write_device(device) for device in self.devices],
            "links": [
                {
                    "source": link.source,
                    "target": link.target,
                    "latency": link.latency_s,
                    "bandwidth": link.bandwidth_bytes_per_s,
                    "emulated": link.emulated,
                }
                for link in self.links
            ],
        }

    def to_yaml(self, path: str | Path) -> None:
        """Writes the cluster so that `from_yaml` gives it back."""
        Path(path).write_text(yaml.safe_dump(self.to_mapping(), sort_keys=False), encoding="utf-8")


def _require_memory(name: str, size_bytes: Any) -> None:
    known = size_bytes is None or (is_number(size_bytes) and size_bytes > 0)
    require(known, ClusterError, name, size_bytes, "bytes > 0, or None for no limit")


def _numbered(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    seen: Counter[tuple[str, str]] = Counter()
    numbered = []
    for device in devices:
        place = device.host, device.kind
        counted = device.kind != "cpu" and device.index is None
        numbered.append(replace(device, index=seen[place]) if counted else device)
        seen[place] += 1
    return tuple(numbered)


_DEVICE_KEYS = {
    "name", "kind", "model", "host", "index", "memory", "threads", "speed", "count",
    "flops_per_s", "memory_bandwidth", "source",
}  # fmt: skip
_LINK_KEYS = {"source", "target", "latency", "bandwidth", "emulated"}


def _read_cluster(data: object) -> Cluster:
    table = _table(data, {"name", "devices", "links"}, "a cluster")
    devices = [
        device
        for index, entry in enumerate(_sequence(table, "devices"))
        for device in _read_devices(entry, f"device {index}")
    ]
    links = [_read_link(entry, f"link {i}") for i, entry in enumerate(_sequence(table, "links"))]
    return Cluster(str(table.get("name", "cluster")), tuple(devices), tuple(links))


def _read_devices(entry: object, where: str) -> list[Device]:
    """One entry makes ``count`` devices: name, name1, name2, ... unless count is 1."""
    table = _table(entry, _DEVICE_KEYS, where)
    name = str(table.get("name") or "")
    count = _number(table.get("count", 1), _whole, f"count of {where}")
    if count < 1:
        raise ClusterError(f"{where} has count {count}: give at least 1")
    memory = table.get("memory")
    memory_bytes = None if memory is None else _number(memory, parse_bytes, f"memory of {where}")
    index, speed = table.get("index"), table.get("speed")
    emulation = None
    if speed is not None:
        emulation = Emulation(_number(speed, _real, f"speed of {where}"), memory_bytes)
    flops = table.get("flops_per_s")
    bandwidth = table.get("memory_bandwidth")
    device = Device(
        name=name,
        kind=str(table.get("kind", "cpu")),
        model=str(table.get("model", "")),
        host=str(table.get("host", "localhost")),
        index=None if index is None else _number(index, _whole, f"index of {where}"),
        memory_bytes=memory_bytes,
        threads=_number(table.get("threads", 1), _whole, f"threads of {where}"),
        emulation=emulation,
        flops_per_s=None if flops is None else _number(flops, _real, f"flops_per_s of {where}"),
        memory_bytes_per_s=None
        if bandwidth is None
        else _number(bandwidth, parse_bytes_per_s, f"memory_bandwidth of {where}"),
        source=str(table.get("source", "")),
    )
    if count == 1:
        return [device]
    return [replace(device, name=f"{name}{i + 1}") for i in range(count)]


def _write_device(device: Device) -> dict[str, Any]:
    entry = {
        "name": device.name,
        "kind": device.kind,
        "model": device.model or None,
        "host": device.host,
        "index": device.index,
        "memory": device.memory_bytes,
        "threads": device.threads,
        "speed": device.emulation.speed if device.emulation else None,
        "flops_per_s": device.flops_per_s,
        "memory_bandwidth": device.memory_bytes_per_s,
        "source": device.source or None,
    }
    return {key: value for key, value in entry.items() if value is not None}


def _read_link(entry: object, where: str) -> Link:
    table = _table(entry, _LINK_KEYS, where)
    for key in ("latency", "bandwidth"):
        if key not in table:
            raise ClusterError(f"{where} has no {key}")
    return Link(
        latency_s=_number(table["latency"], parse_seconds, f"latency of {where}"),
        bandwidth_bytes_per_s=_number(table["bandwidth"], parse_bytes_per_s, f"bandwidth of {where}"),
        source=str(table.get("source", ANY)),
        target=str(table.get("target", ANY)),
        emulated=table.get("emulated", False),
    )


def _table(data: object, known: set[str], where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where} must be a mapping, not {type(data).__name__}: {data!r}")
    unknown = sorted(str(key) for key in data if key not in known)
    if unknown:
        raise ClusterError(
            f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    return data


def _sequence(table: Mapping[str, Any], key: str) -> list[Any]:
    value = table.get(key) or []
    if not isinstance(value, (list, tuple)):
        raise ClusterError(f"{key} must be a list, not {type(value).__name__}")
    return list(value)


def _whole(value: Any) -> int:
    if _real(value) != int(value):
        raise ValueError("it has a fraction")
    return int(value)


def _real(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError("it is true or false")
    return float(value)


def _number(value: Any, read: Any, where: str) -> Any:
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(f"{where} is {value!r}, which is not a number of that kind: {error}") from error
