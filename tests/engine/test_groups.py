"""Several ranks hold a stage: training equals one device, and a lost member is named by everybody."""

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from lightning_hetpipe.cluster import Cluster, Device, Link
from lightning_hetpipe.engine import membership
from lightning_hetpipe.engine.membership import Membership
from lightning_hetpipe.engine.pieces import Holding
from lightning_hetpipe.engine.runtime import SharedGradients
from lightning_hetpipe.engine.session import Engine, sample_weights
from lightning_hetpipe.errors import RankFailedError
from lightning_hetpipe.schedule import make_schedule
from lightning_hetpipe.stage.batch import BatchStage, reduce_gradients
from tests.helpers.outcomes import outcomes, values
from tests.helpers.toy import GRAPH, Toy, ToyReader, ToyStage, reference, specs

UNEVEN = (5 / 6, 1 / 6)
PLACES: dict[str, tuple[int, tuple[int, ...], tuple[Holding, ...]]] = {
    "samples first": (3, (0, 2), (Holding((1, 2), UNEVEN, "batch"), Holding((0,)))),
    "channels first": (3, (0, 2), (Holding((1, 2), UNEVEN, "channel"), Holding((0,)))),
    "samples last": (3, (0, 2), (Holding((2,)), Holding((1, 0), UNEVEN, "batch"))),
    "channels last": (3, (0, 2), (Holding((2,)), Holding((1, 0), UNEVEN, "channel"))),
    "in the middle": (4, (0, 1, 3), (Holding((1,)), Holding((2, 3), UNEVEN, "batch"), Holding((0,)))),
    "samples, then channels": (
        4,
        (0, 2),
        (Holding((1, 2), UNEVEN, "batch"), Holding((0, 3), UNEVEN, "channel")),
    ),
    "all by samples": (2, (0,), (Holding((0, 1), UNEVEN, "batch"),)),
}


class Meeting(ToyStage):
    """A stage whose members meet before every forward; one of them may die before it."""

    membership: Membership
    dies_in = -1
    calls = 0

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.calls == self.dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1
        self.membership.allreduce([torch.ones(1)]).wait()
        return super().__call__(values)


def install(engine: Engine, toy: Toy, place: str, schedule: str, dies_in: int = -1) -> None:
    """Channel groups run their stage whole on each member: values and gradients are then equal, too."""
    n_ranks, starts, held = PLACES[place]
    last, apart = len(starts) - 1, len(held[-1].ranks) > 1
    memberships = {
        index: member
        for index, holding in enumerate(held)
        if len(holding.ranks) > 1 and (member := engine.join(holding.ranks))
    }
    owners = tuple(sorted({*held[0].ranks, *held[last].ranks}))
    tied = last > 0
    stages: dict[int, Any] = {}
    reductions, shared = {}, []
    for index, (holding, start, stop) in enumerate(zip(held, starts, [*starts[1:], 4])):
        if engine.rank not in holding.ranks:
            continue
        stages[index] = ToyStage(toy, start, stop)
        if holding.split == "channel":
            stages[index] = Meeting(toy, start, stop)
            stages[index].membership, stages[index].dies_in = memberships[index], dies_in
        elif holding.split == "batch":
            stages[index] = BatchStage(stages[index], dict.fromkeys("xasbcy", 0), together=False)
            own = [toy.weights[i] for i in range(start, stop) if i in (1, 2) or (i == 0 and not tied)]
            reductions[index] = lambda own=own, group=memberships[index]: reduce_gradients(own, group)
        if tied and index in (0, last):
            counts = holding.split != "channel" or engine.rank == holding.ranks[0]
            shared.append(SharedGradients(index, owners, (toy.weights[0],), counts))
    if apart and engine.rank == 0:
        stages[last + 1] = ToyStage(toy, 4, 4)
    routes = GRAPH.routes(starts, loss_apart=apart)
    holdings = [*held, Holding((0,))] if apart else list(held)
    depths = [len(starts) - s for s in range(len(starts))] + [1] * apart
    engine.install(
        lambda m, training: make_schedule(
            schedule,
            ranks_of_stage=[holding.ranks for holding in holdings],
            n_ranks=n_ranks,
            n_micro_batches=m,
            in_flight=depths,
            routes=routes,
            reduce=range(len(held)) if training else (),
            training=training,
        ),
        routes,
        holdings,
        stages,
        shared=shared,
        owners=[owners] if tied else [],
        axes=dict.fromkeys("xasbcy", 0),
        reductions=reductions,
    )


def batch_of(n: int) -> Tensor:
    return torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def train(
    rank: int, store: Store, place: str, schedule: str, sizes: tuple[int, ...], dies_in: int = -1
) -> Any:
    engine, toy = Engine(store, rank, PLACES[place][0], timeout_s=20.0), Toy()
    install(engine, toy, place, schedule, dies_in if rank == max(PLACES[place][2][0].ranks) else -1)
    reader = ToyReader(toy, batch_of(sum(sizes)), sizes, True) if rank == 0 else None
    known = [specs(size, head=True) for size in sizes]
    try:
        losses = engine.train_step(known, weights=sample_weights(sizes), reader=reader)
        if reader is not None:
            outputs = torch.cat([reader.outputs[m].detach() for m in range(len(sizes))])
            reader = ToyReader(toy, batch_of(sum(sizes)), sizes, True)
        engine.forward(known, reader=reader)
        if reader is not None:
            evaluated = torch.cat([reader.outputs[m] for m in range(len(sizes))])
            torch.testing.assert_close(evaluated, outputs)
    except Exception as error:
        engine.fail(error)
        raise
    finally:
        engine.close()
    return losses, {name: p.grad for name, p in toy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("place", PLACES)
def test_losses_and_gradients_equal_one_device(place: str, schedule: str) -> None:
    sizes = (3, 3, 1)  # the smaller member of 5:1 has no sample of the last one
    found = values(outcomes(PLACES[place][0], train, place, schedule, sizes))
    losses, expected = reference(batch_of(sum(sizes)), sizes, True)
    torch.testing.assert_close(list(found[0][0]), losses, rtol=1e-12, atol=1e-14)
    seen = set()
    for rank, (_, grads) in enumerate(found):
        seen |= grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad,
                expected[name],
                rtol=1e-12,
                atol=1e-14,
                msg=lambda text, r=rank, n=name: f"{r} {n}: {text}",
            )
    assert seen == expected.keys()


def test_a_member_that_dies_before_a_collective_is_named_by_all() -> None:
    found = outcomes(3, train, "channels first", "1f1b", (2, 2, 1), 1, timeout_s=25.0)
    for rank in (0, 1):
        assert found[rank].ended, f"rank {rank} hangs"
        assert isinstance(found[rank].error, RankFailedError)
        assert "rank 2 was lost" in str(found[rank].error)


def slept_in_a_sum(rank: int, store: Store) -> float:
    slept: list[float] = []
    membership.sleep = slept.append  # type: ignore[attr-defined]
    link = Link(latency_s=0.01, bandwidth_bytes_per_s=1e6, emulated=True)
    cluster = Cluster("slow", (Device("a"), Device("b")), (link,))
    engine = Engine(store, rank, 2, timeout_s=20.0, cluster=cluster)
    group = engine.join((0, 1))
    assert group is not None
    tensor = torch.full((25_000,), float(rank + 1))
    group.allreduce([tensor]).wait()
    assert torch.equal(tensor, torch.full((25_000,), 3.0))
    engine.close()
    return sum(slept)


def test_a_collective_takes_what_its_bytes_take_on_an_emulated_link() -> None:
    for slept_s in values(outcomes(2, slept_in_a_sum)):
        assert slept_s == pytest.approx(2 * (0.01 + 50_000 / 1e6))
