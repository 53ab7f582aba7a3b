"""Full tensors from the shards of a group, and back; for parameters, buffers and optimizer state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import PlanError
from lightning_hetpipe.stage.layout import Sharding


@dataclass(frozen=True)
class Placement:
    """Where the parts of a parameter or buffer lie; a tensor that has none is whole on everyone.

    Attributes:
        sharding: The cut dimension and its bounds.
        blocks: The dimension holds this many blocks one after another, each cut by the same bounds
            (3 for the joint query, key and value weights of an attention).
    """

    sharding: Sharding
    blocks: int = 1

    @property
    def dim(self) -> int:
        return self.sharding.dim

    def intervals(self, member: int) -> tuple[tuple[int, int], ...]:
        """``[start, stop)`` along ``dim`` of the full tensor that ``member`` holds, one per block."""
        bounds = self.sharding.bounds
        return tuple(
            (block * bounds[-1] + bounds[member], block * bounds[-1] + bounds[member + 1])
            for block in range(self.blocks)
        )

    def length(self, member: int) -> int:
        """Size along ``dim`` of that member's shard."""
        return self.blocks * self.sharding.counts[member]

    def cut(self, full: Tensor, member: int) -> Tensor:
        """That member's shard, in its own storage.

        Raises:
            PlanError: The tensor is not of the full size.
        """
        size = self.blocks * self.sharding.bounds[-1]
        if full.ndim <= self.dim or full.shape[self.dim] != size:
            raise PlanError(
                f"a tensor of shape {tuple(full.shape)} cannot be cut at {self.sharding.bounds} of dimension "
                f"{self.dim} ({self.blocks} blocks): it is not the full tensor of this layout"
            )
        parts = [full.narrow(self.dim, start, stop - start) for start, stop in self.intervals(member)]
        return torch.cat(parts, self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor.

        Raises:
            PlanError: The shards are not those of this layout.
        """
        lengths = [shard.shape[self.dim] for shard in shards]
        wanted = [self.length(member) for member in range(len(self.sharding.counts))]
        if lengths != wanted:
            raise PlanError(f"shards of {lengths} along dimension {self.dim} are not the layout's {wanted}")
        parts = [shard.chunk(self.blocks, self.dim) for shard in shards]
        return torch.cat([part[block] for block in range(self.blocks) for part in parts], self.dim)


Placements = Mapping[str, Placement]


def cut_state(full: Mapping[str, Tensor], placements: Placements, member: int) -> dict[str, Tensor]:
    """A member's part of a full state dict; what has no placement is passed on as it is."""
    return {
        name: placements[name].cut(tensor, member) if name in placements else tensor
        for name, tensor in full.items()
    }


def join_state(states: Sequence[Mapping[str, Tensor]], placements: Placements) -> dict[str, Tensor]:
    """The full state dict from every member's, in order of members; whole tensors are the first's."""
    return {
        name: placements[name].join([state[name] for state in states]) if name in placements else tensor
        for name, tensor in states[0].items()
    }


def cut_optimizer_state(
    full: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[str, torch.Size],
    placements: Placements,
    member: int,
) -> dict[str, dict[str, Any]]:
    """A member's part of optimizer state by parameter name.

    Args:
        full: Parameter name to its state (``exp_avg``, ``step``, ...).
        shapes: Full shape of each parameter: state of that shape is cut, anything else is kept.
        placements: Where the parameters lie.
        member: Index in the group.
    """
    return {
        name: {
            key: placements[name].cut(value, member)
            if name in placements and isinstance(value, Tensor) and value.shape == shapes[name]
            else value
            for key, value in state.items()
        }
        for name, state in full.items()
    }


def join_optimizer_state(
    states: Sequence[Mapping[str, Mapping[str, Any]]],
    shapes: Sequence[Mapping[str, torch.Size]],
    placements: Placements,
) -> dict[str, dict[str, Any]]:
    """Full optimizer state from every member's.

    Args:
        states: By member: parameter name to its state.
        shapes: By member: shape of its shard of each parameter; state of that shape is joined.
        placements: Where the parameters lie.
    """
    joined: dict[str, dict[str, Any]] = {}
    for name, state in states[0].items():
        joined[name] = dict(state)
        if name not in placements:
            continue
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == shapes[0][name]:
                joined[name][key] = placements[name].join([other[name][key] for other in states])
    return joined


def norm_weight(name: str, placements: Placements, member: int) -> float:
    """What a member's squared norm of that parameter counts in the group's sum: whole tensors once."""
    return 1.0 if name in placements or member == 0 else 0.0


def shard_(module: nn.Module, placements: Placements, member: int) -> None:
    """Cuts the module's full parameters and buffers in place; every `Parameter` object stays the same.

    So names, optimizer groups and hooks stay valid. Gradients must not exist yet.

    Raises:
        PlanError: A tensor is not of the full size, or the module lacks one that has a placement.
    """
    _replace(module, placements, lambda placement, tensor, name: placement.cut(tensor, member))


def unshard_(module: nn.Module, full: Mapping[str, Tensor], placements: Placements) -> None:
    """Puts full tensors back in place of the shards; the inverse of `shard_`."""
    _replace(module, placements, lambda placement, tensor, name: full[name].to(tensor.device))


def _replace(module: nn.Module, placements: Placements, make: Any) -> None:
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    missing = sorted(set(placements) - set(tensors))
    if missing:
        raise PlanError(f"the layout cuts {', '.join(missing)}, which the module does not have")
    done: set[int] = set()
    for name, placement in placements.items():
        tensor = tensors[name]
        if id(tensor) not in done:
            done.add(id(tensor))
            tensor.data = make(placement, tensor.data, name)
