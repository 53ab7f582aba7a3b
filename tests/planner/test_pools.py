import dataclasses

import numpy as np
import pytest

from lightning_hetpipe.cluster import Link
from lightning_hetpipe.planner.pools import make_pools
from tests.helpers.synthetic import make_cluster, make_graph, make_profile

SPEEDS = (0.5, 0.5, 0.5, 0.25, 0.25)


def measured(noise: float, slower: tuple[int, ...] = ()):
    """Every pair of devices has a measured link; those that touch ``slower`` take three times as long."""
    rng = np.random.default_rng(0)
    links = tuple(
        Link(
            1e-4,
            1e8 * rng.uniform(1 - noise, 1 + noise) / (3 if {a, b} & set(slower) else 1),
            f"d{a}",
            f"d{b}",
        )
        for a in range(len(SPEEDS))
        for b in range(len(SPEEDS))
        if a != b
    )
    return dataclasses.replace(make_profile(make_graph(6), SPEEDS), links=links), make_cluster(SPEEDS)


def pools(noise: float, slower: tuple[int, ...] = (), **options) -> set[tuple[str, ...]]:
    return set(make_pools(*measured(noise, slower), **options).names)


@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_equal_devices_are_one_pool_though_their_links_were_measured(noise: float) -> None:
    assert pools(noise) == {("d0", "d1", "d2"), ("d3", "d4")}


def test_a_device_behind_a_slower_link_is_a_pool_of_its_own() -> None:
    assert pools(0.04, (1,)) == {("d0", "d2"), ("d1",), ("d3", "d4")}


def test_links_that_differ_by_more_than_they_scatter_keep_devices_apart() -> None:
    assert len(pools(0.6)) > 2


def test_a_pinned_device_stands_alone() -> None:
    assert pools(0.0, pinned_last="d2") == {("d0", "d1"), ("d2",), ("d3", "d4")}
