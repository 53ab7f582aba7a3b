from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetpipe.cluster import LOOPBACK, Cluster, Device, Emulation, Link
from lightning_hetpipe.errors import ClusterError

CONF = Path(__file__).parents[2] / "conf" / "cluster"
SHIPPED = {
    "lab4": (0.6, 0.3, 0.3, 0.15),
    "twins": (0.5, 0.5),
    "edge6": (0.5, 0.25, 0.25, 0.1, 0.1, 0.1),
    "whimpy5": (0.6, 0.15, 0.15, 0.15, 0.15),
    "slowlink3": (0.6, 0.3, 0.3),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_cluster_has_the_promised_speeds(name: str) -> None:
    cluster = Cluster.from_yaml(CONF / f"{name}.yaml")
    assert tuple(device.emulation.speed for device in cluster.devices if device.emulation) == SHIPPED[name]
    assert all(link.emulated for link in cluster.links)


@pytest.mark.parametrize("name", SHIPPED)
def test_yaml_round_trip_gives_an_equal_cluster(name: str, tmp_path: Path) -> None:
    cluster = Cluster.from_yaml(CONF / f"{name}.yaml")
    cluster.to_yaml(tmp_path / "again.yaml")
    assert Cluster.from_yaml(tmp_path / "again.yaml") == cluster


def test_the_last_matching_link_rule_wins() -> None:
    cluster = Cluster(
        "c",
        (Device("a", host="h1"), Device("b", host="h2"), Device("c", host="h2")),
        (Link(1.0, 10.0), Link(2.0, 20.0, source="h1", target="h2"), Link(3.0, 30.0, source="a", target="c")),
    )
    assert cluster.link("a", "b") == Link(2.0, 20.0, "a", "b")
    assert cluster.link("a", "c") == Link(3.0, 30.0, "a", "c")
    assert cluster.link("c", "a") == Link(1.0, 10.0, "c", "a")


def test_a_pair_without_a_rule_is_a_loopback() -> None:
    link = Cluster("c", (Device("a"), Device("b"))).link("a", "b")
    assert (link.latency_s, link.bandwidth_bytes_per_s) == (
        LOOPBACK.latency_s,
        LOOPBACK.bandwidth_bytes_per_s,
    )


def test_memory_of_an_emulated_device_limits_plan_and_rank() -> None:
    cluster = Cluster.from_mapping({"devices": [{"name": "a", "speed": 0.5, "memory": "1MiB"}]})
    assert cluster.devices[0].memory_bytes == 2**20
    assert cluster.devices[0].emulation == Emulation(0.5, 2**20)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "a cluster must be a mapping"),
        ({}, "no devices"),
        ({"devices": [{"speed": 0.5}]}, "name '' must be non-empty"),
        ({"devices": [{"name": "a", "speed": 0}]}, "speed=0.0 was asked for"),
        ({"devices": [{"name": "a", "speed": -1}]}, "speed=-1.0 was asked for"),
        ({"devices": [{"name": "a", "speed": 2}]}, "can only be slowed"),
        ({"devices": [{"name": "a", "speed": "fast"}]}, "speed of device 0 is 'fast'"),
        ({"devices": [{"name": "a", "spede": 1}]}, "unknown keys spede"),
        ({"devices": [{"name": "a", "memory": "lots"}]}, "not bytes"),
        (
            {"devices": [{"name": "a", "memory": 0}]},
            "memory_bytes of device 'a'=0 was asked for",
        ),
        ({"devices": [{"name": "a", "speed": True}]}, "speed of device 0 is True"),
        ({"devices": [{"name": "a", "speed": float("nan")}]}, "speed=nan was asked for"),
        ({"devices": [{"name": "a", "threads": 1.5}]}, "threads of device 0 is 1.5"),
        ({"devices": [{"name": "a", "count": float("inf")}]}, "count of device 0 is inf"),
        ({"devices": [{"name": "a", "flops_per_s": -1}]}, "flops_per_s of 'a'=-1.0 was asked for"),
        ({"devices": [{"name": "a"}], "links": [{"latency": float("nan"), "bandwidth": 1}]}, "latency nan s"),
        (
            {"devices": [{"name": "a"}], "links": [{"latency": 1, "bandwidth": 1, "emulated": "no"}]},
            "emulated='no' was asked for: give True or False",
        ),
        ({"devices": [{"name": "a", "threads": 0}]}, "0 threads"),
        ({"devices": [{"name": "a", "count": 0}]}, "count 0"),
        ({"devices": [{"name": "a", "index": 0}]}, "a cpu has none"),
        ({"devices": [{"name": "a", "kind": "cuda", "index": -1}]}, "index of 'a'=-1 was asked for"),
        ({"devices": [{"name": "a", "kind": "cuda", "speed": 0.5}]}, "only a cpu can pretend"),
        ({"devices": [{"name": "a"}, {"name": "a"}]}, "names devices twice: a"),
        ({"devices": "a"}, "devices must be a list"),
        ({"devices": [{"name": "a"}], "links": [{"latency": 1}]}, "link 0 has no bandwidth"),
        ({"devices": [{"name": "a"}], "links": [{"latency": 1, "bandwidth": 0}]}, "bandwidth > 0"),
        (
            {"devices": [{"name": "a"}], "links": [{"latency": 1, "bandwidth": 1, "source": "z"}]},
            "link at 'z', which is neither a device nor a host",
        ),
    ],
)
def test_a_malformed_cluster_gives_one_clear_error(data: object, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_mapping(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "message"), [("devices: [", "is not YAML"), ("7", "must be a mapping")])
def test_a_broken_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ClusterError, match=message) as error:
        Cluster.from_yaml(tmp_path / "bad.yaml")
    assert "bad.yaml" in str(error.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ClusterError, match=r"nowhere.yaml cannot be read"):
        Cluster.from_yaml("nowhere.yaml")


def test_an_unknown_device_is_named_with_the_known_ones() -> None:
    with pytest.raises(ClusterError, match="'b' is not in cluster 'c'; it has a"):
        Cluster("c", (Device("a"),)).device("b")


def test_accelerators_are_counted_by_host_and_kind_unless_they_have_an_index() -> None:
    cluster = Cluster.from_mapping(
        {
            "devices": [
                {"name": "a", "kind": "cuda", "host": "x"},
                {"name": "b", "host": "x"},
                {"name": "c", "kind": "cuda", "host": "x", "count": 2},
                {"name": "d", "kind": "cuda", "host": "y"},
                {"name": "e", "kind": "cuda", "host": "x", "count": 2, "index": 0},
            ]
        }
    )
    assert [device.index for device in cluster.devices] == [0, None, 1, 2, 0, 0, 0]
    assert Cluster.from_mapping(cluster.to_mapping()) == cluster
    permuted = replace(cluster, devices=tuple(map(cluster.device, ("d", "c2", "a"))))
    assert [device.index for device in permuted.devices] == [0, 2, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device(3), "name=3 was asked for: give the name of a device as text"),
        (lambda: Device("a", threads=1.5), "device 'a' asks for 1.5 threads"),
        (lambda: Device("a", memory_bytes="1GB"), "memory_bytes of device 'a'='1GB' was asked for"),
        (lambda: Device("a", kind="cuda", index="0"), "index of 'a'='0' was asked for"),
        (lambda: Device("a", emulation=0.5), "emulation of 'a'=0.5 was asked for: give an Emulation"),
        (lambda: Device("a", flops_per_s="many"), "flops_per_s of 'a'='many' was asked for"),
        (lambda: Emulation("half"), "speed='half' was asked for: give a fraction"),
        (lambda: Link("1ms", 1.0), "latency '1ms' s"),
        (lambda: Link(0.1, None), "bandwidth None bytes/s"),
        (lambda: Link(0.1, 1.0, source=0), "source=0 was asked for: give a device name"),
        (lambda: Cluster("c", Device("a")), "devices=.* was asked for: give a tuple of Device values"),
        (lambda: Cluster("c", (Device("a"),), (0.1,)), "give a tuple of Link values"),
        (lambda: Cluster(None, (Device("a"),)), "name=None was asked for"),
    ],
)
def test_values_of_the_wrong_type_give_one_clear_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        make()
