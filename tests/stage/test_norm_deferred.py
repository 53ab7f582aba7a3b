"""Deferred BatchNorm against torch's, which sees the batch at once."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_hetpipe.errors import NormError
from lightning_hetpipe.stage.batchnorm import DeferredBatchNorm2d, commit_all, paused_statistics
from lightning_hetpipe.stage.norm import convert_norm
from tests.helpers.ranks import run_ranks

SHAPES = {1: (), 2: (3, 2), 3: (2, 1, 2)}
KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def twins(axes: int, **options: object) -> tuple[nn.Module, nn.Module]:
    """A torch BatchNorm of 4 channels in fp64, and its deferred copy."""
    layer = KINDS[axes](4, dtype=torch.float64, **options)
    return layer, convert_norm(copy.deepcopy(layer), "deferred")


def buffers_agree(left: nn.Module, right: nn.Module, tolerance: float = 1e-10) -> None:
    assert left.state_dict().keys() == right.state_dict().keys()
    for name, value in left.state_dict().items():
        torch.testing.assert_close(right.state_dict()[name], value, rtol=tolerance, atol=tolerance)


def batch(n: int, axes: int, seed: int, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return offset + torch.randn(n, 4, *SHAPES[axes], generator=generator, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(
        st.lists(st.integers(1, 5), min_size=1, max_size=6).filter(lambda s: sum(s) > 1),
        min_size=1,
        max_size=3,
    ),
    axes=st.sampled_from([1, 2, 3]),
    momentum=st.sampled_from([0.1, 0.7, None]),
    offset=st.sampled_from([0.0, 1e3]),
    seed=st.integers(0, 2**16),
)
def test_after_commit_the_buffers_are_those_of_the_full_batch_for_any_slicing(
    batches: list[list[int]], axes: int, momentum: float | None, offset: float, seed: int
) -> None:
    whole, deferred = twins(axes, momentum=momentum)
    for step, slices in enumerate(batches):
        inputs = batch(sum(slices), axes, seed + step, offset)
        whole(inputs)
        for part in inputs.split(slices):
            deferred(part)
        deferred.commit()
        buffers_agree(whole, deferred)
    assert deferred.num_batches_tracked == len(batches)


@settings(max_examples=30, deadline=None)
@given(
    slices=st.lists(st.integers(2, 5), min_size=1, max_size=4),
    axes=st.sampled_from([1, 2, 3]),
    affine=st.booleans(),
)
def test_outputs_and_gradients_are_those_of_torch_on_each_micro_batch(
    slices: list[int], axes: int, affine: bool
) -> None:
    plain, deferred = twins(axes, affine=affine)
    for part in batch(sum(slices), axes, 3).split(slices):
        inputs = [part.clone().requires_grad_() for _ in range(2)]
        outputs = [layer(x) for layer, x in zip((plain, deferred), inputs, strict=True)]
        for output in outputs:
            output.square().sum().backward()
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=0, atol=0)
    for ours, torchs in zip(deferred.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, torchs.grad, rtol=0, atol=0)


def test_large_offsets_do_not_cancel_the_variance() -> None:
    _, deferred = twins(2)
    inputs = batch(12, 2, 0, offset=1e6)
    for part in inputs.split(5):
        deferred(part)
    deferred.commit()
    variance = inputs.transpose(0, 1).flatten(1).var(1)
    torch.testing.assert_close(deferred.running_var, 0.9 + 0.1 * variance, rtol=1e-9, atol=0)


def test_nothing_reaches_the_buffers_or_the_state_dict_before_commit() -> None:
    plain, deferred = twins(2)
    deferred(batch(4, 2, 0))
    buffers_agree(plain, deferred, tolerance=0)


def test_a_commit_without_a_forward_changes_nothing() -> None:
    plain, deferred = twins(2)
    deferred.commit()
    buffers_agree(plain, deferred, tolerance=0)


def test_eval_is_plain_batchnorm_and_records_nothing() -> None:
    plain, deferred = twins(2)
    inputs = batch(4, 2, 0)
    torch.testing.assert_close(deferred.eval()(inputs), plain.eval()(inputs), rtol=0, atol=0)
    assert deferred.pending is None


def test_a_micro_batch_without_samples_passes_through_and_counts_nothing() -> None:
    whole, deferred = twins(2)
    inputs = batch(4, 2, 0)
    whole(inputs)
    assert deferred(inputs[:0].requires_grad_()).shape == (0, 4, 3, 2)
    deferred(inputs)
    deferred.commit()
    buffers_agree(whole, deferred)


def test_a_whole_batch_of_one_value_per_channel_is_refused_at_commit() -> None:
    _, deferred = twins(1)
    deferred(batch(1, 1, 0))
    with pytest.raises(
        NormError, match=r"DeferredBatchNorm1d\(4\) saw a whole batch with one value per channel"
    ):
        deferred.commit()


def test_a_recomputed_forward_is_recorded_once() -> None:
    whole, deferred = twins(2)
    inputs = batch(6, 2, 0)
    whole(inputs)
    for part in inputs.split(4):
        checkpoint(deferred, part.requires_grad_(), use_reentrant=False).sum().backward()
    deferred.commit()
    buffers_agree(whole, deferred)


def test_paused_statistics_record_nothing_and_resume_after() -> None:
    whole, deferred = twins(2)
    inputs = batch(6, 2, 0)
    with paused_statistics(deferred):
        deferred(inputs + 1)
    deferred(inputs)
    whole(inputs)
    deferred.commit()
    buffers_agree(whole, deferred)


def test_half_precision_inputs_keep_float32_statistics() -> None:
    layer = nn.BatchNorm2d(4)
    deferred = convert_norm(copy.deepcopy(layer), "deferred")
    inputs = batch(8, 2, 0).bfloat16()
    layer(inputs)
    for part in inputs.split(3):
        assert deferred(part).dtype is torch.bfloat16
    deferred.commit()
    buffers_agree(layer, deferred, tolerance=1e-5)


def test_fake_tensors_leave_the_real_layer_alone() -> None:
    plain, deferred = twins(2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = mode.from_tensor(batch(4, 2, 0))
        assert deferred(inputs).shape == (4, 4, 3, 2)
    assert deferred.pending is None
    buffers_agree(plain, deferred, tolerance=0)


def test_meta_layers_run_and_are_passed_over_by_commit() -> None:
    deferred = convert_norm(nn.BatchNorm2d(4, device="meta"), "deferred")
    assert deferred(torch.empty(2, 4, 3, 3, device="meta")).is_meta
    commit_all(deferred)
    assert deferred.pending is None


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_and_pickles_carry_what_is_pending(clone: object) -> None:
    whole, deferred = twins(2)
    inputs = batch(4, 2, 0)
    whole(inputs)
    deferred(inputs)
    other = clone(deferred)
    assert type(other) is DeferredBatchNorm2d
    other.commit()
    buffers_agree(whole, other)


def test_reset_running_stats_forgets_what_is_pending() -> None:
    _, deferred = twins(2)
    deferred(batch(4, 2, 0))
    deferred.reset_running_stats()
    assert deferred.pending is None


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(24))
    return layers.double()


def _commit_shares(rank: int, shares: list[list[int]]) -> dict[str, Tensor]:
    import torch.distributed as dist

    module = convert_norm(net(), "deferred")
    for step, share in enumerate(shares):
        mine = batch(sum(share), 2, step).split(share)[rank]
        for part in mine.split(2):
            for layer in module if len(mine) else []:
                part = layer(part)
        commit_all(module, dist.group.WORLD)
    return module.state_dict()


def test_members_commit_the_statistics_of_all_of_them_with_uneven_and_empty_shares() -> None:
    shares = [[3, 4, 1], [2, 0, 5], [0, 0, 4]]
    states = run_ranks(3, _commit_shares, shares)
    whole = convert_norm(net(), "deferred")
    for step, share in enumerate(shares):
        for mine in batch(sum(share), 2, step).split(share):
            for part in mine.split(2):
                whole(part)
        commit_all(whole)
    for state in states:
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)
