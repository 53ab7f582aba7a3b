"""A node of a stage with what surrounds it, and what a rule answers about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from torch import Tensor, fx, nn

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.shares import channel_bounds
from lightning_hetpipe.stage.consolidate import Placement
from lightning_hetpipe.stage.kernels import Kernel, Member
from lightning_hetpipe.stage.layout import Form, Sharding, Way

WHOLE, COPY, SHARD = Form.REPLICATED, Form.COPIED, Form.SHARDED


@dataclass(frozen=True)
class Realisation:
    """A way, what it cuts, and what runs for it.

    Attributes:
        way: For the choice.
        placements: Parameter or buffer (by its name in the module) to where its parts lie.
        kernel: Makes what runs instead of the node's own target; None runs that on what it is given.
        own_randomness: True when members must draw different numbers.
    """

    way: Way
    placements: Mapping[str, Placement] = field(default_factory=dict)
    kernel: Callable[[Member], Kernel] | None = None
    own_randomness: bool = False


@dataclass
class Answer:
    """What a rule says about a node."""

    sharding: Sharding | None = None
    shared: list[Realisation] = field(default_factory=list)
    work: float = 0.0
    note: str = ""


@dataclass
class Cutter:
    """One cut vector per channel width, aligned to every group size that the stage asks of it.

    Attributes:
        shares: Of the members.
        align: Channels that kernels like together, where there are enough.
        units: Width to the unit of its cuts.
    """

    shares: tuple[float, ...]
    align: int = 1
    units: dict[int, int] = field(default_factory=dict)

    def ask(self, channels: int, unit: int) -> None:
        """Wants cuts at multiples of ``unit``; granted when every member still gets one."""
        both = lcm(self.units.get(channels, 1), unit)
        if channels % both == 0 and channels // both >= len(self.shares):
            self.units[channels] = both

    def cut(self, channels: int, dim: int) -> Sharding | None:
        """None when there are fewer channels than members."""
        self.ask(channels, self.align)
        try:
            return Sharding(dim, channel_bounds(channels, self.shares, self.units.get(channels, 1)))
        except PlanError:
            return None


@dataclass(frozen=True)
class Site:
    """A node with what surrounds it.

    Attributes:
        node: The operation.
        module: Its module, for ``call_module``.
        inputs: Nodes whose tensors it takes, each once.
        values: Shapes of inputs and result, on the meta device.
        shardings: How the inputs are cut when sharded.
        cutter: Cut vectors of the stage.
        own: Whether the module's parameters belong to this node alone.
    """

    node: fx.Node
    module: nn.Module | None
    inputs: tuple[fx.Node, ...]
    values: Mapping[str, Any]
    shardings: Mapping[str, Sharding | None]
    cutter: Cutter
    own: bool

    @property
    def result(self) -> Any:
        return self.values[self.node.name]

    def value(self, index: int = 0) -> Tensor:
        tensor: Tensor = self.values[self.inputs[index].name]
        return tensor

    def sharding(self, index: int = 0) -> Sharding | None:
        return self.shardings[self.inputs[index].name]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """A literal argument."""
        if name in self.node.kwargs:
            return self.node.kwargs[name]
        return self.node.args[position] if len(self.node.args) > position else default


def size_work(site: Site) -> float:
    return 40.0 * site.result.numel() if isinstance(site.result, Tensor) else 0.0


def local(site: Site, sharding: Sharding, **options: Any) -> Answer:
    forms = (SHARD,) * len(site.inputs)
    realisation = Realisation(Way("local", forms, SHARD, shared=True), **options)
    return Answer(sharding, [realisation], size_work(site))
