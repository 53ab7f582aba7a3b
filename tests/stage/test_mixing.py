"""Layers that let samples influence each other are found; those that do not are left in peace."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.stage.mixing import mixing_layer
from lightning_hetpipe.tracing import TensorSpec, trace
from tests.helpers.models import Encoder
from tests.helpers.zoo import network, pictures


class Mixer(nn.Module):
    """A layer, an operation, and a layer."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.operation = nn.Linear(6, 6), nn.Linear(6, 6), operation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.operation(self.first(x)))
        return out


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "mean of all": lambda x: x / x.mean(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "pairs": lambda x: x.view(-1, 2, 6).sum(1, keepdim=True).expand(-1, 2, 6).reshape(-1, 6),
    "columns": lambda x: x.reshape(6, -1).transpose(0, 1),
    "product": lambda x: torch.softmax(x @ x.transpose(0, 1), 1) @ x,
    "softmax": lambda x: x.softmax(0),
    "cumulated": lambda x: x.cumsum(0),
    "largest": lambda x: x - x.amax(0, keepdim=True),
    "first": lambda x: x + x[:1],
    "sorted": lambda x: x.sort(0)[0],
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "flip": lambda x: x.flip(1),
    "flattened and back": lambda x: torch.tanh(x.reshape(-1, 3)).reshape(-1, 6),
    "time first": lambda x: x.view(-1, 2, 3).transpose(0, 1).softmax(0).transpose(0, 1).reshape(-1, 6),
    "dropped": lambda x: nn.functional.dropout(x, 0.5, True),
}


def _layer(net: nn.Module, x: Tensor) -> str | None:
    traced = trace(net, (x,), {})
    inputs = traced.bind((x,), {})
    shapes = traced.shapes({name: TensorSpec.of(value) for name, value in inputs.items()})
    axes = {name: 0 for name, spec in shapes.items() if spec.shape[:1] == (8,)}
    return mixing_layer(traced, 0, len(traced.graph), inputs, axes)


@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_mixes_samples_is_found(name: str):
    torch.manual_seed(1)
    assert _layer(Mixer(MIXING[name]), torch.randn(8, 6)) is not None


@pytest.mark.parametrize("name", APART)
def test_a_layer_that_keeps_samples_apart_passes(name: str):
    torch.manual_seed(1)
    assert _layer(Mixer(APART[name]), torch.randn(8, 6)) is None


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "efficientnet_b0", "vit", "encoder"])
def test_networks_that_keep_samples_apart_pass_and_stay_as_they_are(name: str):
    torch.manual_seed(1)
    if name == "encoder":
        net, x = Encoder(), torch.randint(0, 11, (8, 5))
    else:
        net, x = network(name), pictures(name)(8)[0].double()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    drawn = torch.get_rng_state()
    assert _layer(net, x) is None
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(layer.training for layer in net.modules())
