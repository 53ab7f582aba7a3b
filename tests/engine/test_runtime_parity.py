"""The pipeline trains as one device does."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import Store

from lightning_hetpipe.engine.runtime import SharedGradients
from lightning_hetpipe.engine.session import Engine, sample_weights
from lightning_hetpipe.schedule import make_schedule
from tests.helpers.outcomes import outcomes, values
from tests.helpers.toy import GRAPH, Toy, ToyReader, ToyStage, reference, specs

PLACES = {  # number of ranks, first layer of each stage, rank of each stage
    "one rank": (1, (0,), ((0,),)),
    "two ranks": (2, (0, 2), ((1,), (0,))),
    "three ranks": (3, (0, 1, 3), ((2,), (1,), (0,))),
    "four ranks, one idle": (4, (0, 1, 2), ((2,), (3,), (0,))),
    "four ranks": (4, (0, 1, 2, 3), ((1,), (2,), (3,), (0,))),
}


# Some ranks hold several stages, not all equally many; two of them exchange in both directions.
ROUNDS = {
    "a b a b": (2, (0, 1, 2, 3), ((1,), (0,), (1,), (0,))),
    "a b a": (2, (0, 1, 3), ((0,), (1,), (0,))),
    "a b c a": (4, (0, 1, 2, 3), ((0,), (3,), (2,), (0,))),
    "a b a c": (3, (0, 1, 2, 3), ((1,), (2,), (1,), (0,))),
}
PLACES |= ROUNDS


def batch_of(n: int) -> torch.Tensor:
    return torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def engine_of(
    rank: int, store: Store, place: str, schedule: str = "1f1b", timeout_s: float = 20.0
) -> tuple[Engine, Toy]:
    """An engine with the toy's stages installed."""
    n = PLACES[place][0]
    toy = Toy()
    engine = Engine(None if n == 1 else store, rank, n, timeout_s=timeout_s)
    install(engine, toy, place, schedule)
    return engine, toy


def install(engine: Engine, toy: Toy, place: str, schedule: str) -> None:
    n, starts, ranks_of_stage = PLACES[place]
    rank, stops = engine.rank, (*starts[1:], 4)
    mine = {
        index: ToyStage(toy, starts[index], stops[index])
        for index, ranks in enumerate(ranks_of_stage)
        if rank in ranks
    }
    last = len(starts) - 1
    owners = tuple(sorted({ranks_of_stage[0][0], ranks_of_stage[last][0]}))
    tied = len(owners) > 1
    shared = [
        SharedGradients(stage, owners, (toy.weights[0],)) for stage in mine if stage in (0, last) and tied
    ]
    routes = GRAPH.routes(starts)
    engine.install(
        lambda m, training: make_schedule(
            schedule,
            ranks_of_stage=ranks_of_stage,
            n_ranks=n,
            n_micro_batches=m,
            in_flight=tuple(min(m, len(starts) - s) for s in range(len(starts))),
            routes=routes,
            reduce=(0, last) if tied else (),
            training=training,
        ),
        routes,
        ranks_of_stage,
        mine,
        shared=shared,
        owners=[owners] if tied else [],
    )


def step(engine: Engine, toy: Toy, sizes: tuple[int, ...], head: bool) -> list[torch.Tensor]:
    reader = ToyReader(toy, batch_of(sum(sizes)), sizes, head) if engine.rank == 0 else None
    known = [specs(size, head=head) for size in sizes]
    return list(engine.train_step(known, weights=sample_weights(sizes), reader=reader))


def train(rank: int, store: Store, place: str, schedule: str, sizes: tuple[int, ...], head: bool) -> Any:
    engine, toy = engine_of(rank, store, place, schedule)
    losses = step(engine, toy, sizes, head)
    grads = {name: p.grad for name, p in toy.named_parameters() if p.grad is not None}
    timeline = engine.gather_timeline()
    engine.close()
    return losses, grads, timeline


def agree(found: list[Any], sizes: tuple[int, ...], head: bool) -> None:
    losses, grads = reference(batch_of(sum(sizes)), sizes, head)
    torch.testing.assert_close(found[0][0], losses, rtol=1e-12, atol=1e-14)
    seen = set()
    for _, mine, _ in found:
        seen |= mine.keys()
        for name, grad in mine.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-12, atol=1e-14)
    assert seen == grads.keys()


@pytest.mark.parametrize("head", [False, True], ids=["", "head"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("place", [place for place in PLACES if place not in ROUNDS])
def test_losses_and_gradients_equal_one_device(place: str, schedule: str, head: bool) -> None:
    sizes = (2, 2, 2, 1)
    agree(values(outcomes(PLACES[place][0], train, place, schedule, sizes, head)), sizes, head)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_fewer_micro_batches_than_stages_are_enough(schedule: str) -> None:
    agree(values(outcomes(4, train, "four ranks", schedule, (3, 2), True)), (3, 2), True)


@pytest.mark.parametrize("head", [False, True], ids=["", "head"])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (3, 2)], ids=["ragged", "few"])
@pytest.mark.parametrize("place", ROUNDS)
def test_interleaved_stages_equal_one_device(place: str, sizes: tuple[int, ...], head: bool) -> None:
    agree(values(outcomes(PLACES[place][0], train, place, "interleaved", sizes, head)), sizes, head)


def test_the_measured_timeline_names_every_action_of_every_rank() -> None:
    sizes = (2, 1)
    found = values(outcomes(3, train, "three ranks", "1f1b", sizes, True))
    timeline = found[0][2]
    assert timeline.source == "measured"
    assert timeline.n_ranks == len(timeline.peak_memory_bytes) == 3
    assert [span.action for span in timeline.spans if span.rank == 1] == [
        "1RECV_F0", "1F0", "1SEND_F0", "1RECV_F1", "1F1", "1SEND_F1",
        "1RECV_B0", "1B0", "1SEND_B0", "1RECV_B1", "1B1", "1SEND_B1",
    ]  # fmt: skip
    assert all(0 <= span.start_s <= span.end_s for span in timeline.spans)
    assert found[1][2] is None


def forward_then_train(rank: int, store: Store, place: str) -> Any:
    engine, toy = engine_of(rank, store, place)
    outputs = []
    for sizes in ((2, 2, 1), (5,), (1,) * 12):
        n = sum(sizes)
        reader = ToyReader(toy, batch_of(n), sizes, False) if rank == 0 else None
        engine.forward([specs(size) for size in sizes], reader=reader)
        if reader is not None:
            outputs.append(torch.cat([reader.outputs[m] for m in range(len(sizes))]))
    assert all(p.grad is None for p in toy.parameters())
    losses = step(engine, toy, (2, 1), False)
    grads = {name: p.grad for name, p in toy.named_parameters() if p.grad is not None}
    install(engine, toy, place, "gpipe")
    toy.zero_grad()
    step(engine, toy, (4,), True)
    engine.close()
    return losses, grads, outputs


def test_evaluation_training_and_a_new_plan_follow_each_other() -> None:
    found = values(outcomes(3, forward_then_train, "three ranks"))
    for output, n in zip(found[0][2], (5, 5, 12)):
        torch.testing.assert_close(output, Toy()(batch_of(n)), rtol=1e-12, atol=1e-14)
        assert not output.requires_grad
    agree([(losses, grads, None) for losses, grads, _ in found], (2, 1), False)


def with_unused_skip(rank: int, store: Store) -> Any:
    engine, toy = engine_of(rank, store, "three ranks")
    toy.layer = partial(_without_skip, toy)  # type: ignore[method-assign]
    losses = step(engine, toy, (2,), False)
    engine.close()
    return losses, toy.weights[0].grad


def _without_skip(toy: Toy, index: int, env: dict[str, torch.Tensor]) -> None:
    Toy.layer(toy, index, env)
    if index == 3:
        env["y"] = env["c"] @ toy.weights[0].t()


def test_a_value_that_nothing_depends_on_gets_a_gradient_of_zeros() -> None:
    found = values(outcomes(3, with_unused_skip))
    toy = Toy()
    toy.layer = partial(_without_skip, toy)  # type: ignore[method-assign]
    toy(batch_of(2)).square().mean().backward()
    torch.testing.assert_close(found[2][1], toy.weights[0].grad, rtol=1e-12, atol=1e-14)
