"""Emulated devices and links, on clocks that the tests turn."""

from typing import Any

import pytest
import torch
from torch.distributed import Store

from lightning_hetpipe.cluster import Cluster, Device, Emulation, Link
from lightning_hetpipe.engine import edge
from lightning_hetpipe.engine.emulate import Emulator, LinkClock
from lightning_hetpipe.engine.session import Engine, sample_weights
from lightning_hetpipe.errors import MemoryLimitError, RankFailedError
from lightning_hetpipe.schedule import make_schedule
from tests.engine.test_runtime_parity import batch_of
from tests.helpers.outcomes import outcomes, values
from tests.helpers.toy import GRAPH, Toy, ToyReader, ToyStage, specs


class Hands:
    """Wall and CPU clocks; sleeping takes longer than asked by ``late_s``."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.wall_s, self.cpu_s, self.late_s = 100.0, 0.0, late_s

    def emulator(self, speed: float) -> Emulator:
        device = Device("slow", emulation=Emulation(speed))
        return Emulator(device, cpu_clock=lambda: self.cpu_s, clock=lambda: self.wall_s, sleep=self.sleep)

    def compute(self, cpu_s: float, wall_s: float | None = None) -> None:
        self.cpu_s += cpu_s
        self.wall_s += cpu_s if wall_s is None else wall_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.wall_s += seconds + self.late_s


def test_a_section_takes_cpu_time_over_speed() -> None:
    hands = Hands()
    with hands.emulator(0.25).section():
        hands.compute(2.0)
    assert hands.wall_s == 100.0 + 8.0


def test_a_section_that_waited_longer_is_not_stretched() -> None:
    hands = Hands()
    with hands.emulator(0.5).section():
        hands.compute(1.0, wall_s=3.0)
    assert hands.wall_s == 103.0


def test_computing_before_and_after_a_wait_is_stretched_and_the_wait_is_not() -> None:
    hands = Hands()
    emulator = hands.emulator(0.5)
    with emulator.section():
        hands.compute(1.0)
        with emulator.waiting():
            hands.compute(0.0, wall_s=3.0)
        hands.compute(1.0)
    assert hands.wall_s == 100.0 + 2.0 + 3.0 + 2.0


def test_the_overshoot_of_a_sleep_is_paid_back_by_the_next_section() -> None:
    hands = Hands(late_s=0.25)
    emulator = hands.emulator(0.5)
    for _ in range(40):
        with emulator.section():
            hands.compute(1.0)
    assert hands.wall_s == pytest.approx(100.0 + 80.0 + 0.25)


def test_an_overshoot_longer_than_a_section_is_paid_back_over_several() -> None:
    hands = Hands(late_s=1.0)
    emulator = hands.emulator(0.5)
    with emulator.section():
        hands.compute(1.0)
    hands.late_s = 0.0
    for _ in range(4):
        with emulator.section():
            hands.compute(0.4)
    assert hands.wall_s == pytest.approx(100.0 + 2.0 + 4 * 0.8)


def test_a_device_at_its_own_speed_is_left_alone() -> None:
    hands = Hands()
    with hands.emulator(1.0).section():
        hands.compute(1.0)
    assert hands.wall_s == 101.0


def test_messages_of_one_link_follow_each_other_and_each_adds_the_latency() -> None:
    clock = LinkClock(Link(latency_s=1.0, bandwidth_bytes_per_s=10.0))
    assert clock.stamp(100, now_s=5.0) == 5.0 + 10.0 + 1.0
    assert clock.stamp(50, now_s=6.0) == 15.0 + 5.0 + 1.0  # waits for the first
    assert clock.stamp(10, now_s=50.0) == 50.0 + 1.0 + 1.0  # the link was idle


SLOW = Cluster(
    "slow",
    tuple(Device(f"d{i}") for i in range(3)),
    (Link(0.002, 1e6, emulated=True),),
)


def over_emulated_links(rank: int, store: Store) -> Any:
    waits: list[float] = []
    edge.wait_until = waits.append  # type: ignore[assignment]
    sizes, ranks_of_stage, starts = (2, 1), ((1,), (2,), (0,)), (0, 1, 3)
    toy = Toy()
    engine = Engine(store, rank, 3, timeout_s=20, cluster=SLOW)
    routes = GRAPH.routes(starts)
    stops = (*starts[1:], 4)
    engine.install(
        lambda m, training: make_schedule(
            "gpipe",
            ranks_of_stage=ranks_of_stage,
            n_ranks=3,
            n_micro_batches=m,
            in_flight=(m, m, m),
            routes=routes,
            training=training,
        ),
        routes,
        ranks_of_stage,
        {s: ToyStage(toy, starts[s], stops[s]) for s, ranks in enumerate(ranks_of_stage) if rank in ranks},
    )
    reader = ToyReader(toy, batch_of(3), sizes, False) if rank == 0 else None
    losses = engine.train_step([specs(n) for n in sizes], weights=sample_weights(sizes), reader=reader)
    spans = {span.action: span for span in engine._installed.spans}
    timeline = engine.gather_timeline()
    engine.close()
    return waits, spans, losses, timeline


def test_a_message_carries_the_time_at_which_its_link_has_delivered_it() -> None:
    found = values(outcomes(3, over_emulated_links))
    sent = {name: span for _, spans, _, _ in found for name, span in spans.items() if "SEND" in name}
    # Rank 2 receives stage 0's value "a": 2 and then 1 samples of 6 doubles, at 1 MB/s.
    first, second = found[2][0][:2]
    assert sent["0SEND_F0"].start_s <= first - 0.002 - 96e-6 <= sent["0SEND_F0"].end_s
    assert second - first >= 48e-6 - 1e-9
    # Rank 0 gets the skip "s" over its own link; the stamps of one link never overlap.
    skips = sorted(found[0][0][:4])
    assert len(skips) == 4
    assert sent["0SEND_F0:2"].start_s <= found[0][0][0] - 0.002 - 96e-6 or len(set(skips)) == 4


def too_large(rank: int, store: Store) -> None:
    class Hungry(ToyStage):
        def __call__(self, values: Any) -> Any:
            self.kept = [torch.ones(2**20) for _ in range(64)]
            return super().__call__(values)

    cluster = Cluster("small", (Device("d0"), Device("d1", emulation=Emulation(1.0, 64 * 2**20))))
    toy = Toy()
    engine = Engine(store, rank, 2, timeout_s=30, cluster=cluster)
    routes = GRAPH.routes((0, 2))
    engine.install(
        lambda m, training: make_schedule(
            "gpipe",
            ranks_of_stage=((1,), (0,)),
            n_ranks=2,
            n_micro_batches=m,
            in_flight=(m, m),
            routes=routes,
            training=training,
        ),
        routes,
        ((1,), (0,)),
        {0: Hungry(toy, 0, 2)} if rank else {1: ToyStage(toy, 2, 4)},
    )
    engine.limit_memory(held_bytes=0)
    reader = ToyReader(toy, batch_of(2), (2,), False) if rank == 0 else None
    try:
        engine.train_step([specs(2)], weights=(1.0,), reader=reader)
    finally:
        engine.close()


def test_a_rank_that_exceeds_its_memory_names_itself_the_action_and_the_limit() -> None:
    found = outcomes(2, too_large)
    message = "rank 1 in 0F0: the device's emulated memory limit of 64.0 MiB is exceeded"
    assert isinstance(found[1].error, MemoryLimitError)
    assert message in str(found[1].error)
    assert isinstance(found[0].error, RankFailedError)
    assert "rank 1 failed in 0F0 (micro-batch 0): MemoryLimitError" in str(found[0].error)
