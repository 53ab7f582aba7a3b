"""The largest batch, against every placement there is."""

import itertools

import numpy as np
import pytest

from lightning_hetpipe.errors import InfeasibleError, PlanError
from lightning_hetpipe.planner import cost
from lightning_hetpipe.planner.candidates import Setting, draft, with_schedule
from lightning_hetpipe.planner.cost import ADAM
from lightning_hetpipe.planner.largest import largest_batch
from lightning_hetpipe.planner.search import make_plan
from lightning_hetpipe.plans import Stage
from tests.helpers.synthetic import make_cluster, make_graph, make_profile

SPEEDS = (0.9, 0.5, 0.3)


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python keeps of a sample would be more than anything else in models as small as these."""
    monkeypatch.setattr(cost, "SAMPLE_BYTES", 1)


def problem(seed: int, sizes=(1, 2, 4), memory=(2_000, 9_000)):
    rng = np.random.default_rng(seed)
    graph = make_graph(
        5,
        parameter_bytes=[int(each) for each in rng.integers(50, 900, 5)],
        saved=list(rng.uniform(50, 800, 5)),
        out=list(rng.uniform(10, 400, 5)),
    )
    limits = [int(each) for each in rng.integers(*memory, 3)]
    return make_profile(graph, SPEEDS, sizes=sizes), make_cluster(SPEEDS, memory_bytes=limits)


def all_stages(profile, cluster, pinned_last=None):
    n_layers, names = len(profile.graph), [device.name for device in cluster.devices]
    for n in range(1, len(names) + 1):
        for order in itertools.permutations(names, n):
            if pinned_last in (None, order[-1]):
                for cuts in itertools.combinations(range(1, n_layers), n - 1):
                    edges = (0, *cuts, n_layers)
                    yield tuple(Stage(a, b, (name,)) for a, b, name in zip(edges, edges[1:], order))


def fits(profile, cluster, stages, batch_size, size, schedule) -> bool:
    setting = Setting(profile, cluster, batch_size, (schedule,), ADAM)
    return with_schedule(setting, draft(setting, stages, size), schedule) is not None


def by_force(profile, cluster, schedules, sizes, stages) -> int:
    """The largest batch that fits in any way, stepping up from the first; one less than that if none does."""
    best = min(sizes) - 1
    for split in stages:
        while any(
            fits(profile, cluster, split, best + 1, size, schedule)
            for schedule in schedules
            for size in sizes
            if size <= best + 1
        ):
            best += 1
    return best


@pytest.mark.parametrize("schedule", ["auto", "gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(6))
def test_no_placement_size_or_schedule_trains_a_larger_batch(seed: int, schedule: str) -> None:
    profile, cluster = problem(seed)
    schedules = ("gpipe", "1f1b") if schedule == "auto" else (schedule,)
    expected = by_force(profile, cluster, schedules, (1, 2, 4), all_stages(profile, cluster))
    if not expected:
        with pytest.raises(InfeasibleError, match="no plan for a batch of 1 fits"):
            largest_batch(profile, cluster, schedule=schedule)
        return
    found = largest_batch(profile, cluster, schedule=schedule)
    assert found.plan.batch_size == expected
    for used, device in zip(found.plan.prediction.memory_bytes, found.plan.cluster.devices):
        assert used <= device.memory_bytes
    names = [device.name for device in cluster.devices]
    even = tuple(Stage(a, b, (name,)) for a, b, name in zip((0, 2, 4), (2, 4, 5), names))
    largest_even = by_force(profile, cluster, ("gpipe",), (1, 2, 4), [even])
    assert (found.even.batch_size if found.even else 0) == largest_even
    if largest_even:
        assert found.gain == pytest.approx(expected / largest_even - 1)


@pytest.mark.parametrize("seed", range(3))
def test_a_pinned_device_reads_the_batch(seed: int) -> None:
    profile, cluster = problem(seed, memory=(5_000, 12_000))
    expected = by_force(profile, cluster, ("1f1b",), (1,), all_stages(profile, cluster, "d1"))
    found = largest_batch(profile, cluster, pinned_last="d1").plan
    assert found.batch_size == expected > 0
    assert found.stages[-1].devices == ("d1",)


def test_a_micro_batch_that_was_asked_for_is_kept() -> None:
    profile, cluster = problem(1, memory=(14_000, 20_000))
    found = largest_batch(profile, cluster, micro_batch=4).plan
    assert found.micro_batch == 4
    expected = by_force(profile, cluster, ("1f1b",), (4,), all_stages(profile, cluster))
    assert found.batch_size == expected > 4


def test_the_planner_is_asked_by_the_word_max_and_takes_a_measured_size() -> None:
    profile, cluster = problem(1, sizes=(2, 4), memory=(14_000, 20_000))
    plan = make_plan(profile, cluster, "max")
    assert plan.micro_batch in (2, 4)
    assert plan == largest_batch(profile, cluster).plan
    with pytest.raises(InfeasibleError, match="no plan for a batch"):
        make_plan(profile, cluster, plan.batch_size + 4)  # slices of 2 may become 3: not the very next one


def test_a_batch_too_large_to_simulate_is_predicted_all_the_same() -> None:
    profile, cluster = problem(1, memory=(10**7, 2 * 10**7))
    plan = largest_batch(profile, cluster).plan
    assert plan.batch_size > 100_000
    assert plan.prediction.images_per_s > 0
    assert "chosen to fit, not to be fast" in plan.reason


def test_without_a_limit_there_is_no_largest_batch() -> None:
    profile, _ = problem(0)
    cluster = make_cluster(SPEEDS, memory_bytes=[None, 5_000, None])
    with pytest.raises(PlanError, match="d0, d2 have no memory limit: give every device its memory"):
        largest_batch(profile, cluster)
