import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import Store

from lightning_hetpipe.cluster import Cluster, Device, Link
from lightning_hetpipe.engine import probe
from lightning_hetpipe.engine.session import Engine
from lightning_hetpipe.errors import RankFailedError
from tests.helpers.outcomes import outcomes, values


def cluster(n: int, *links: Link) -> Cluster:
    return Cluster("lab", tuple(Device(f"d{rank}") for rank in range(n)), links)


def measure(rank: int, store: Store, lab: Cluster, changes: dict[str, Any] | None = None) -> tuple[Link, ...]:
    for name, value in (changes or {}).items():
        setattr(probe, name, value)  # in this process only
    engine = Engine(store, rank, len(lab.devices), timeout_s=20, cluster=lab)
    found = engine.measure_links()
    engine.close()
    return found


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETPIPE_CACHE_DIR", str(tmp_path))


def measured(lab: Cluster, changes: dict[str, Any] | None = None) -> dict[tuple[str, str], Link]:
    found = values(outcomes(len(lab.devices), measure, lab, changes))
    assert all(links == found[0] for links in found)
    return {(link.source, link.target): link for link in found[0]}


def directed(source: str, target: str, latency_s: float, bytes_per_s: float) -> Link:
    return Link(latency_s, bytes_per_s, source, target, emulated=True)


PATIENT = {"BUDGET_S": 1.5}  # more repeats: exact figures are asked for, whatever else runs here


def close_to(expected: float) -> Any:
    return pytest.approx(expected, rel=0.25)


def test_latency_and_bandwidth_of_a_slow_link_are_found_each_way() -> None:
    lab = cluster(2, directed("d0", "d1", 20e-3, 1e6), directed("d1", "d0", 60e-3, 4e6))
    links = measured(lab, PATIENT)
    assert links["d0", "d1"].latency_s == close_to(20e-3)
    assert links["d0", "d1"].bandwidth_bytes_per_s == close_to(1e6)
    assert links["d1", "d0"].latency_s == close_to(60e-3)
    assert links["d1", "d0"].bandwidth_bytes_per_s == close_to(4e6)


def another_clock_on_every_rank() -> probe.Place:
    return probe.Place("one machine", f"clock of {os.getpid()}", "")


def test_without_a_common_clock_both_directions_share_the_latency_and_keep_their_bandwidths() -> None:
    lab = cluster(2, directed("d0", "d1", 20e-3, 1e6), directed("d1", "d0", 60e-3, 4e6))
    links = measured(lab, PATIENT | {"_place": another_clock_on_every_rank})
    assert links["d0", "d1"].latency_s == close_to(40e-3)
    assert links["d1", "d0"].latency_s == close_to(40e-3)
    assert links["d0", "d1"].bandwidth_bytes_per_s == close_to(1e6)
    assert links["d1", "d0"].bandwidth_bytes_per_s == close_to(4e6)


def test_a_slow_link_stands_out_among_fast_ones() -> None:
    lab = cluster(3, directed("d1", "d2", 20e-3, 1e6), directed("d2", "d1", 20e-3, 1e6))
    links = measured(lab)
    assert len(links) == 6
    slow = {ends for ends, link in links.items() if link.transfer_s(50_000) > 50e-3}
    assert slow == {("d1", "d2"), ("d2", "d1")}
    assert all(link.latency_s > 0 and not link.emulated for link in links.values())


def test_a_very_slow_link_ends_with_the_sizes_it_can_bear() -> None:
    links = measured(cluster(2, Link(1e-3, 50e3, emulated=True)), {"BUDGET_S": 0.05})
    assert links["d0", "d1"].bandwidth_bytes_per_s == close_to(50e3)


def test_one_rank_has_no_links() -> None:
    engine = Engine(None, 0, 1, timeout_s=5)
    assert engine.measure_links() == ()
    engine.close()


def refuse_to_measure(line: Any) -> probe.Sent:
    raise AssertionError("measured again")


SLOW, SLOWER = Link(20e-3, 1e6, emulated=True), Link(60e-3, 1e6, emulated=True)
NOTHING_DECLARED = {"_key": lambda *_: {"lab": 1}}


def test_links_that_were_measured_once_are_only_checked_by_later_runs() -> None:
    first = measured(cluster(2, SLOW))
    assert measured(cluster(2, SLOW), {"_send": refuse_to_measure}) == first


def test_a_kept_link_that_became_slower_is_measured_again_though_nobody_declared_it() -> None:
    measured(cluster(2, SLOW), NOTHING_DECLARED)
    links = measured(cluster(2, SLOWER), NOTHING_DECLARED)
    assert links["d0", "d1"].latency_s > 40e-3
    assert measured(cluster(2, SLOWER), NOTHING_DECLARED | {"_send": refuse_to_measure}) == links


def test_other_declared_figures_other_names_and_other_machines_are_other_links() -> None:
    places = [probe.Place("machine", "clock", "network")] * 2

    def key(lab: Cluster, where: list[probe.Place] = places) -> dict[str, object]:
        return probe._key(lab, where, probe._classes(lab, where))

    renamed = Cluster("lab", (Device("d0"), Device("e1")), (SLOW,))
    moved = [places[0], probe.Place("machine started anew", "clock", "network")]
    keys = [key(cluster(2, SLOW)), key(cluster(2, SLOWER)), key(renamed), key(cluster(2, SLOW), moved)]
    assert all(one != other for one, other in itertools.combinations(keys, 2))
    assert key(cluster(2, SLOW)) == keys[0]


def test_a_broken_file_of_links_costs_a_measurement(tmp_path: Path) -> None:
    first = measured(cluster(2, SLOW))
    (path,) = tmp_path.glob("*.json")
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    again = measured(cluster(2, SLOW))
    assert again["d0", "d1"].latency_s == pytest.approx(first["d0", "d1"].latency_s, rel=0.5)
    assert len(path.read_text()) > len(whole) // 2


def leave_out_one(rank: int, store: Store) -> str:
    if rank == 2:
        Engine(store, rank, 3, timeout_s=20).control.fail(ValueError("no data"))
        return ""
    with pytest.raises(RankFailedError, match="rank 2 failed: ValueError: no data") as caught:
        Engine(store, rank, 3, timeout_s=20).measure_links()  # the others may still be joining
    return str(caught.value)


def test_a_rank_that_fails_instead_of_measuring_is_named_by_the_others() -> None:
    assert all("no data" in text for text in values(outcomes(3, leave_out_one))[:2])


def test_pairs_under_one_rule_share_what_a_few_of_them_show() -> None:
    place = probe.Place("machine", "clock", "network")
    classes = probe._classes(cluster(8, directed("d0", "d1", 1e-3, 1e6)), [place] * 8)
    pairs = probe._representatives(classes)
    assert (0, 1) in pairs
    assert len(pairs) == probe.PAIRS_PER_CLASS
    measured = {classes[ends] for pair in pairs for ends in (pair, pair[::-1])}
    assert measured == set(classes.values())


def test_every_pair_of_machines_is_measured_and_disjoint_ones_at_once() -> None:
    lab = Cluster("lab", tuple(Device(f"d{rank}", host=f"host{rank}") for rank in range(6)))
    places = [probe.Place(f"machine{rank}", f"clock{rank}", "") for rank in range(6)]
    pairs = probe._representatives(probe._classes(lab, places))
    assert len(pairs) == 15
    rounds = probe._rounds(pairs, [place.machine for place in places])
    assert sorted(pair for together in rounds for pair in together) == pairs
    for together in rounds:
        ranks = [rank for pair in together for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert len(rounds) < len(pairs)


def test_pairs_on_one_machine_are_measured_one_after_the_other() -> None:
    assert probe._rounds([(0, 1), (2, 3)], ["here"] * 4) == [[(0, 1)], [(2, 3)]]
