import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks


def _sum(rank: int, start: int) -> int:
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return int(total)


def _fail(rank: int) -> None:
    if rank == 1:
        raise KeyError("rank one says no")
    dist.barrier()


def test_every_rank_returns_its_result():
    assert run_ranks(3, _sum, 10) == [33, 33, 33]


def test_the_first_failure_is_raised_with_its_kind():
    with pytest.raises(KeyError, match="rank one says no"):
        run_ranks(2, _fail)
