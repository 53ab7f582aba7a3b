"""The small rooms of the strategy by themselves: batches, logs, suspended steps, gradients, names."""

import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import GraphError, StepError
from lightning_hetpipe.strategy.batch import count_samples, cut, join
from lightning_hetpipe.strategy.gradients import Stash
from lightning_hetpipe.strategy.logs import LogCall, merge
from lightning_hetpipe.strategy.pipelined import find_pipelined
from lightning_hetpipe.strategy.steps import StandIn, SuspendedStep

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    image: Tensor
    scale: float


def _batch() -> dict[str, Any]:
    return {
        "pair": Pair(torch.arange(12).reshape(6, 2), torch.arange(6)),
        "names": list("abcdef"),
        "boxes": [torch.zeros(k + 1, 4) for k in range(5)] + [torch.zeros(2, 4)],
        "sample": Sample(torch.arange(6.0), 0.5),
        "weights": torch.ones(3),
        "step": 7,
    }


def test_a_batch_is_cut_by_its_samples_and_the_rest_is_repeated() -> None:
    batch = _batch()
    assert count_samples(batch) == 6
    part = cut(batch, 6, 1, 3)
    assert part["pair"].x.tolist() == [[2, 3], [4, 5]]
    assert isinstance(part["pair"], Pair)
    assert part["names"] == ["b", "c"]
    assert [len(box) for box in part["boxes"]] == [2, 3]
    assert part["sample"].image.tolist() == [1.0, 2.0]
    assert part["weights"].shape == (3,)
    assert part["step"] == 7


def test_cuts_join_to_the_batch_again() -> None:
    batch = _batch()
    parts = [cut(batch, 6, start, stop) for start, stop in ((0, 4), (4, 6))]
    joined = join([{k: part[k] for k in ("pair", "names")} for part in parts], (4, 2))
    assert joined["pair"].x.equal(batch["pair"].x)
    assert joined["names"] == batch["names"]


def test_numbers_join_to_their_mean_by_weight() -> None:
    assert join([1.0, 4.0], (4, 2)) == pytest.approx(2.0)
    torch.testing.assert_close(join([torch.tensor(1.0), torch.tensor(4.0)], (4, 2)), torch.tensor(2.0))


def test_calls_of_one_key_twice_in_a_step_stay_two() -> None:
    calls = [[LogCall("a", 1.0), LogCall("a", 10.0)], [LogCall("a", 4.0), LogCall("a", 40.0)]]
    first, second = merge(calls, (4, 2))
    assert float(first.value) == pytest.approx(2.0)
    assert float(second.value) == pytest.approx(20.0)
    assert first.options["batch_size"] == 6


def test_suspended_steps_finish_in_any_order() -> None:
    net = nn.Linear(2, 2)
    stand_in = StandIn(net, "net")
    stand_in.install()
    steps = [SuspendedStep(stand_in, lambda k=k: net(torch.tensor(float(k))) * 10, "step") for k in range(3)]
    inputs = [float(step.start().args[0]) for step in steps]
    assert inputs == [0.0, 1.0, 2.0]
    assert [steps[k].finish(torch.tensor(k + 0.5)).item() for k in (2, 0, 1)] == [25.0, 5.0, 15.0]
    stand_in.remove()
    assert net(torch.zeros(2)).shape == (2,)


def test_an_abandoned_step_runs_its_finally_blocks() -> None:
    net = nn.Linear(2, 2)
    stand_in = StandIn(net, "net")
    stand_in.install()
    left: list[bool] = []

    def step() -> None:
        try:
            net(torch.zeros(2))
        finally:
            left.append(True)

    suspended = SuspendedStep(stand_in, step, "step")
    suspended.start()
    suspended.abandon()
    assert left == [True]


def test_a_module_call_under_another_autocast_is_refused() -> None:
    net = nn.Linear(2, 2)
    stand_in = StandIn(net, "net")
    stand_in.install()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            net(torch.zeros(2))

    suspended = SuspendedStep(stand_in, step, "step")
    with pytest.raises(StepError, match=r"another grad mode or autocast.*use Trainer\(precision="):
        suspended.start()
    suspended.abandon()
    assert not torch.is_autocast_enabled("cpu")


def test_a_module_call_outside_of_a_step_names_its_place() -> None:
    net = nn.Linear(2, 2)
    StandIn(net, "net").install()
    with pytest.raises(StepError, match=r"net was called at .*test_rooms.py:\d+, outside of a"):
        net(torch.zeros(2))


def test_a_stash_puts_gradients_past_zero_grad_and_follows_whoever_scales_the_loss() -> None:
    weight = nn.Parameter(torch.tensor(3.0))
    weight.grad = torch.tensor(1.0)
    stash = Stash([weight])
    with stash.collect(free_previous=False):
        (weight * 2 / 4).backward()
    assert weight.grad.item() == 1.0
    weight.grad = None
    loss = stash.as_loss(torch.tensor(6.0), expected=0.25)
    assert loss.item() == 6.0
    (loss / 4 * 3).backward()  # accumulation of 4, and a user who scales by 3
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(1.5)


class _Parts(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(4, 100)


def test_the_pipelined_module_is_the_child_that_holds_nearly_all() -> None:
    module = _Parts(nn.Linear(200, 200))
    assert find_pipelined(module, "auto") == ("body", module.body)
    assert find_pipelined(module, "head") == ("head", module.head)


def test_without_such_a_child_the_module_needs_a_forward() -> None:
    with pytest.raises(GraphError, match=r"no child that holds 95% of the parameters \(head .*body .*\)"):
        find_pipelined(_Parts(nn.Linear(20, 20)), "auto")


@pytest.mark.parametrize("order", ["before", "after"])
def test_names_are_registered_in_both_namespaces_without_importing_them(order: str) -> None:
    lightnings = "import lightning.pytorch, pytorch_lightning"
    lines = (
        ["import lightning_hetpipe", lightnings]
        if order == "before"
        else [lightnings, "import lightning_hetpipe"]
    )
    script = "\n".join(
        [
            "import sys",
            *lines[:1],
            "assert 'torch' not in sys.modules" if order == "before" else "",
            *lines[1:],
            "for space in (lightning.pytorch, pytorch_lightning):",
            "    known = space.strategies.StrategyRegistry.available_strategies()",
            "    assert {'hetpipe', 'hetpipe_fork', 'hetpipe_spawn', 'hetpipe_notebook'} <= set(known)",
            "    strategy = space.Trainer(strategy='hetpipe', accelerator='cpu', logger=False).strategy",
            "    assert isinstance(strategy, space.strategies.Strategy)",
        ]
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100, capture_output=True)
