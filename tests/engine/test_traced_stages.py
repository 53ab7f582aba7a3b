"""Real models, traced and cut, train over ranks as on one device."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import Store

from lightning_hetpipe.engine.runtime import SharedGradients
from lightning_hetpipe.engine.session import Engine, sample_weights
from lightning_hetpipe.schedule import make_schedule
from lightning_hetpipe.tracing import TensorSpec, trace
from tests.helpers.models import build
from tests.helpers.outcomes import outcomes, values

SIZES = (3, 3, 2)
RANKS_OF_STAGE = ((1,), (2,), (0,))


class Step:
    """A cross entropy behind the module."""

    def __init__(self, name: str, x: Tensor, y: Tensor) -> None:
        self.name, self.x, self.y = name, x.split(SIZES), y.split(SIZES)

    def start(self, m: int) -> dict[str, Tensor]:
        return {self.name: self.x[m]}

    def finish(self, m: int, output: Any) -> Tensor:
        return F.cross_entropy(output, self.y[m])

    def backward(self, m: int, grads: Any) -> None:
        raise AssertionError("nothing before the module learns")


def train(rank: int, store: Store, model: str) -> Any:
    net, data = build(model)
    x, y = data(sum(SIZES))
    traced = trace(net, (x[:2],), {})
    n = len(traced.graph)
    starts = (0, n // 3, 2 * n // 3)
    runs = list(zip(starts, (*starts[1:], n)))
    used = [traced.parameters_of(*run) for run in runs]
    named = dict(net.named_parameters())
    shared, owners = [], set()
    for name in sorted(named):
        holders = [stage for stage in range(3) if name in used[stage]]
        if len(holders) > 1:
            ranks = tuple(sorted(RANKS_OF_STAGE[stage][0] for stage in holders))
            owners.add(ranks)
            shared += [
                SharedGradients(s, ranks, (named[name],)) for s in holders if RANKS_OF_STAGE[s] == (rank,)
            ]
    routes = traced.graph.routes(starts)
    reduce = tuple(stage for stage in range(3) if any(stage == s.stage for s in shared))
    engine = Engine(store, rank, 3, timeout_s=30)
    engine.install(
        lambda m, training: make_schedule(
            "1f1b",
            ranks_of_stage=RANKS_OF_STAGE,
            n_ranks=3,
            n_micro_batches=m,
            in_flight=(3, 2, 1),
            routes=routes,
            reduce=(0, 1, 2) if owners else reduce,
            training=training,
        ),
        routes,
        RANKS_OF_STAGE,
        {stage: traced.stage(*runs[stage]) for stage in range(3) if RANKS_OF_STAGE[stage] == (rank,)},
        shared=shared,
        owners=sorted(owners),
    )
    (name,) = traced.input_names
    known = [traced.shapes({name: TensorSpec.of(part)}) for part in x.split(SIZES)]
    step = Step(name, x, y) if rank == 0 else None
    losses = engine.train_step(known, weights=sample_weights(SIZES), reader=step)
    engine.close()
    (stage,) = (s for s in range(3) if RANKS_OF_STAGE[s] == (rank,))
    return list(losses), {name: named[name].grad for name in used[stage]}


def reference(model: str) -> tuple[list[Tensor], nn.Module]:
    net, data = build(model)
    x, y = data(sum(SIZES))
    losses = []
    for a, b in zip(x.split(SIZES), y.split(SIZES)):
        loss = F.cross_entropy(net(a), b)
        (loss * len(a) / len(x)).backward()
        losses.append(loss.detach())
    return losses, net


@pytest.mark.parametrize("model", ["resnet18", "skips", "encoder", "tied"])
def test_a_traced_model_gets_the_gradients_of_one_device(model: str) -> None:
    torch.set_num_threads(1)
    found = values(outcomes(3, train, model))
    losses, net = reference(model)
    torch.testing.assert_close(found[0][0], losses, rtol=1e-10, atol=1e-12)
    named = dict(net.named_parameters())
    assert set().union(*(grads for _, grads in found)) == set(named)
    for _, grads in found:
        for name, grad in grads.items():
            torch.testing.assert_close(grad, named[name].grad, rtol=1e-8, atol=1e-11)
