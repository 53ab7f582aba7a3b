"""Every communication function and its backward are adjoint, for unequal and empty intervals."""

import inspect

import pytest
import torch
import torch.distributed as dist

from lightning_hetpipe.shares import bounds_of
from lightning_hetpipe.stage import collective
from tests.helpers.ranks import run_ranks

# n ranks -> the channels of each member
COUNTS = {
    2: [(4, 4), (7, 1), (5, 3), (3, 0), (0, 5)],
    3: [(2, 2, 2), (5, 2, 1), (7, 1, 1), (4, 0, 3), (0, 0, 2)],
}
SHAPES = [(2, -1, 3, 2), (-1,), (1, -1, 2), (3, 2, -1)]


def _form(kind: str, shape: tuple[int, ...], dim: int, bounds: tuple[int, ...], rank: int, seed: int):
    """A random tensor of that form: same on all for replicated, different otherwise."""
    whole = seed if kind == "replicated" else seed + 1 + rank
    generator = torch.Generator().manual_seed(whole)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    return x.narrow(dim, bounds[rank], bounds[rank + 1] - bounds[rank]) if kind == "sharded" else x


def _dot(kind: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Inner product over the group; a pair that is the same on every member counts once."""
    value = (x * y).sum() if kind != "replicated" or dist.get_rank() == 0 else torch.zeros((), dtype=x.dtype)
    dist.all_reduce(value)
    return value


# name -> (form of the argument, form of the result); the gradient of a copied value is partial
FUNCTIONS = {
    "copy_to_group": ("replicated", "copied"),
    "sum_over_group": ("partial", "replicated"),
    "gather_channels": ("sharded", "copied"),
    "gather_replicated": ("sharded", "replicated"),
    "scatter_sum": ("partial", "sharded"),
    "slice_replicated": ("replicated", "sharded"),
    "slice_copied": ("copied", "sharded"),
    "replicate_copied": ("copied", "replicated"),
}


def _call(name: str, x: torch.Tensor, bounds: tuple[int, ...], dim: int) -> torch.Tensor:
    function = getattr(collective, name)
    if name in ("copy_to_group", "sum_over_group", "replicate_copied"):
        return function(x, dist.group.WORLD)
    return function(x, bounds, dim, dist.group.WORLD)


def _adjoint_errors(rank: int, small_bytes: int) -> dict[str, float]:
    collective.SMALL_BYTES = small_bytes
    errors = dict.fromkeys(FUNCTIONS, 0.0)
    for name, (source, target) in FUNCTIONS.items():
        for counts in COUNTS[dist.get_world_size()]:
            bounds = bounds_of(counts)
            for shape in SHAPES:
                dim = shape.index(-1)
                whole = tuple(bounds[-1] if n == -1 else n for n in shape)
                # the value of a copied tensor is the same on all, its gradient is a term of a sum
                value = "replicated" if source == "copied" else source
                x = _form(value, whole, dim, bounds, rank, 1).clone().requires_grad_()
                grad = "partial" if target == "copied" else target
                y = _form(grad, whole, dim, bounds, rank, 100)
                out = _call(name, x, bounds, dim)
                (adjoint,) = torch.autograd.grad(out, x, y)
                left = _dot(grad, out.detach(), y)
                right = _dot("partial" if source == "copied" else source, x.detach(), adjoint)
                errors[name] = max(errors[name], float((left - right).abs() / (1 + left.abs())))
    return errors


def _values(rank: int) -> dict[str, float]:
    group, errors = dist.group.WORLD, {}
    for counts in COUNTS[dist.get_world_size()]:
        bounds, members = bounds_of(counts), range(len(counts))
        whole = _form("replicated", (2, bounds[-1], 3), 1, bounds, rank, 7)
        terms = [_form("partial", (2, bounds[-1], 3), 1, bounds, r, 7) for r in members]

        def mine_of(x: torch.Tensor, start: int = bounds[rank], length: int = counts[rank]) -> torch.Tensor:
            return x.narrow(1, start, length)

        mine = mine_of(whole)
        total = sum(terms)
        for name, found, wanted in (
            ("gather", collective.gather_channels(mine, bounds, 1, group), whole),
            ("gather_replicated", collective.gather_replicated(mine, bounds, 1, group), whole),
            ("sum", collective.sum_over_group(terms[rank], group), total),
            ("scatter", collective.scatter_sum(terms[rank], bounds, 1, group), mine_of(total)),
            ("slice", collective.slice_replicated(whole, bounds, 1, group), mine),
        ):  # fmt: skip
            assert found.shape == wanted.shape, name
            errors[name] = max(
                errors.get(name, 0.0), float((found - wanted).abs().max()) if wanted.numel() else 0.0
            )
    return errors


def test_every_function_that_autograd_differentiates_is_tried():
    public = {
        name
        for name, value in vars(collective).items()
        if inspect.isfunction(value)
        and value.__module__ == collective.__name__
        and not name.startswith("_")
        and "no gradient" not in str(value.__doc__)
    }
    assert public == set(FUNCTIONS)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["by_broadcasts", "by_all_to_all"])
def test_every_function_and_its_backward_are_adjoint(n: int, small_bytes: int):
    for errors in run_ranks(n, _adjoint_errors, small_bytes):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("n", [2, 3])
def test_values_are_the_whole_the_sum_and_its_intervals(n: int):
    for errors in run_ranks(n, _values):
        assert max(errors.values()) < 1e-12, errors


def _second_use(rank: int) -> torch.Tensor:
    """A reduced value that two consumers use: its gradient must be counted once on every member."""
    x = torch.full((2, 3), float(rank + 1), dtype=torch.float64, requires_grad=True)
    y = collective.sum_over_group(x, dist.group.WORLD)
    (y * y + 2 * y).sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_sum_with_two_consumers_is_counted_once_in_backward():
    for grad in run_ranks(2, _second_use):
        assert torch.equal(grad, torch.full((2, 3), 2 * 3.0 + 2, dtype=torch.float64))
