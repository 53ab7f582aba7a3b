"""What people write in a forward: in-place changes, skips, sizes, modes, masks, tied weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hetpipe.graph import READER
from lightning_hetpipe.tracing import TensorSpec, trace
from tests.helpers.models import DenseSkips, Encoder, Tied
from tests.helpers.staged import assert_parity


def vectors(n: int = 4, width: int = 6) -> tuple[Tensor]:
    return (torch.randn(n, width, dtype=torch.float64),)


class Two(nn.Module):
    """Two linear layers with some code between them."""

    def __init__(self, between: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.relu = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.linspace(1, 2, 6))
        self.register_buffer("offset", torch.linspace(0, 1, 6))
        self.constant = torch.linspace(2, 3, 6, dtype=torch.float64)
        self.between = between

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(self.first(x), self))


def inplace_relu_with_skip(x: Tensor, m: Any) -> Tensor:
    y = m.relu(x)
    return y + x  # x was changed too


def other_name_sees_the_change(x: Tensor, m: Any) -> Tensor:
    alias = x
    x += m.scale
    return alias * 2


def view_sees_the_change(x: Tensor, m: Any) -> Tensor:
    view = x.view(-1, 3)
    kept = view + 1
    x *= 2
    return torch.cat([view.view(-1, 6), kept.view(-1, 6)], 0).view(2, -1, 6).sum(0)


def assigned_items(x: Tensor, m: Any) -> Tensor:
    x = x * 1
    x[:, :2] = 0
    x[:, 3] = x[:, 4]
    return torch.tanh(x) + x


def relu_of_a_view(x: Tensor, m: Any) -> Tensor:
    return F.relu_((x * 2).view(-1, 2, 3)).reshape(-1, 6)


def shape_used_later(x: Tensor, m: Any) -> Tensor:
    n, width = x.shape
    x = torch.tanh(m.norm(x).view(n, 2, width // 2)).transpose(1, 2)
    return x.reshape(n, width)


def sizes_as_a_tuple(x: Tensor, m: Any) -> Tensor:
    size = x.shape
    x = torch.tanh(x.flatten()) * 2
    return torch.sigmoid(x).view(size)


def positions_made_from_sizes(x: Tensor, m: Any) -> Tensor:
    n, width = x.size()
    assert width <= 6, "too wide"
    positions = torch.arange(width, dtype=x.dtype, device=x.device)
    mask = torch.ones(n, width, dtype=x.dtype)
    return (x + positions) * mask


def chunks_in_a_loop(x: Tensor, m: Any) -> Tensor:
    parts = [torch.tanh(part) * (index + 1) for index, part in enumerate(x.chunk(3, dim=1))]
    return torch.cat(parts[::-1], dim=len(x.shape) - 1)


def branch_on_dimensions(x: Tensor, m: Any) -> Tensor:
    if x.dim() == 2 and x.shape[-1] == 6 and x.dtype.is_floating_point:
        return x * m.scale
    raise ValueError("unexpected")


def attributes_of_each_kind(x: Tensor, m: Any) -> Tensor:
    return torch.tanh(x * m.scale + m.offset) + m.constant + torch.linspace(0, 1, 6, dtype=torch.float64)


def without_gradient(x: Tensor, m: Any) -> Tensor:
    with torch.no_grad():
        y = torch.tanh(m.first(x))
        z = y * 2
    return x * z + y.detach()


def functional_dropout(x: Tensor, m: Any) -> Tensor:
    return F.dropout(F.dropout(x, 0.5, training=m.training), 0.3, m.training, False)


def noise_each_time(x: Tensor, m: Any) -> Tensor:
    return x + torch.randn(6, dtype=torch.float64) + torch.randn_like(x)


def norm_called_twice(x: Tensor, m: Any) -> Tensor:
    return m.norm(torch.tanh(m.norm(x)))


def buffer_updated_by_hand(x: Tensor, m: Any) -> Tensor:
    m.offset.mul_(0.9).add_(x.detach().mean(0) * 0.1)
    return torch.tanh(x) * m.offset


def statistics_of_functional_norm(x: Tensor, m: Any) -> Tensor:
    return F.batch_norm(x, m.norm.running_mean, m.norm.running_var, m.scale, None, m.training)


def integer_path(x: Tensor, m: Any) -> Tensor:
    return x.gather(1, torch.tanh(x).argsort(1)) + (x > 0)


class Reversed(torch.autograd.Function):
    """Identity forward, negated backward: its own backward has to run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


def custom_backward(x: Tensor, m: Any) -> Tensor:
    return Reversed.apply(x * 2)  # type: ignore[no-any-return]


BETWEEN = [
    inplace_relu_with_skip, other_name_sees_the_change, view_sees_the_change, assigned_items, relu_of_a_view,
    shape_used_later, sizes_as_a_tuple, positions_made_from_sizes, chunks_in_a_loop, branch_on_dimensions,
    attributes_of_each_kind, without_gradient, functional_dropout, noise_each_time, norm_called_twice,
    buffer_updated_by_hand, statistics_of_functional_norm, integer_path, custom_backward,
]  # fmt: skip


@pytest.mark.parametrize("between", BETWEEN, ids=lambda function: function.__name__)
def test_construct_survives_every_cut(between: Callable[[Tensor, nn.Module], Tensor]) -> None:
    traced = assert_parity(lambda: Two(between), vectors(), partitions=[(0.5,), (0.25, 0.75)])
    assert len(traced.graph) >= 3


@pytest.mark.parametrize("between", [shape_used_later, sizes_as_a_tuple], ids=lambda f: f.__name__)
def test_a_size_crosses_cuts_as_the_shape_of_an_empty_tensor(between: Any) -> None:
    traced = trace(Two(between), (torch.randn(4, 6),), {})
    specs = traced.shapes({"x": TensorSpec((9, 6), torch.float32)})
    carried = [specs[value.name] for value in traced.graph.values if specs[value.name].size_bytes == 0]
    assert carried
    assert any(9 in spec.shape for spec in carried)


class Pair(NamedTuple):
    low: Tensor
    high: Tensor


class Nested(nn.Module):
    """Nested containers in and out, early outputs, an input that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, batch: dict[str, Any], *, factor: float = 1.0, flag: bool = True) -> dict[str, Any]:
        low = self.a(batch["x"][0]) * factor
        high = self.b(low if flag else batch["x"][1]) + batch["x"][1]
        return {
            "pair": Pair(low, self.c(high)), "input": batch["x"][0], "n": low.shape[0], "none": None,
            "list": [high, (low, 3)],
        }  # fmt: skip


@pytest.mark.parametrize("requires_grad", [False, True])
def test_containers_go_in_and_come_out_as_they_are(requires_grad: bool) -> None:
    x = [torch.randn(4, 6, dtype=torch.float64, requires_grad=requires_grad) for _ in range(2)]
    traced = assert_parity(Nested, ({"x": x},), {"factor": 2.0}, partitions=[(0.5,)])
    inputs = [value for value in traced.graph.values if value.producer == READER]
    assert [value.gradient for value in inputs] == [requires_grad, requires_grad]


class MaskedModel(nn.Module):
    """Tied words, torch's own encoder, a padding mask as second input."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
        x = self.encoder(self.words(tokens), mask=causal, src_key_padding_mask=padding)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
def test_an_encoder_with_mask_and_tied_words_is_cut_anywhere(norm_first: bool) -> None:
    tokens = torch.randint(0, 11, (3, 5))
    padding = torch.zeros(3, 5, dtype=torch.float64)
    padding[0, 3:] = -1e9
    traced = assert_parity(lambda: MaskedModel(norm_first), (tokens, padding), partitions=[(0.2, 0.6)])
    names = [layer.name for layer in traced.graph.layers]
    assert traced.graph.tied == ((names.index("words"), names.index("head")),)
    attention, mlp = names.index("encoder.layers.0.self_attn"), names.index("encoder.layers.0.linear1")
    assert attention < mlp
    for layer in traced.graph.tied[0]:
        assert "words.weight" in traced.parameters_of(layer, layer + 1)
    assert "head.weight" not in traced.parameters_of(0, len(names))


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.net(self.words(source), self.words(target))  # type: ignore[no-any-return]


def test_an_encoder_with_a_decoder_is_cut_anywhere() -> None:
    tokens = torch.randint(0, 11, (3, 5)), torch.randint(0, 11, (3, 4))
    traced = assert_parity(Seq2Seq, tokens, partitions=[(0.5,)], modes=(True,))
    assert len(traced.graph) > 15


@pytest.mark.parametrize("make", [DenseSkips, Encoder, Tied])
def test_small_models_are_cut_anywhere_in_both_modes(make: Callable[[], nn.Module]) -> None:
    args = (
        torch.randn(3, 3, 6, 6, dtype=torch.float64) if make is DenseSkips else torch.randint(0, 11, (3, 5)),
    )
    assert_parity(make, args, partitions=[(0.5,), (0.3, 0.6)])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        states, (last, _) = self.lstm(self.words(tokens))
        mixed, weights = self.attention(states, states, states)
        return self.head(mixed[:, -1] + last[-1]), weights


def test_modules_that_return_tuples_are_cut_anywhere() -> None:
    assert_parity(Recurrent, (torch.randint(0, 11, (3, 4)),), partitions=[(0.5,)])


class TwoFaced(nn.Module):
    """Returns logits and auxiliary logits in training, probabilities otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.aux = nn.Linear(6, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        logits = self.head(x)
        if self.training:
            return logits, self.aux(x)
        return torch.softmax(logits, -1)


def test_training_and_evaluation_may_return_different_things() -> None:
    assert_parity(TwoFaced, vectors(), partitions=[(0.5,), (0.9,)])


def freeze(*names: str) -> Callable[[nn.Module], object]:
    return lambda module: [module.get_parameter(name).requires_grad_(False) for name in names]


def test_no_gradient_flows_into_a_frozen_prefix() -> None:
    prepare = freeze("0.weight", "0.bias")
    make = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))  # noqa: E731
    traced = assert_parity(make, vectors(), modes=(True,), partitions=[(0.5,)], prepare=prepare)
    gradients = {value.name: value.gradient for value in traced.graph.values}
    assert gradients == {"input": False, "0": False, "1": False, "2": True, "3": True, "4": True}


def test_flags_that_change_after_tracing_change_the_gradients() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    traced = trace(module, (torch.randn(4, 6),), {})
    example = {"input": TensorSpec((4, 6), torch.float32)}
    graph = traced.with_gradients(example, traced.trainable - {"0.weight", "0.bias"})
    assert [value.gradient for value in graph.values] == [False, False, False, True]
    assert [value.gradient for value in traced.graph.values] == [False, True, True, True]
    wanted = {"input": TensorSpec((4, 6), torch.float32, requires_grad=True)}
    assert all(value.gradient for value in traced.with_gradients(wanted, ()).values)


def test_hooks_run_where_their_module_runs() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6))
    module[0].register_forward_hook(lambda module, args, output: output * 2)
    x = torch.randn(4, 6)
    traced = trace(module, (x,), {})
    assert [layer.name for layer in traced.graph.layers] == ["0", "1"]
    stage = traced.stage(0, 2)
    torch.testing.assert_close(stage.output(stage({"input": x})), module(x))
