"""What was measured: seconds and bytes per device, layer and micro-batch size, and per link.

A profile carries the graph it was measured on, so that a plan can be made from the file alone,
for machines one does not have.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning_hetpipe.checks import frozen, is_number, is_whole, require
from lightning_hetpipe.cluster import Cluster, Link
from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.graph import READER, Layer, LayerGraph, Value
from lightning_hetpipe.sharing import Sharing, read_sharing

FORMAT = 3
Origin = Literal["measured", "analytic"]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DeviceProfile:
    """Seconds of every layer on one device.

    Attributes:
        device: The device's name.
        micro_batches: Measured sizes in samples, ascending.
        forward_s, backward_s: One row per layer, one column per size.
        spread: Relative half-width of the repeats (0.05 = 5 %), the median over layers.
        optimizer_s_per_byte: Seconds of the optimizer step per parameter byte.
        forward_peak_bytes, backward_peak_bytes: The most that a layer's forward or backward allocates on top
            of what is there before it, gradients of its parameters included: one row per layer, ``(fixed,
            per sample)``. Empty where it was not measured.
        optimizer_peak: What a step of the optimizer allocates in passing: times the bytes of the largest
            parameter, and times those of all parameters.
        fractions: Measured fractions of the channels, descending, below 1.
        forward_factors, backward_factors: One row per layer, one column per fraction: seconds of what can be
            shared of the layer at that fraction, over its seconds on all channels.
    """

    device: str
    micro_batches: tuple[int, ...]
    forward_s: tuple[tuple[float, ...], ...]
    backward_s: tuple[tuple[float, ...], ...]
    spread: float = 0.0
    optimizer_s_per_byte: float = 0.0
    forward_peak_bytes: tuple[tuple[float, float], ...] = ()
    backward_peak_bytes: tuple[tuple[float, float], ...] = ()
    optimizer_peak: tuple[float, float] = (0.0, 0.0)
    fractions: tuple[float, ...] = ()
    forward_factors: tuple[tuple[float, ...], ...] = ()
    backward_factors: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        require(isinstance(self.device, str), ProfileError, "device", self.device, "the device's name")
        where = f"profile of {self.device!r}"
        if not isinstance(self.micro_batches, tuple) or not all(map(is_whole, self.micro_batches)):
            raise ProfileError(
                f"{where}: micro-batch sizes {self.micro_batches!r} must be whole and positive"
            )
        if not self.micro_batches or list(self.micro_batches) != sorted(set(self.micro_batches)):
            raise ProfileError(f"{where}: micro-batch sizes {self.micro_batches} must ascend")
        for name, table in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            if not isinstance(table, tuple) or not all(isinstance(row, tuple) for row in table):
                raise ProfileError(f"{where}: {name} must be a tuple with a tuple of seconds for each layer")
            if any(len(row) != len(self.micro_batches) for row in table):
                raise ProfileError(f"{where}: {name} has a row of the wrong length")
        rest = (self.spread, self.optimizer_s_per_byte)
        for name, figures in (
            ("forward_s", self.forward_s),
            ("backward_s", self.backward_s),
            ("spread or optimizer_s_per_byte", rest),
            ("forward_peak_bytes", self.forward_peak_bytes),
            ("backward_peak_bytes", self.backward_peak_bytes),
            ("optimizer_peak", self.optimizer_peak),
            ("forward_factors", self.forward_factors),
            ("backward_factors", self.backward_factors),
        ):
            if not _are_figures(figures):
                raise ProfileError(f"{where}: {name} has a value that is not a finite number >= 0")
        for factors in (self.forward_factors, self.backward_factors):
            if factors and len(factors) != len(self.forward_s):
                raise ProfileError(f"{where}: share factors of {len(factors)} layers")

    @cached_property
    def _tables(self) -> tuple[Array, Array]:
        return np.asarray(self.forward_s, dtype=float), np.asarray(self.backward_s, dtype=float)

    def layer_seconds(self, micro_batch: int) -> tuple[Array, Array]:
        """Forward and backward seconds of every layer, each of shape ``[layers]``.

        Piecewise linear between measured sizes; the outermost pair is continued beyond them
        (never below zero; proportional where only one size was measured).
        """
        forward, backward = self._tables
        return (
            _interpolate(self.micro_batches, forward, micro_batch),
            _interpolate(self.micro_batches, backward, micro_batch),
        )

    def slowed(self, factor: float, device: str) -> "DeviceProfile":
        """The profile of a device that takes ``factor`` times as long for everything."""

        def longer(table: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(factor * seconds for seconds in row) for row in table)

        return replace(
            self,
            device=device,
            forward_s=longer(self.forward_s),
            backward_s=longer(self.backward_s),
            optimizer_s_per_byte=factor * self.optimizer_s_per_byte,
        )

    def share_factors(self, fraction: float) -> tuple[Array, Array]:
        """What a fraction of the channels takes of each layer's forward and backward, ``[layers]`` each.

        Piecewise linear between the measured fractions and 1; below them the line goes on, but what is left
        takes no less than its proportion. Proportional throughout where none was measured.
        """
        if not self.fractions:
            even = np.full(len(self.forward_s), fraction)
            return even, even
        tables = (self.forward_factors, self.backward_factors)
        forward, backward = (self._factors(np.asarray(table, dtype=float), fraction) for table in tables)
        return forward, backward

    def _factors(self, table: Array, fraction: float) -> Array:
        known = np.array([*reversed(self.fractions), 1.0])
        columns = np.column_stack([table[:, ::-1], np.ones(len(table))])
        right = min(max(int(np.searchsorted(known, fraction)), 1), len(known) - 1)
        along = (fraction - known[right - 1]) / (known[right] - known[right - 1])
        line = columns[:, right - 1] * (1 - along) + columns[:, right] * along
        least = columns[:, 0] * (fraction / known[0]) if fraction < known[0] else 0.0
        return np.asarray(np.maximum(line, least))


def _are_figures(values: object) -> bool:
    """Whether all are finite numbers >= 0."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):
        return False
    return array.dtype.kind in "fiu" and bool(np.isfinite(array).all() and (array >= 0).all())


def _interpolate(sizes: tuple[int, ...], table: Array, micro_batch: int) -> Array:
    if len(sizes) == 1:
        return np.asarray(table[:, 0] * (micro_batch / sizes[0]))
    right = int(np.clip(np.searchsorted(sizes, micro_batch), 1, len(sizes) - 1))
    left = right - 1
    slope = (table[:, right] - table[:, left]) / (sizes[right] - sizes[left])
    return np.maximum(table[:, left] + slope * (micro_batch - sizes[left]), 0.0)


_FASTEST_S_PER_BYTE = 1e-13  # what is left of a link whose bytes pass while they are sent


@dataclass(frozen=True)
class Software:
    """What messages and collectives cost on a processor, beside what their link is declared to take.

    Attributes:
        send_s, send_s_per_byte: Seconds for which a message occupies its sender, before its link carries it.
        collective_s, collective_s_per_byte: Seconds of a collective from when its last member comes, per
            operation and per byte of the whole tensor; an emulated link's own seconds come after them.
    """

    send_s: float = 0.0
    send_s_per_byte: float = 0.0
    collective_s: float = 0.0
    collective_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            unit = "seconds per byte" if key.endswith("per_byte") else "seconds"
            require(is_number(value), ProfileError, key, value, f"{unit} >= 0")

    def sending_s(self, size_bytes: float) -> float:
        """Seconds for which the sender of a message is occupied."""
        return self.send_s + size_bytes * self.send_s_per_byte

    def before(self, link: Link) -> Link:
        """A message's whole way: its sender's part, then the link."""
        if not (self.send_s or self.send_s_per_byte):
            return link
        s_per_byte = 1 / link.bandwidth_bytes_per_s + self.send_s_per_byte
        return replace(link, latency_s=link.latency_s + self.send_s, bandwidth_bytes_per_s=1 / s_per_byte)

    def after(self, way: Link) -> Link:
        """What is left of a message's whole way once its sender is done: `before`, undone."""
        if not (self.send_s or self.send_s_per_byte):
            return way
        s_per_byte = max(1 / way.bandwidth_bytes_per_s - self.send_s_per_byte, _FASTEST_S_PER_BYTE)
        latency_s = max(way.latency_s - self.send_s, 0.0)
        return replace(way, latency_s=latency_s, bandwidth_bytes_per_s=1 / s_per_byte)


@dataclass(frozen=True)
class Profile:
    """Everything the planner needs to know about a model on a cluster.

    Attributes:
        graph: The model as layers.
        devices: One entry per profiled device.
        links: Measured links; a pair that is missing uses the cluster's figure.
        software: What sending and collectives cost where the processor is that was profiled; zero where
            it was not measured.
        dtype: Parameter dtype, such as ``float32``.
        origin: ``measured``, or ``analytic`` for figures derived from FLOPs and bytes.
        environment: What the numbers depend on (torch version, processor, ...), for people and cache keys.
        step_forward_s, step_backward_s: Seconds of the user's step around the module, per micro-batch
            on rank 0 (loss and pre-processing).
        sharing: What a group can share of the model; None where groups are not to be planned.
    """

    graph: LayerGraph
    devices: tuple[DeviceProfile, ...]
    links: tuple[Link, ...] = ()
    software: Software = Software()
    dtype: str = "float32"
    origin: Origin = "measured"
    environment: Mapping[str, str] = field(default_factory=dict)
    step_forward_s: float = 0.0
    step_backward_s: float = 0.0
    sharing: Sharing | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.graph, LayerGraph), ProfileError, "graph", self.graph, "a LayerGraph")
        for key, kind in (("devices", DeviceProfile), ("links", Link)):
            values = getattr(self, key)
            known = isinstance(values, tuple) and all(isinstance(value, kind) for value in values)
            require(known, ProfileError, key, values, f"a tuple of {kind.__name__} values")
        known = isinstance(self.software, Software)
        require(known, ProfileError, "software", self.software, "a Software")
        known = self.origin in get_args(Origin)
        require(known, ProfileError, "origin", self.origin, " or ".join(get_args(Origin)))
        require(isinstance(self.dtype, str), ProfileError, "dtype", self.dtype, "a name such as float32")
        known = isinstance(self.environment, Mapping)
        require(known, ProfileError, "environment", self.environment, "a mapping")
        for key in ("step_forward_s", "step_backward_s"):
            value = getattr(self, key)
            require(is_number(value), ProfileError, key, value, "seconds >= 0")
        for device in self.devices:
            for table in (device.forward_s, device.backward_s):
                if len(table) != len(self.graph):
                    raise ProfileError(
                        f"profile of {device.device!r} has {len(table)} layers, the graph "
                        f"{len(self.graph)}: it belongs to another model"
                    )

    @cached_property
    def _by_name(self) -> dict[str, DeviceProfile]:
        return {device.device: device for device in self.devices}

    def device(self, name: str) -> DeviceProfile:
        """The measurements of one device.

        Raises:
            ProfileError: It was not profiled.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise ProfileError(
                f"device {name!r} was not profiled; this profile has {', '.join(self._by_name)}"
            ) from None

    @cached_property
    def _links(self) -> dict[tuple[str, str], Link]:
        return {(link.source, link.target): link for link in self.links}

    def link(self, cluster: Cluster, source: str, target: str) -> Link:
        """A message's whole way: as measured; else what its sender is occupied, then the cluster's figure."""
        measured = self._links.get((source, target))
        return measured or self.software.before(cluster.link(source, target))

    def collective_link(self, cluster: Cluster, source: str, target: str) -> tuple[Link, Software]:
        """What a collective takes on a pair's link, and what comes on top of it.

        A measured link of the world has its software in it. An emulated one is kept to its declared figure
        after the collective itself, so nothing of what a measurement saw there can be taken for it.
        """
        declared, measured = cluster.link(source, target), self._links.get((source, target))
        if measured is None or declared.emulated:
            return declared, self.software
        return measured, Software()

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What others computed from this profile, by keys of their own: tables that many plans share."""
        return {}

    @cached_property
    def content_hash(self) -> str:
        """A short hash of everything in it; a plan carries it to name what it was made from."""
        digest = hashlib.sha256()
        for device in self.devices:
            digest.update(repr((device.device, device.micro_batches, device.optimizer_peak)).encode())
            digest.update(repr((device.forward_peak_bytes, device.backward_peak_bytes)).encode())
            digest.update(repr((device.spread, device.optimizer_s_per_byte)).encode())
            digest.update(repr((device.fractions, device.forward_factors, device.backward_factors)).encode())
            for table in (device.forward_s, device.backward_s):
                digest.update(np.asarray(table, dtype=float).tobytes())
        rest = replace(self, devices=(), environment=dict(self.environment))
        digest.update(rest.to_json().encode())
        return digest.hexdigest()[:16]

    def to_json(self) -> str:
        """A JSON text that `from_json` reads back to an equal profile."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """Reads a profile.

        Raises:
            ProfileError: The text is not a profile of this format.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ProfileError(f"the profile is not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ProfileError(f"the file is not a profile of format {FORMAT}: measure again")
        try:
            graph = data.pop("graph")
            return cls(
                graph=read_graph(graph),
                devices=tuple(map(read_device, data.pop("devices"))),
                links=tuple(Link(**entry) for entry in data.pop("links")),
                software=Software(**data.pop("software")),
                sharing=read_sharing(frozen(data.pop("sharing", None))),
                **data,
            )
        except ProfileError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ProfileError(f"the profile is damaged ({error!r}): measure again") from error

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Reads a file that `save` wrote.

        Raises:
            ProfileError: The file is missing or is not a profile.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"profile {path} cannot be read: {error}") from error
        try:
            return cls.from_json(text)
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error


def read_device(data: Mapping[str, Any]) -> DeviceProfile:
    """Rebuilds a device's profile from what `dataclasses.asdict` made of it."""
    return DeviceProfile(**{key: frozen(value) for key, value in data.items()})


def read_graph(data: Mapping[str, Any]) -> LayerGraph:
    """Rebuilds a graph from what `dataclasses.asdict` made of it."""
    layers = tuple(Layer(**{k: frozen(v) for k, v in entry.items()}) for entry in data["layers"])
    values = tuple(Value(**{k: frozen(v) for k, v in entry.items()}) for entry in data["values"])
    figures = [(each.parameter_bytes, each.flops_per_sample, each.saved_bytes_per_sample) for each in layers]
    sizes = [(each.bytes_per_sample, each.fixed_bytes) for each in values]
    ends = [end for each in values for end in (each.producer - READER, *each.consumers)]
    if not (_are_figures(figures) and _are_figures(sizes) and _are_figures(ends)):
        raise ProfileError("the profile's graph has a size that is not a finite number >= 0: measure again")
    if any(end > len(layers) for end in ends):
        raise ProfileError("the profile's graph has a value of a layer that it does not have: measure again")
    return LayerGraph(layers, values, frozen(data["tied"]), data["fingerprint"], frozen(data["input_names"]))
