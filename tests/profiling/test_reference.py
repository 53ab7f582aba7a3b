import contextlib
import time

import pytest
import torch

from lightning_hetpipe.profiling import reference
from lightning_hetpipe.profiling.reference import optimizer_s_per_byte, reference_seconds

CPU = torch.device("cpu")


class Sections:
    """Counts compute sections and makes each take a while longer."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.count, self.pause_s = 0, pause_s

    @contextlib.contextmanager
    def __call__(self):
        self.count += 1
        yield
        time.sleep(self.pause_s)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_reference_is_computed_within_the_section_and_takes_its_time(monkeypatch):
    monkeypatch.setattr(reference, "_WINDOW_S", 0.1)
    sections = Sections(pause_s=0.2)
    assert reference_seconds(CPU, sections) > 0.2
    assert sections.count == 1 + reference._WINDOWS  # a warm-up, then one fills a window


def test_other_processes_that_disturb_a_while_do_not_count(monkeypatch):
    readings = iter([9.0, 0.3, 0.9, 0.1, 0.1, 0.1])  # the warm-up, then windows of 0.25 s or more
    monkeypatch.setattr(reference, "_seconds", lambda compute, device, section: next(readings))
    assert reference_seconds(CPU) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 1e-3}),
    ],
)
def test_an_optimizer_step_costs_time_within_the_section(optimizer, settings):
    sections = Sections(pause_s=0.02)
    found = optimizer_s_per_byte(optimizer, settings, device=CPU, section=sections, repeats=2)
    assert found > 0.02 / (reference.N_TENSORS * reference.TENSOR_BYTES)
    assert sections.count == 3


def test_half_precision_parameters_are_measured_by_their_own_bytes():
    seen = []

    def optimizer(parameters, lr):
        seen.extend(parameters)
        return torch.optim.SGD(parameters, lr=lr)

    optimizer_s_per_byte(optimizer, {"lr": 0.1}, device=CPU, dtype=torch.bfloat16, repeats=1)
    assert sum(p.numel() * p.element_size() for p in seen) == reference.N_TENSORS * reference.TENSOR_BYTES
    assert all(p.dtype == p.grad.dtype == torch.bfloat16 and p.isfinite().all() for p in seen)


def test_measuring_draws_no_random_numbers(monkeypatch):
    monkeypatch.setattr(reference, "_WINDOW_S", 1e-6)
    before = torch.get_rng_state()
    reference_seconds(CPU)
    optimizer_s_per_byte(torch.optim.SGD, {"lr": 0.1}, device=CPU, repeats=1)
    assert torch.equal(torch.get_rng_state(), before)
