"""A model as a chain of layers, with every tensor that crosses a place between two of them.

    reader ──x──►[ layer 0 ]──a──►[ layer 1 ]──b──►[ layer 2 ]──► output
                      └──────────── s (skip) ─────────►┘
                              cut 1          cut 2

Layers stand in execution order. Cut ``i`` is the place before layer ``i``; every cut is legal:
what crosses it is tensors only. A tensor with a consumer several stages away goes straight there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from lightning_hetpipe.errors import GraphError

READER = -1  # the "stage" or "layer" that produces the inputs: rank 0's suspended user step


@dataclass(frozen=True)
class Layer:
    """The smallest cuttable unit.

    Attributes:
        name: Fully qualified name of its first module or operation, unique in the graph.
        operation: Class or function name, for tables.
        parameters: Names of the parameters it uses, each under its first name in the module.
        parameter_bytes: Bytes of those parameters (tied ones count in every layer that uses them).
        flops_per_sample: Multiply-adds times two of one sample's forward; 0 where unknown.
        saved_bytes_per_sample: What autograd keeps until the backward of one sample and no value is: it is
            made within the layer. `Value.kept_by` tells the rest.
    """

    name: str
    operation: str
    parameters: tuple[str, ...] = ()
    parameter_bytes: int = 0
    flops_per_sample: float = 0.0
    saved_bytes_per_sample: float = 0.0


@dataclass(frozen=True)
class Value:
    """A tensor that passes from one layer (or the reader) to others.

    Attributes:
        name: Unique in the graph; an input has its argument's name.
        producer: Index of the layer that makes it, or `READER`.
        consumers: Indices of the layers that use it, ascending.
        bytes_per_sample: Size that grows with the micro-batch.
        fixed_bytes: Size that does not.
        gradient: True when a gradient flows back along it.
        output: True when the model returns it, so that the last stage needs it.
        kept_by: Indices of the layers that keep it until their backward, ascending; its producer may be one.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    bytes_per_sample: float
    fixed_bytes: float = 0.0
    gradient: bool = True
    output: bool = False
    kept_by: tuple[int, ...] = ()

    def size_bytes(self, micro_batch: int) -> float:
        return self.fixed_bytes + self.bytes_per_sample * micro_batch


@dataclass(frozen=True)
class Route:
    """What one stage sends to another: forward values, and the gradients that come back.

    Attributes:
        source, target: Stage indices; the source may be `READER`.
        values: Names of the tensors, in the order of the graph.
        gradients: The subset of ``values`` whose gradients return.
    """

    source: int
    target: int
    values: tuple[str, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True)
class LayerGraph:
    """Layers in execution order and the values between them.

    Attributes:
        layers: At least one.
        values: Inputs first, then by producer.
        tied: Groups of layer indices that use one and the same parameter.
        fingerprint: Hash of structure, shapes and dtypes; equal for equal models.
    """

    layers: tuple[Layer, ...]
    values: tuple[Value, ...]
    tied: tuple[tuple[int, ...], ...] = ()
    fingerprint: str = ""
    input_names: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.layers:
            raise GraphError("the model has no layers to place")

    def __len__(self) -> int:
        return len(self.layers)

    def crossing(self, cut: int) -> Iterator[Value]:
        """Values made before the cut and used at or after it (inputs count as made before)."""
        last = len(self.layers) - 1
        for value in self.values:
            end = last if value.output else max(value.consumers, default=READER)
            if value.producer < cut <= end:
                yield value

    def routes(self, starts: tuple[int, ...], *, loss_apart: bool = False) -> tuple[Route, ...]:
        """The messages between stages that begin at these layers.

        Args:
            starts: First layer of each stage, ascending, beginning with 0.
            loss_apart: Whether a further stage without layers follows, which takes the outputs.

        Returns:
            Routes ordered by source then target. An output made early is sent to the last stage.
        """
        stage_of = _stage_of(starts, len(self.layers))
        last_stage = len(starts) - (not loss_apart)
        pairs: dict[tuple[int, int], list[Value]] = {}
        for value in self.values:
            source = READER if value.producer == READER else stage_of[value.producer]
            targets = {stage_of[layer] for layer in value.consumers}
            if value.output:
                targets.add(last_stage)
            for target in sorted(targets - {source}):
                pairs.setdefault((source, target), []).append(value)
        return tuple(
            Route(
                source,
                target,
                tuple(value.name for value in values),
                tuple(value.name for value in values if value.gradient),
            )
            for (source, target), values in sorted(pairs.items())
        )

    def value(self, name: str) -> Value:
        """The value of that name."""
        for value in self.values:
            if value.name == name:
                return value
        raise GraphError(f"the graph has no value named {name!r}")


def _stage_of(starts: tuple[int, ...], n_layers: int) -> list[int]:
    if not starts or starts[0] != 0 or list(starts) != sorted(set(starts)) or starts[-1] >= n_layers:
        raise GraphError(
            f"stages that begin at layers {starts} do not divide {n_layers} layers: begin with 0, "
            f"ascend, and stay below {n_layers}"
        )
    stage_of: list[int] = []
    for stage, start in enumerate(starts):
        end = starts[stage + 1] if stage + 1 < len(starts) else n_layers
        stage_of.extend([stage] * (end - start))
    return stage_of
