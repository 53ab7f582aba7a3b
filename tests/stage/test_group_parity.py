"""A stage that devices share trains as one device trains it: torchvision's graphs, in double precision.

Members are threads, so that a case takes no processes. Micro-batches of 3, 3 and 2 samples go through the
stage in the order of a schedule, three optimizer steps long; a run of the suite covers each pair of settings
at least once, ``HETPIPE_PARITY=all`` runs the product.
"""

import copy
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.stage.analyse import analyse
from lightning_hetpipe.stage.batch import (
    BatchStage,
    join_samples,
    reduce_gradients,
    sample_bounds,
    share_buffers,
    take_samples,
)
from lightning_hetpipe.stage.channel import ChannelStage
from lightning_hetpipe.stage.consolidate import Placement, join_state
from lightning_hetpipe.stage.norm import convert_norm, set_process_group
from lightning_hetpipe.tracing import Traced, trace
from tests.helpers.parity import pairwise_cover
from tests.helpers.threads import ThreadMember, run_members
from tests.helpers.zoo import ZOO, network, pictures
from tests.stage.parity import free_communication, worst

ALL = os.environ.get("HETPIPE_PARITY") == "all"
SHARES = ((1, 1), (7, 1), (5, 2, 1), *(((1, 1, 1), (7, 1, 1)) if ALL else ()))
SPLITS = ("channel", "batch")
POSITIONS = ("first", "middle", "last")
SCHEDULES = {
    "gpipe": ("F0", "F1", "F2", "B0", "B1", "B2"),
    "1f1b": ("F0", "F1", "B0", "F2", "B1", "B2"),
}
PRODUCT = list(itertools.product(ZOO, SHARES, SPLITS, POSITIONS, SCHEDULES))
CASES = PRODUCT if ALL else list(pairwise_cover(PRODUCT))
SIZES, STEPS = (3, 3, 2), 3

Values = dict[str, Tensor]
Shared = tuple[list["Trained"], Mapping[str, Placement]]  # by member, and what is cut


@dataclass
class Trained:
    """What one device, or one member, has after some steps of a stage."""

    outputs: list[Values]  # by forward
    inputs: list[Values]  # gradients of the inputs, likewise
    gradients: list[Values]  # by step
    state: Values


@cache
def stages(name: str, position: str) -> tuple[Any, Traced, list[list[Values]]]:
    """A stage over a network's own modules, and what enters it: by step and micro-batch."""
    net = convert_norm(network(name), "sync")
    x = pictures(name)(sum(SIZES))[0].double()
    traced = trace(net, (x,), {})
    n = len(traced.graph)
    start, stop = {"first": (0, 2 * n // 3), "middle": (n // 4, 3 * n // 4), "last": (n // 3, n)}[position]
    entering = []
    for step in range(STEPS):
        torch.manual_seed(step)
        parts = (pictures(name)(sum(SIZES))[0].double()).split(SIZES)
        if start:
            front = own_copy(traced.stage(0, start))
            with torch.no_grad():
                entering.append([front({"x": part}) for part in parts])
        else:
            entering.append([{"x": part} for part in parts])
    return traced.stage(start, stop), traced, entering


def own_copy(stage: Any) -> Any:
    """The stage over a module of its own; its operations keep their names, which the layout knows."""
    return copy.deepcopy(stage, {id(stage.graph): stage.graph})


def train(
    run: Callable[[Values], Values],
    module: nn.Module,
    entering: list[list[Values]],
    schedule: str,
    mine: Callable[[Values], Values] = lambda values: values,
    reduce: Callable[[], None] = lambda: None,
) -> Trained:
    """Three steps of SGD; the gradient of every output is drawn, and cut as ``mine`` cuts samples."""
    made = Trained([], [], [], {})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    for step, parts in enumerate(entering):
        optimizer.zero_grad()
        given: list[Values] = [{} for _ in parts]
        outputs: list[Values] = [{} for _ in parts]
        for action in SCHEDULES[schedule]:
            m = int(action[1])
            if action[0] == "F":
                given[m] = {
                    key: value.clone().requires_grad_(value.is_floating_point())
                    for key, value in mine(parts[m]).items()
                }
                outputs[m] = dict(run({key: value * 1 for key, value in given[m].items()}))
                continue
            n_samples = len(next(iter(parts[m].values())))
            seeds = {key: drawn(value.shape[1:], n_samples, step, m) for key, value in outputs[m].items()}
            pairs = [(value, mine(seeds)[key]) for key, value in outputs[m].items() if value.requires_grad]
            torch.autograd.backward([value for value, _ in pairs], [seed for _, seed in pairs])
        made.outputs += [{key: value.detach() for key, value in each.items()} for each in outputs]
        made.inputs += [{k: v.grad for k, v in each.items() if v.grad is not None} for each in given]
        reduce()
        named = module.named_parameters()
        made.gradients.append({key: p.grad.clone() for key, p in named if p.grad is not None})
        optimizer.step()
    made.state = {key: value.clone() for key, value in module.state_dict().items()}
    return made


def drawn(shape: Any, n_samples: int, step: int, m: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + m)
    rows = torch.randn((n_samples, *shape), dtype=torch.float64, generator=generator)
    return rows / rows.numel()


@cache
def alone(name: str, position: str, schedule: str) -> Trained:
    stage = own_copy(stages(name, position)[0])
    return train(stage, stage.root.module, stages(name, position)[2], schedule)


def by_channels(name: str, position: str, shares: tuple[float, ...], schedule: str) -> Shared:
    stage, _, entering = stages(name, position)
    copies = [own_copy(stage) for _ in shares]
    inputs = {key: value.clone().requires_grad_() for key, value in entering[0][0].items()}
    # A layout belongs to the modules that it was made of.
    layouts = [analyse(own, inputs, shares, free_communication(shares)) for own in copies]

    def member(group: ThreadMember) -> Trained:
        own = copies[group.rank()]
        shared = ChannelStage(own, layouts[group.rank()], group).shard_()
        return train(shared, own.root.module, entering, schedule)

    return run_members(len(shares), member), layouts[0].placements


def by_samples(name: str, position: str, shares: tuple[float, ...], schedule: str) -> Shared:
    stage, _, entering = stages(name, position)
    copies = [own_copy(stage) for _ in shares]

    def member(group: ThreadMember) -> Trained:
        own = copies[group.rank()]
        module = own.root.module
        set_process_group(module, group)
        axes = dict.fromkeys(own.input_names, 0)

        def mine(values: Values) -> Values:
            n_samples = len(next(iter(values.values())))
            return take_samples(values, sample_bounds(n_samples, shares), group.rank())

        def reduce() -> None:
            reduce_gradients(module.parameters(), group)
            share_buffers(list(module.buffers()), group)

        return train(BatchStage(own, axes, together=True), module, entering, schedule, mine, reduce)

    return run_members(len(shares), member), {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "shares", "split", "position", "schedule"), CASES)
def test_a_shared_stage_trains_as_on_one_device(
    name: str, shares: tuple[int, ...], split: str, position: str, schedule: str
) -> None:
    parts = tuple(share / sum(shares) for share in shares)
    wanted = alone(name, position, schedule)
    found, cut = {"channel": by_channels, "batch": by_samples}[split](name, position, parts, schedule)

    def check(kind: str, key: str, mine: Tensor, theirs: Tensor) -> None:
        error = worst(mine, theirs)
        assert error < 1e-9, f"{kind} {key}: {error:.1e}"

    for kind in ("outputs", "inputs"):
        for index, values in enumerate(getattr(wanted, kind)):
            each = [getattr(member, kind)[index] for member in found]
            for key, value in (join_samples(each) if split == "batch" else each[0]).items():
                check(kind, key, value, values[key])
            if split == "channel":
                assert all(other.keys() == values.keys() for other in each)
                for other in each[1:]:
                    for key, value in other.items():
                        check(kind, key, value, values[key])
    assert len(cut) > 3 or split == "batch"
    for step, values in enumerate(wanted.gradients):
        each = [member.gradients[step] for member in found]
        for member in range(len(shares)):
            whole = join_state(each, cut) if member == 0 else each[member]
            assert whole.keys() == values.keys()
            for key in values:
                if member == 0 or key not in cut:
                    check("gradient", key, whole[key], values[key])
    for member in range(len(shares)):
        whole = join_state([other.state for other in found], cut) if member == 0 else found[member].state
        for key, value in wanted.state.items():
            if member == 0 or key not in cut:
                check("state", key, whole[key], value)
