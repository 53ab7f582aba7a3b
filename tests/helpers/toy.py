"""A four-layer model written out by hand: in-place start, a skip, a tied weight, a trainable head.

reader ──x──► L0 ──a──► L1 ──b──► L2 ──c──► L3 ──► y
               └──────────── s ───────────►┘        L0 and L3 share a weight
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.graph import READER, Layer, LayerGraph, Value

WIDTH = 6


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


GRAPH = LayerGraph(
    tuple(Layer(f"layer{i}", "Toy") for i in range(4)),
    (
        Value("x", READER, (0,), 8.0 * WIDTH),
        Value("a", 0, (1,), 8.0 * WIDTH),
        Value("s", 0, (3,), 8.0 * WIDTH),
        Value("b", 1, (2,), 8.0 * WIDTH),
        Value("c", 2, (3,), 8.0 * WIDTH),
        Value("y", 3, (), 8.0 * WIDTH, output=True),
    ),
    input_names=("x",),
)


class Toy(nn.Module):
    """The whole model, equal for equal seeds."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.head = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / WIDTH**0.5) for _ in range(3)]
        )

    def layer(self, index: int, env: dict[str, Tensor]) -> None:
        w = self.weights
        if index == 0:
            env["a"] = env["x"] @ w[0]
            env["s"] = torch.tanh(env["a"])
        elif index == 1:
            env["b"] = torch.relu_(env["a"]) @ w[1]
        elif index == 2:
            env["c"] = torch.sigmoid(env["b"]) @ w[2]
        else:
            env["y"] = (env["c"] + env["s"]) @ w[0].t()

    def forward(self, x: Tensor) -> Tensor:
        env = {"x": x}
        for index in range(4):
            self.layer(index, env)
        return env["y"]


class ToyStage:
    """Layers ``start`` to ``stop - 1`` of a toy."""

    def __init__(self, toy: Toy, start: int, stop: int) -> None:
        self.toy, self.start, self.stop = toy, start, stop

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        env = dict(values)
        for index in range(self.start, self.stop):
            self.toy.layer(index, env)
        return {name: value for name, value in env.items() if name not in values}

    def output(self, values: Mapping[str, Tensor]) -> Any:
        return values["y"]


def specs(size: int, dtype: torch.dtype = torch.float64, head: bool = False) -> dict[str, Spec]:
    """All values of a micro-batch of so many samples."""
    return {name: Spec((size, WIDTH), dtype, name != "x" or head) for name in "xasbcy"}


class ToyReader:
    """The step: a trainable head, the module, and a loss that also looks at the head's output."""

    def __init__(self, toy: Toy, batch: Tensor, sizes: tuple[int, ...], head: bool) -> None:
        self.toy, self.slices, self.head = toy, batch.split(sizes), head
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def start(self, m: int) -> dict[str, Tensor]:
        x = self.slices[m]
        self.inputs[m] = self.toy.head(x) if self.head else x
        return {"x": self.inputs[m]}

    def finish(self, m: int, output: Any) -> Tensor:
        self.outputs[m] = output
        return loss_of(output, self.inputs[m])

    def backward(self, m: int, grads: Mapping[str, Tensor]) -> None:
        self.inputs.pop(m).backward(grads["x"])


def loss_of(output: Tensor, inside: Tensor) -> Tensor:
    return (output.square() + 0.1 * inside.square()).mean()


def reference(batch: Tensor, sizes: tuple[int, ...], head: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and gradients on one device with the same slices."""
    toy = Toy(batch.dtype)
    losses = []
    for part in batch.split(sizes):
        x = toy.head(part) if head else part
        loss = loss_of(toy(x), x)
        (loss * (len(part) / len(batch))).backward()
        losses.append(loss.detach())
    return losses, {name: p.grad for name, p in toy.named_parameters() if p.grad is not None}
