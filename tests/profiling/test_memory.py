import pytest
import torch

from lightning_hetpipe.profiling import memory


def test_the_peak_counts_what_was_freed_again_until_it_is_reset() -> None:
    memory.return_freed_memory()
    memory.reset_peak()
    before = memory.peak_memory_bytes()
    block = torch.ones(8 * 2**20)
    del block
    assert memory.peak_memory_bytes() - before > 28 * 2**20
    memory.return_freed_memory()
    memory.reset_peak()
    assert memory.peak_memory_bytes() - before < 16 * 2**20


def test_the_allocator_is_left_alone_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory.SWITCH, "0")
    assert memory.tune_allocator() is False


def test_glibc_takes_the_thresholds() -> None:
    assert memory.tune_allocator() is True
