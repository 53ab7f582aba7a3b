"""What conversion keeps, what it refuses, GroupNorm and frozen layers."""

import copy
import math
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import lightning_hetpipe as hp
from lightning_hetpipe.errors import NormError
from lightning_hetpipe.stage.norm import convert_norm, group_count, small_batch_advice

POLICIES = ["keep", "deferred", "sync", "group", "freeze"]


def net() -> nn.Module:
    torch.manual_seed(0)
    shared = nn.BatchNorm2d(8)
    stem = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 8, 3), bn=shared, again=shared))
    module = nn.Sequential(OrderedDict(stem=stem, flat=nn.Flatten(), head=nn.BatchNorm1d(32)))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("policy", POLICIES)
def test_conversion_keeps_objects_names_parameters_hooks_flags_and_types(policy: str) -> None:
    module = net().double()
    module.stem.bn.eval()
    module.stem.bn.weight.requires_grad_(False)
    calls = []
    module.head.register_forward_hook(lambda *_: calls.append("hook"))
    ids = {name: id(layer) for name, layer in module.named_modules(remove_duplicate=False)}
    parameters = {name: id(parameter) for name, parameter in module.named_parameters()}
    assert hp.convert_norm(module, policy) is module
    assert {name: id(layer) for name, layer in module.named_modules(remove_duplicate=False)} == ids
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == parameters
    assert not module.stem.bn.training
    assert module.head.training
    assert not module.stem.bn.weight.requires_grad
    module(torch.randn(4, 3, 4, 4, dtype=torch.float64)).sum().backward()
    assert calls == ["hook"]


@pytest.mark.parametrize("policy", ["keep", "deferred", "sync", "freeze"])
def test_state_dicts_load_both_ways_between_policies_and_batchnorm(policy: str) -> None:
    plain, converted = net(), convert_norm(net(), policy)
    converted.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(converted.state_dict(), strict=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_converted_layers_survive_deepcopy(policy: str) -> None:
    module = convert_norm(net(), policy).eval()
    inputs = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(copy.deepcopy(module)(inputs), module(inputs), rtol=0, atol=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tracer_with_batchnorm_leaves_sees_the_same_graph_under_every_policy(policy: str) -> None:
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return isinstance(m, nn.modules.batchnorm._BatchNorm) or super().is_leaf_module(m, name)

    def nodes(module: nn.Module) -> list[str]:
        return [f"{node.op} {node.target}" for node in Tracer().trace(module).nodes]

    assert nodes(convert_norm(net(), policy)) == nodes(net())


def test_a_graph_traced_before_conversion_follows_it() -> None:
    module = net()
    traced = fx.symbolic_trace(module)
    convert_norm(module, "group")
    inputs = torch.randn(4, 3, 4, 4)
    torch.testing.assert_close(traced(inputs[:1]), traced(inputs)[:1])


def test_keep_turns_converted_layers_back() -> None:
    for policy in ("deferred", "sync", "freeze"):
        module = convert_norm(convert_norm(net(), policy), "keep")
        assert type(module.stem.bn) is nn.BatchNorm2d
        assert set(vars(module.stem.bn)) == set(vars(net().stem.bn))


def test_the_root_may_be_a_batchnorm() -> None:
    root = nn.BatchNorm1d(64)
    assert convert_norm(root, "group") is root
    assert type(root) is nn.GroupNorm


class Activated(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("layer", "policy", "match"),
    [
        (nn.BatchNorm2d(4), "defered", "norm='defered' is no policy; choose one of keep, deferred"),
        (nn.LazyBatchNorm2d(), "keep", "LazyBatchNorm2d 'deep.bn' has no parameters yet"),
        (nn.SyncBatchNorm(4), "keep", "SyncBatchNorm 'deep.bn' shares statistics with all ranks"),
        (nn.SyncBatchNorm(4), "sync", "choose norm='sync'"),
        (Activated(4), "group", "Activated 'deep.bn' is a subclass of BatchNorm"),
        (nn.BatchNorm2d(4, track_running_stats=False), "deferred", "tracks no running statistics"),
        (nn.BatchNorm2d(4, track_running_stats=False), "freeze", "tracks no running statistics"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_converted_is_named_and_nothing_is_changed(
    layer: nn.Module, policy: str, match: str
) -> None:
    first = nn.BatchNorm2d(4)
    module = nn.ModuleDict({"first": first, "deep": nn.Sequential(OrderedDict(bn=layer))})
    with pytest.raises(NormError, match=match):
        convert_norm(module, policy)
    assert type(first) is nn.BatchNorm2d


def test_keep_leaves_subclasses_alone() -> None:
    assert type(convert_norm(Activated(4), "keep")) is Activated


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_layer_converts_after_its_first_forward() -> None:
    layer = nn.LazyBatchNorm2d()
    layer(torch.randn(2, 4, 2, 2))
    assert isinstance(convert_norm(layer, "deferred"), nn.BatchNorm2d)


@given(
    channels=st.integers(1, 256),
    fractions=st.lists(st.floats(0, 1), max_size=3),
    unit=st.sampled_from([1, 2, 4, 8]),
)
def test_group_count_is_the_largest_aligned_divisor_up_to_32(
    channels: int, fractions: list[float], unit: int
) -> None:
    cuts = [round(fraction * channels) // unit * unit for fraction in fractions]
    fitting = [
        groups
        for groups in range(1, 33)
        if channels % groups == 0 and all(cut % (channels // groups) == 0 for cut in cuts)
    ]
    if fitting:
        assert group_count(channels, cuts) == max(fitting)
    else:
        with pytest.raises(NormError, match="move the cuts to multiples"):
            group_count(channels, cuts)


def test_groups_end_at_the_channel_cuts() -> None:
    module = convert_norm(nn.Sequential(nn.BatchNorm2d(96)), "group", cuts={"0": (36, 72)})
    assert module[0].num_groups == 32
    module = convert_norm(nn.Sequential(nn.BatchNorm2d(96)), "group", cuts={"0": (40,)})
    assert module[0].num_groups == 24


def test_cuts_that_no_group_fits_name_the_layer() -> None:
    with pytest.raises(NormError, match=r"0: 64 channels cut at \[1\]"):
        convert_norm(nn.Sequential(nn.BatchNorm2d(64)), "group", cuts={"0": (1,)})


def test_cuts_of_unknown_layers_are_refused() -> None:
    with pytest.raises(NormError, match="cuts name no module: bn1"):
        convert_norm(nn.Sequential(nn.BatchNorm2d(64)), "group", cuts={"bn1": (32,)})


@pytest.mark.parametrize("slices", [[6], [1] * 6, [4, 2], [1, 5]])
def test_groupnorm_is_exact_under_any_micro_batching(slices: list[int]) -> None:
    module = convert_norm(net().double(), "group")
    inputs = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    results = []
    for sizes in ([6], slices):
        module.zero_grad()
        outputs = [module(part) for part in inputs.split(sizes)]
        for output in outputs:
            output.sin().sum().backward()
        results.append((torch.cat(outputs), *(parameter.grad.clone() for parameter in module.parameters())))
    for whole, sliced in zip(*results, strict=True):
        torch.testing.assert_close(sliced, whole, rtol=1e-12, atol=1e-12)


def test_groupnorm_keeps_the_affine_parameters_and_drops_the_running_statistics() -> None:
    layer = nn.BatchNorm2d(64, eps=1e-3)
    nn.init.normal_(layer.weight)
    expected = nn.GroupNorm(32, 64, eps=1e-3)
    expected.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    convert_norm(layer, "group")
    assert repr(layer) == repr(expected)
    assert set(vars(layer)) == set(vars(expected))
    inputs = torch.randn(2, 64, 3, 3)
    torch.testing.assert_close(layer(inputs), expected(inputs), rtol=0, atol=0)
    layer.load_state_dict(expected.state_dict(), strict=True)


@pytest.mark.parametrize(("channels", "groups"), [(8, 1), (32, 2), (64, 4), (1024, 32), (33, 1)])
def test_groups_of_a_batchnorm1d_hold_16_channels_so_that_one_value_per_channel_is_enough(
    channels: int, groups: int
) -> None:
    layer = convert_norm(nn.BatchNorm1d(channels), "group")
    assert layer.num_groups == groups
    assert layer(torch.randn(3, channels)).std() > 0.5
    assert math.isclose(layer(torch.randn(3, channels, 5)).mean().item(), 0, abs_tol=1e-5)


def test_frozen_layers_use_running_statistics_whatever_the_mode() -> None:
    plain = nn.BatchNorm2d(4)
    for _ in range(3):
        plain(3 + 2 * torch.randn(8, 4, 3, 3))
    frozen = convert_norm(copy.deepcopy(plain), "freeze").train()
    inputs = torch.randn(2, 4, 3, 3)
    output = frozen(inputs)
    torch.testing.assert_close(output, plain.eval()(inputs), rtol=0, atol=0)
    output.sum().backward()
    assert frozen.weight.grad is not None
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(frozen.state_dict()[name], value, rtol=0, atol=0)


def test_advice_names_the_layers_the_samples_and_the_policies() -> None:
    advice = small_batch_advice(net(), 4)
    assert advice is not None
    assert advice.startswith(
        "2 BatchNorm layer(s) (stem.bn, head) normalise by the statistics of 4 sample(s)"
    )
    for policy in ("group", "freeze", "deferred"):
        assert f"norm='{policy}'" in advice


@pytest.mark.parametrize(
    ("module", "samples"),
    [
        (net(), 16),
        (net().eval(), 2),
        (convert_norm(net(), "freeze"), 2),
        (convert_norm(net(), "group"), 2),
        (nn.Linear(2, 2), 1),
    ],
)
def test_there_is_no_advice_where_no_layer_sees_few_samples(module: nn.Module, samples: int) -> None:
    assert small_batch_advice(module, samples) is None
