"""Names, shapes, fingerprints, fallbacks and refusals."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from lightning_hetpipe.errors import GraphError
from lightning_hetpipe.tracing import TensorSpec, Traced, signature_of, trace
from tests.helpers.models import DenseSkips, Encoder, narrow_resnet


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype)


def mlp(width: int = 6) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Linear(width, 3)
    )


def traced_mlp() -> Traced:
    return trace(mlp(), (torch.randn(4, 6),), {})


def test_a_residual_block_is_cut_inside() -> None:
    graph = trace(narrow_resnet(), (torch.randn(2, 3, 32, 32),), {}).graph
    names = [layer.name for layer in graph.layers]
    assert names[4:11] == [
        "layer1.0.conv1", "layer1.0.bn1", "layer1.0.relu", "layer1.0.conv2", "layer1.0.bn2", "layer1.0.iadd",
        "layer1.0.relu_1",
    ]  # fmt: skip
    skip = graph.value("maxpool")
    assert (skip.producer, skip.consumers) == (3, (4, 9))
    (route, *_) = graph.routes((0, 6))[-1:]
    assert route.values == ("maxpool", "layer1.0.bn1")


def test_shapes_follow_the_batch_and_the_sequence() -> None:
    class Free(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, 8)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0) for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            x: Tensor = self.words(tokens)
            for layer in self.layers:
                x = layer(x)
            return x

    traced = trace(Free(), (torch.zeros(3, 5, dtype=torch.long),), {})
    shapes = traced.shapes({"tokens": spec(7, 9, dtype=torch.long)})
    assert {value.shape for name, value in shapes.items() if name != "tokens"} >= {(7, 9, 8), (7, 9, 16)}


def test_shapes_need_no_weights_and_move_nothing() -> None:
    module = narrow_resnet()
    traced = trace(module, (torch.randn(2, 3, 32, 32),), {})
    before = traced.shapes({"x": spec(3, 3, 32, 32)})
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            setattr(child, name, nn.Parameter(torch.empty_like(parameter, device="meta")))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    generator = torch.get_rng_state()
    after = traced.shapes({"x": spec(5, 3, 32, 32)})
    assert {name: value.shape[1:] for name, value in after.items()} == {
        name: value.shape[1:] for name, value in before.items()
    }
    assert all(torch.equal(buffers[name], buffer) for name, buffer in module.named_buffers())
    assert torch.equal(generator, torch.get_rng_state())


def test_autocast_decides_the_dtype_between_stages() -> None:
    traced = traced_mlp()
    inputs = {"input": spec(4, 6)}
    context = torch.autocast("cpu", torch.bfloat16)
    assert traced.shapes(inputs)["0"].dtype == torch.float32
    assert traced.shapes(inputs, context=context)["0"].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert traced.shapes(inputs)["0"].dtype == torch.bfloat16
        assert traced.stage(0, 1)({"input": torch.randn(4, 6)})["0"].dtype == torch.bfloat16


def test_shapes_work_in_inference_mode_and_claim_no_gradients_there() -> None:
    with torch.inference_mode():
        shapes = traced_mlp().shapes({"input": spec(2, 6)}, trainable=())
    assert not any(value.requires_grad for value in shapes.values())


def test_shapes_ask_for_every_input() -> None:
    with pytest.raises(GraphError, match=r"specs are given for \[\], but the inputs are \['input'\]"):
        traced_mlp().shapes({})


def test_an_operation_that_refuses_the_shape_is_named() -> None:
    with pytest.raises(GraphError, match=r"0 \(.*\) refuses inputs input\[4, 7\]"):
        traced_mlp().shapes({"input": spec(4, 7)})


def test_bytes_of_values_split_into_fixed_and_per_sample() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 8)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            positions = self.table(torch.arange(x.shape[1]))
            return self.head(x + positions)

    graph = trace(Positions(), (torch.randn(4, 5, 8),), {}).graph
    table = graph.value("table")
    assert (table.fixed_bytes, table.bytes_per_sample) == (5 * 8 * 4, 0)
    assert (graph.value("x").fixed_bytes, graph.value("x").bytes_per_sample) == (0, 5 * 8 * 4)


def test_costs_of_layers_are_counted_per_sample() -> None:
    graph = trace(mlp(10), (torch.randn(4, 6),), {}).graph
    layers = {layer.name: layer for layer in graph.layers}
    assert layers["0"].flops_per_sample == 2 * 6 * 10
    assert layers["0"].parameter_bytes == 4 * (6 * 10 + 10)
    assert layers["3"].flops_per_sample == 2 * 10 * 3
    # Nobody keeps what the ReLU changes in place; its result is kept by itself and by the next layer.
    assert {value.name: value.kept_by for value in graph.values} == {
        "input": (0,), "0": (1,), "1": (), "2": (2, 3), "3": ()
    }  # fmt: skip
    assert layers["2"].saved_bytes_per_sample == 0


def test_a_view_keeps_the_memory_that_it_looks_at() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)[:, 0])

    graph = trace(Picks(), (torch.randn(4, 5, 6),), {}).graph
    picked = graph.value("getitem")
    assert (picked.kept_by, picked.bytes_per_sample) == ((2,), 8 * 4)
    assert graph.layers[2].saved_bytes_per_sample == 4 * 8 * 4  # the other four of five rows


def test_fingerprints_tell_models_apart_but_not_batches() -> None:
    prints = {
        "same": [trace(mlp(), (torch.randn(n, 6),), {}).graph.fingerprint for n in (2, 2, 5)],
        "wider": [trace(mlp(7), (torch.randn(2, 6),), {}).graph.fingerprint],
        "double": [trace(mlp().double(), (torch.randn(2, 6).double(),), {}).graph.fingerprint],
        "other operation": [
            trace(nn.Sequential(*mlp()[:2], nn.Tanh(), mlp()[3]), (torch.randn(2, 6),), {}).graph.fingerprint
        ],
    }
    assert [len(set(found)) for found in prints.values()] == [1, 1, 1, 1]
    assert len({found[0] for found in prints.values()}) == 4


def test_a_constant_of_a_module_is_part_of_the_fingerprint() -> None:
    strides = [nn.Sequential(nn.Conv1d(1, 1, 3, padding=pad)) for pad in (0, 1)]
    first, second = (trace(module, (torch.randn(2, 1, 8),), {}).graph for module in strides)
    assert first.fingerprint != second.fingerprint


def test_two_traces_of_equal_models_are_equal() -> None:
    module = DenseSkips()
    args = (torch.randn(2, 3, 6, 6),)
    assert trace(module, args, {}).graph == trace(copy.deepcopy(module), args, {}).graph


def test_mode_hooks_and_moved_weights_stay_in_force() -> None:
    module = mlp()
    traced = trace(module, (torch.randn(4, 6),), {})
    stage = traced.stage(0, 4)
    x = torch.randn(4, 6)
    module.eval()
    module[0].weight = nn.Parameter(torch.zeros(6, 6))
    seen: list[str] = []
    module[3].register_forward_hook(lambda *_: seen.append("3"))
    torch.testing.assert_close(stage.output(stage({"input": x})), module(x))
    assert seen == ["3", "3"]
    assert not list(stage.parameters())


def test_only_the_last_stage_returns() -> None:
    stage = traced_mlp().stage(0, 2)
    with pytest.raises(GraphError, match="is not the last one"):
        stage.output({})


def test_a_stage_outside_the_model_is_refused() -> None:
    with pytest.raises(GraphError, match="layers 2 to 9 were asked for; the model has 0 to 4"):
        traced_mlp().stage(2, 9)


def test_parameters_and_buffers_belong_to_their_layers() -> None:
    traced = traced_mlp()
    assert traced.parameters_of(0, 2) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert traced.buffers_of(1, 2) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert traced.buffers_of(2, 4) == set()


class Branches(nn.Module):
    """Its path depends on what the tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.sum() > 0:
            x = -x
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Branches() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_path_that_depends_on_data_is_reported_with_line_and_remedy() -> None:
    with pytest.raises(
        GraphError, match=r"test_trace.py:\d+: .* content of a tensor \(blocks.0.gt\)"
    ) as error:
        trace(Outer(), (torch.randn(2, 6),), {})
    assert "blocks='blocks.0'" in str(error.value)


def test_a_construct_that_fx_cannot_follow_is_reported_with_line_and_remedy() -> None:
    class Lists(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor(sorted(x.tolist()))

    match = r"Sequential cannot be followed at .*test_trace.py:\d+ after '1.tolist': .*blocks='1'"
    with pytest.raises(GraphError, match=match):
        trace(nn.Sequential(nn.Linear(6, 6), Lists()), (torch.randn(2, 6),), {})


@pytest.mark.parametrize("blocks", ["blocks", "blocks.0, blocks.1,blocks.2"])
def test_named_blocks_stay_whole(blocks: str) -> None:
    module = Outer()
    traced = trace(module, (torch.randn(2, 6),), {}, blocks=blocks)
    assert [layer.name for layer in traced.graph.layers] == ["stem", "blocks.0", "blocks.1", "blocks.2"]
    first, last, x = traced.stage(0, 2), traced.stage(2, 4), torch.randn(2, 6)
    torch.testing.assert_close(last.output(last(first({"x": x}))), module(x))


def test_a_sequential_of_untraceable_items_is_kept_item_by_item() -> None:
    traced = trace(nn.Sequential(Branches(), Branches()), (torch.randn(2, 6),), {}, blocks=".")
    assert [layer.operation for layer in traced.graph.layers] == ["Branches", "Branches"]


class Doubles(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x)] * 2, 1)


def test_a_block_that_looks_at_its_data_has_to_keep_its_shape() -> None:
    with pytest.raises(GraphError, match=r"0 .* looks at its data .* keep a larger module whole"):
        trace(nn.Sequential(Doubles()), (torch.randn(2, 6),), {}, blocks="0")


def test_unknown_blocks_are_refused() -> None:
    with pytest.raises(GraphError, match="blocks='layers' is no module of Outer, which has stem, blocks"):
        trace(Outer(), (torch.randn(2, 6),), {}, blocks="layers")


def test_inputs_that_lead_elsewhere_are_refused() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x) if x.shape[1] > 4 else self.linear(x.repeat(1, 2, 1))

    traced = trace(Sized(), (torch.randn(2, 5, 6),), {})
    assert traced.shapes({"x": spec(2, 8, 6)})["linear"].shape == (2, 8, 6)
    with pytest.raises(GraphError, match=r"x\[2, 3, 6\] take another path .* was True and is now False"):
        traced.shapes({"x": spec(2, 3, 6)})


def test_a_forward_that_stores_tensors_on_itself_is_refused_and_cleaned() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            self.last = self.linear(x)
            return self.last * 2

    module = Remembers()
    with pytest.raises(GraphError, match="stores a tensor on the module as 'last'"):
        trace(module, (torch.randn(2, 6),), {})
    assert not hasattr(module, "last")
    assert module.training is True


def test_switching_autocast_inside_is_refused() -> None:
    class Switches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return x @ x

    with pytest.raises(GraphError, match=r"test_trace.py:\d+: the forward switches autocast"):
        trace(Switches(), (torch.randn(2, 2),), {})


def test_evaluation_with_other_weights_is_refused() -> None:
    class Swaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return self.a(x) if self.training else self.b(x)

    with pytest.raises(GraphError, match="evaluation takes another path than training and uses 'b'"):
        trace(Swaps(), (torch.randn(2, 6),), {})


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, factor: float = 1.0, mask: Tensor | None = None) -> Any:
        x = self.linear(x) * factor
        return x if mask is None else x * mask


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.ones(2, 6), 2.0), {}, r"argument factor was 1.0 .* and is now 2.0"),
        ((torch.ones(2, 6), 1.0, torch.ones(2, 6)), {}, r"argument mask was None .* and is now a tensor"),
        (([torch.ones(2, 6)],), {}, "call it the same way each time"),
        ((), {"x": torch.ones(2, 6), "y": 1}, "the call does not fit forward"),
    ],
)
def test_another_call_than_the_traced_one_is_refused(args: Any, kwargs: Any, message: str) -> None:
    traced = trace(Factor(), (torch.randn(2, 6),), {})
    with pytest.raises(GraphError, match=message):
        traced.bind(args, kwargs)


def test_positional_and_keyword_calls_bind_alike() -> None:
    traced = trace(Factor(), (torch.randn(2, 6),), {})
    x = torch.ones(3, 6)
    assert list(traced.bind((), {"x": x, "factor": 1.0})) == list(traced.bind((x,), {})) == ["x"]
    assert signature_of(traced.bind((x,), {})) == (("x", spec(3, 6)),)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((object(),), "argument x is a object; the pipelined module takes tensors"),
        ((1.0,), "Factor is called without any tensor"),
        ((torch.tensor(1.0),), r"the first input has shape \[\]: it has no batch"),
    ],
)
def test_examples_that_cannot_be_sent_are_refused(args: Any, message: str) -> None:
    module = nn.Identity() if args and isinstance(args[0], Tensor) else Factor()
    with pytest.raises(GraphError, match=message):
        trace(module, args, {})


def test_inputs_are_freed_after_their_last_use() -> None:
    held: list[bool] = []
    x = torch.randn(4, 6)
    reference = weakref.ref(x)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    traced = trace(module, (x,), {})
    module[1].register_forward_hook(lambda *_: held.append(reference() is not None))
    stage = traced.stage(0, 2)
    values = {"input": x}
    del x
    with torch.no_grad():
        run = stage._run(traced._root, values)
    assert list(run) == ["1"]
    assert held == [False]


def test_a_big_model_is_traced_with_its_real_names() -> None:
    module = resnet18(num_classes=3)
    graph = trace(module, (torch.randn(1, 3, 32, 32),), {}).graph
    used = {name for layer in graph.layers for name in layer.parameters}
    assert used == {name for name, _ in module.named_parameters()}


def test_own_encoder_model_has_separate_attention_and_mlp() -> None:
    graph = trace(Encoder(), (torch.zeros(2, 5, dtype=torch.long),), {}).graph
    names = [layer.name for layer in graph.layers]
    assert (
        names.index("layers.1.self_attn") + 3
        < names.index("layers.1.linear1")
        < names.index("layers.1.linear2")
    )
