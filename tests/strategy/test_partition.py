import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_hetpipe.errors import PlanError, UnsupportedError
from lightning_hetpipe.stage.consolidate import Placement
from lightning_hetpipe.stage.layout import Sharding
from lightning_hetpipe.strategy.partition import (
    OwnerMap,
    borrowed_parameters,
    copies_of,
    gather,
    partition,
    slots,
)
from lightning_hetpipe.strategy.shards import join
from tests.helpers.ranks import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.rnn = nn.LSTM(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight  # tied over the first and the last stage
        self.register_buffer("scratch", torch.randn(3), persistent=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.temperature = nn.Parameter(torch.randn(()))
        self.accuracy = MulticlassAccuracy(11)


def build(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def owner_map(model: nn.Module) -> OwnerMap:
    stages = [
        (("embed.weight",), (1,)),
        (
            ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
            (2,),
        ),
        (tuple(f"rnn.{name}" for name, _ in model.net.rnn.named_parameters()), (2,)),
        (("out.weight",), (0,)),
    ]
    return OwnerMap.of_stages(model, "net", stages)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: slot.tensor.detach().clone() for slot in slots(model) for name in slot.names}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_tied_parameter_belongs_to_all_its_stages_and_unused_tensors_to_rank_0():
    owners = owner_map(build(0))
    assert owners.of("net.embed.weight") == owners.of("net.out.weight") == (1, 0)
    assert owners.of("net.norm.running_mean") == (2,)
    assert owners.of("net.scratch") == owners.of("temperature") == (0,)


def test_a_parameter_that_is_also_used_outside_the_pipelined_module_belongs_to_rank_0_too():
    model = build(0)
    model.head = nn.Linear(8, 11)
    model.head.weight = model.net.embed.weight
    assert OwnerMap.of_stages(model, "net", [(("embed.weight",), (1,))]).of("net.out.weight") == (1, 0)


def _scatter(rank: int) -> dict[str, str]:
    model, group = build(seed=rank), dist.group.WORLD
    as_on_rank_0, owners = values(build(0)), owner_map(model)
    kept = model.net.rnn.weight_hh_l0 if rank == 2 else model.net.embed.weight
    model.net.norm.weight.note = "mine"
    order = [name for name, _ in model.named_parameters()]
    partition(model, owners, rank, group)
    held = {name: tensor for name, tensor in values(model).items() if not tensor.is_meta}
    assert {name for name in as_on_rank_0 if rank in owners.of(name)} == held.keys()
    assert_equal(held, {name: as_on_rank_0[name] for name in held})
    assert [name for name, _ in model.named_parameters()] == order
    assert model.net.out.weight is model.net.embed.weight
    assert isinstance(model.net.norm.weight, nn.Parameter)
    assert model.net.norm.weight.note == "mine"
    assert any(kept is parameter for parameter in model.parameters())
    model.cpu().double().float()  # passes over the placeholders
    assert not model.accuracy.tp.is_meta
    partition(model, owners, rank, group)  # nothing changes
    assert_equal({name: t for name, t in values(model).items() if not t.is_meta}, held)
    elsewhere = OwnerMap({name: ((owner[0] + 1) % 3,) for name, owner in owners.ranks.items()})
    partition(model, elsewhere, rank, group)  # another plan, from whoever holds each tensor
    assert all(t.is_meta != (elsewhere.of(n) == (rank,)) for n, t in values(model).items())
    gather(model, elsewhere, rank, group)
    assert_equal(values(model), as_on_rank_0)
    assert "_apply" not in vars(model)
    hidden = torch.zeros(1, 2, 8)
    assert model.net.rnn(hidden)[0].shape == hidden.shape
    assert model.net.out.weight is model.net.embed.weight
    return {"device": str(model.net.norm.weight.device)}


def test_ranks_hold_their_tensors_as_built_on_rank_0_and_get_all_of_them_back():
    assert run_ranks(3, _scatter) == [{"device": "cpu"}] * 3


def _gather_changed(rank: int) -> int:
    model = build(0)
    owners = owner_map(model)
    partition(model, owners, rank, dist.group.WORLD)
    model.net.norm.bias.requires_grad_(False)
    with torch.no_grad():
        for parameter in {each for each in model.parameters() if not each.is_meta}:
            parameter.fill_(rank)
    assert borrowed_parameters(model, owners, rank) == ({model.net.embed.weight} if rank == 0 else set())
    gather(model, owners, rank, dist.group.WORLD)
    model.cpu()
    assert not model.net.norm.bias.requires_grad
    assert model.net.norm.bias.unique().tolist() == [2]
    assert model.temperature == 0
    return sum(slot.tensor.is_meta for slot in slots(model))


def test_gathering_brings_what_its_owners_changed_to_every_rank():
    assert run_ranks(3, _gather_changed) == [0, 0, 0]


def _copy(rank: int) -> None:
    class Callback:
        def __init__(self, model: nn.Module) -> None:
            self.averaged = torch.optim.swa_utils.AveragedModel(model)
            self.original = model
            self.other = nn.Linear(1, 1)

    model, group = build(0), dist.group.WORLD
    owners, callback = owner_map(model), Callback(model)
    found = list(copies_of(model, [callback]))
    assert found == [callback.averaged.module]
    for each in (model, *found):
        partition(each, owners, rank, group)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    callback.averaged.update_parameters(model)
    copy.deepcopy(model).cpu()
    for each in (model, *found):
        gather(each, owners, rank, group)
    assert_equal(values(found[0]), values(model))


def test_a_copy_that_a_callback_averages_into_is_partitioned_alike():
    run_ranks(3, _copy)


def _different_modules(rank: int) -> None:
    partition(nn.Linear(3, 3 + rank), OwnerMap({}), rank, dist.group.WORLD)


def test_ranks_that_build_different_modules_are_told_the_first_difference():
    with pytest.raises(PlanError, match=r"rank 0: \('weight', \(3, 3\).*rank 1: \('weight', \(4, 3\)"):
        run_ranks(2, _different_modules)


def test_one_rank_alone_partitions_nothing():
    model = build(0)
    before = values(model)
    partition(model, OwnerMap({}), 0, None)
    assert_equal(values(model), before)
    gather(model, OwnerMap({}), 0, None)


def test_an_owner_outside_the_group_is_refused():
    with pytest.raises(PlanError, match=r"weight belongs to ranks \(1,\), but there are 1 ranks"):
        partition(nn.Linear(2, 2), OwnerMap({"weight": (1,)}), 0, None)


def test_a_tensor_without_values_anywhere_is_refused():
    with pytest.raises(PlanError, match="weight is on the meta device on every rank"):
        partition(nn.Linear(2, 2, device="meta"), OwnerMap({}), 0, None)


def test_lazy_parameters_are_refused():
    with pytest.raises(UnsupportedError, match=r"0.weight is a lazy parameter"):
        slots(nn.Sequential(nn.LazyLinear(3)))


def _deal_and_join(rank: int, placeholder: int) -> bool:
    """Ranks 1 and 2 get the rows of a weight, from rank 0 or, where that has none, from the first owner."""
    torch.manual_seed(rank)
    model = nn.Linear(3, 5)
    if rank == placeholder:
        model.weight = nn.Parameter(torch.empty(5, 3, device="meta"))
    dist.broadcast(torch.zeros(1), 0)
    wholes = [torch.zeros(5, 3) for _ in range(3)]
    dist.all_gather(wholes, torch.zeros(5, 3) if model.weight.is_meta else model.weight.detach())
    wanted = wholes[0 if placeholder else 2]
    owners = OwnerMap({"weight": (2, 1), "bias": (2,)}, {"weight": Placement(Sharding(0, (0, 3, 5)))})
    partition(model, owners, rank, dist.group.WORLD)
    part = {0: None, 1: wanted[3:], 2: wanted[:3]}[rank]
    fine = model.weight.is_meta if part is None else torch.equal(model.weight, part)
    join(model, owners, rank, dist.group.WORLD)
    gather(model, owners, rank, dist.group.WORLD)
    return fine and torch.equal(model.weight, wanted)


@pytest.mark.parametrize("placeholder", [0, 1])
def test_parts_are_dealt_from_one_whole_and_joined_to_it_again(placeholder):
    assert run_ranks(3, _deal_and_join, placeholder) == [True] * 3
