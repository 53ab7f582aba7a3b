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
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_hetpipe.cluster import Cluster, Link
from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.graph import Layer, LayerGraph, Value

FORMAT = 2
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

    def __post_init__(self) -> None:
        if not self.micro_batches or list(self.micro_batches) != sorted(set(self.micro_batches)):
            raise ProfileError(
                f"profile of {self.device!r}: micro-batch sizes {self.micro_batches} must ascend"
            )
        for name, table in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            if any(len(row) != len(self.micro_batches) for row in table):
                raise ProfileError(f"profile of {self.device!r}: {name} has a row of the wrong length")

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


def _interpolate(sizes: tuple[int, ...], table: Array, micro_batch: int) -> Array:
    if len(sizes) == 1:
        return np.asarray(table[:, 0] * (micro_batch / sizes[0]))
    right = int(np.clip(np.searchsorted(sizes, micro_batch), 1, len(sizes) - 1))
    left = right - 1
    slope = (table[:, right] - table[:, left]) / (sizes[right] - sizes[left])
    return np.maximum(table[:, left] + slope * (micro_batch - sizes[left]), 0.0)


@dataclass(frozen=True)
class Profile:
    """Everything the planner needs to know about a model on a cluster.

    Attributes:
        graph: The model as layers.
        devices: One entry per profiled device.
        links: Measured links; a pair that is missing uses the cluster's figure.
        dtype: Parameter dtype, such as ``float32``.
        origin: ``measured``, or ``analytic`` for figures derived from FLOPs and bytes.
        environment: What the numbers depend on (torch version, processor, ...), for people and cache keys.
        step_forward_s, step_backward_s: Seconds of the user's step around the module, per micro-batch
            on rank 0 (loss and pre-processing).
    """

    graph: LayerGraph
    devices: tuple[DeviceProfile, ...]
    links: tuple[Link, ...] = ()
    dtype: str = "float32"
    origin: Literal["measured", "analytic"] = "measured"
    environment: Mapping[str, str] = field(default_factory=dict)
    step_forward_s: float = 0.0
    step_backward_s: float = 0.0

    def __post_init__(self) -> None:
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
        """The measured link, or the cluster's own figure where none was measured."""
        return self._links.get((source, target)) or cluster.link(source, target)

    @cached_property
    def content_hash(self) -> str:
        """A short hash of everything in it; a plan carries it to name what it was made from."""
        digest = hashlib.sha256()
        for device in self.devices:
            digest.update(repr((device.device, device.micro_batches, device.optimizer_peak)).encode())
            digest.update(repr((device.forward_peak_bytes, device.backward_peak_bytes)).encode())
            digest.update(repr((device.spread, device.optimizer_s_per_byte)).encode())
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
        except json.JSONDecodeError as error:
            raise ProfileError(f"the profile is not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ProfileError(f"the file is not a profile of format {FORMAT}: measure again")
        try:
            graph = data.pop("graph")
            return cls(
                graph=read_graph(graph),
                devices=tuple(map(read_device, data.pop("devices"))),
                links=tuple(Link(**entry) for entry in data.pop("links")),
                **data,
            )
        except ProfileError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
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
    return DeviceProfile(**{key: _frozen(value) for key, value in data.items()})


def read_graph(data: Mapping[str, Any]) -> LayerGraph:
    """Rebuilds a graph from what `dataclasses.asdict` made of it."""
    layers = tuple(Layer(**{k: _frozen(v) for k, v in entry.items()}) for entry in data["layers"])
    values = tuple(Value(**{k: _frozen(v) for k, v in entry.items()}) for entry in data["values"])
    return LayerGraph(
        layers, values, _frozen(data["tied"]), data["fingerprint"], _frozen(data["input_names"])
    )


def _frozen(value: Any) -> Any:
    """JSON lists as the tuples they were."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
