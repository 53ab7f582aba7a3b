import threading
import time
from pathlib import Path

import pytest
from torch.distributed import Store

from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.engine import software
from lightning_hetpipe.engine.c10d import Collectives
from lightning_hetpipe.engine.session import Engine
from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.profiles import Software
from tests.helpers.outcomes import messages, outcomes, values


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETPIPE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(software, "REPEATS", 4)
    return tmp_path


def cluster(n: int, kind: str = "cpu") -> Cluster:
    return Cluster("lab", tuple(Device(f"d{rank}", kind=kind) for rank in range(n)))


def assert_sane(found: Software) -> None:
    """Microseconds to tens of milliseconds, with whatever else runs here; and no faster than memory."""
    assert 1e-6 < found.send_s + 2**20 * found.send_s_per_byte < 50e-3
    assert 1e-6 < found.collective_s + 2**20 * found.collective_s_per_byte < 50e-3
    assert found.send_s + found.collective_s > 0
    assert found.send_s_per_byte < 1e-7
    assert found.collective_s_per_byte < 1e-7


def measure(rank: int, store: Store, n: int, dies: bool = False) -> Software:
    if dies and rank == 1:
        software.member_software = fall  # in this process only
    engine = Engine(store, rank, n, timeout_s=20, cluster=cluster(n))
    found = engine.measure_software(cluster(n))
    engine.close()
    return found


def fall(group: Collectives, member: int) -> Software | None:
    raise ZeroDivisionError("fell")


def test_two_threads_of_a_process_find_what_messages_and_collectives_cost(own_cache: Path) -> None:
    threads = threading.active_count()
    found = software.software_here(cluster(2))
    assert_sane(found)
    assert threading.active_count() == threads
    assert len(list(own_cache.glob("*.json"))) == 1


def test_what_was_measured_once_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = software.software_here(cluster(2))
    monkeypatch.setattr(software, "between_threads", lambda: pytest.fail("measured again"))
    assert software.software_here(cluster(3)) == first


def test_all_ranks_get_what_ranks_0_and_1_measured_and_later_runs_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = values(outcomes(3, measure, 3))
    assert_sane(first[0])
    assert first == [first[0]] * 3
    monkeypatch.setattr(software, "member_software", fall)
    assert values(outcomes(2, measure, 2)) == [first[0]] * 2


def test_one_device_and_gpus_are_not_measured() -> None:
    assert software.software_here(cluster(1)) == Software()
    assert software.software_here(cluster(2, "cuda")) == Software()


def test_a_rank_that_fails_meanwhile_is_named_by_the_others() -> None:
    begun_s = time.monotonic()
    texts = messages(outcomes(3, measure, 3, True), 1, "raise")
    assert len(texts) == 2
    assert all("rank 1 failed in measuring what messages cost: ZeroDivisionError: fell" in t for t in texts)
    assert time.monotonic() - begun_s < software.PATIENCE_S


def test_a_thread_that_fails_ends_the_other_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = software.member_software

    def part(group: Collectives, member: int) -> Software | None:
        return fall(group, member) if member == 1 else whole(group, member)

    monkeypatch.setattr(software, "member_software", part)
    begun_s = time.monotonic()
    with pytest.raises(ProfileError, match="what messages cost on this machine cannot be measured"):
        software.between_threads()
    assert time.monotonic() - begun_s < 2 * software.PATIENCE_S
