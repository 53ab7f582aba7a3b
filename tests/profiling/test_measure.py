"""What measuring returns, and what it leaves alone. No test looks at how long anything takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.profiles import DeviceProfile
from lightning_hetpipe.profiling.measure import measure_device
from lightning_hetpipe.tracing import Traced, trace
from tests.helpers.models import narrow_resnet

X = torch.randn(3, 6)


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 2)
    )


def measure(traced: Traced, **options: object) -> DeviceProfile:
    return measure_device(traced, {"input": X}, (2, 5), "small", budget_s=0.0, **options)  # type: ignore[arg-type]


def test_every_layer_and_size_has_a_time() -> None:
    profile = measure(trace(model(), (X,), {}))
    assert profile.device == "small"
    assert profile.micro_batches == (2, 5)
    assert len(profile.forward_s) == len(profile.backward_s) == 5
    assert all(seconds > 0 for row in (*profile.forward_s, *profile.backward_s) for seconds in row)


def test_a_frozen_prefix_has_no_backward() -> None:
    module = model()
    module[0].requires_grad_(False)
    module[1].requires_grad_(False)
    profile = measure(trace(module, (X,), {}))
    assert [row[0] > 0 for row in profile.backward_s] == [False, False, False, False, True]


def test_buffers_gradients_and_random_state_are_left_alone() -> None:
    module = model()
    module[0].weight.grad = torch.ones(8, 6)
    traced = trace(module, (X,), {})
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    generator = torch.get_rng_state()
    measure(traced)
    assert all(torch.equal(before[name], buffer) for name, buffer in module.named_buffers())
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.equal(module[0].weight.grad, torch.ones(8, 6))
    assert module[4].weight.grad is None


def test_the_section_stretches_what_is_measured() -> None:
    @contextmanager
    def stretched() -> Iterator[None]:
        start_s = time.thread_time()
        yield
        time.sleep(9 * (time.thread_time() - start_s))

    traced = trace(narrow_resnet(), (torch.randn(2, 3, 32, 32),), {})
    inputs = {"x": torch.randn(2, 3, 32, 32)}
    plain = measure_device(traced, inputs, [2, 4], "cpu")
    slowed = measure_device(traced, inputs, [2, 4], "cpu", section=stretched)
    for column in range(2):
        totals = [sum(row[column] for row in (*each.forward_s, *each.backward_s)) for each in (plain, slowed)]
        assert totals[1] > 4 * totals[0]


def test_progress_is_reported_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    measure(trace(model(), (X,), {}), progress=lambda done, total: seen.append((done, total)))
    done, total = zip(*seen)
    assert list(done) == sorted(set(done))
    assert set(total) == {done[-1]}


def test_skips_are_measured_too() -> None:
    traced = trace(narrow_resnet(), (torch.randn(2, 3, 32, 32),), {})
    profile = measure_device(traced, {"x": torch.randn(2, 3, 32, 32)}, [4, 2, 4], "cpu", budget_s=0.0)
    assert profile.micro_batches == (2, 4)
    assert len(profile.forward_s) == len(traced.graph)


def test_impossible_sizes_and_inputs_are_refused() -> None:
    traced = trace(model(), (X,), {})
    with pytest.raises(ProfileError, match=r"micro-batch sizes \[0\] were asked for"):
        measure_device(traced, {"input": X}, [0], "small")
    with pytest.raises(ProfileError, match=r"inputs \['x'\] were given; the module takes \['input'\]"):
        measure_device(traced, {"x": X}, [1], "small")
