from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_hetpipe.cluster import Cluster, Device, Link
from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.graph import READER, Layer, LayerGraph, Value
from lightning_hetpipe.profiles import DeviceProfile, Profile, Software

GRAPH = LayerGraph((Layer("l0", "Op", ("w",), 4), Layer("l1", "Op")), (Value("x", READER, (0,), 1),))
DEVICE = DeviceProfile("a", (2, 4), ((1.0, 2.0), (0.5, 0.5)), ((2.0, 3.0), (1.0, 4.0)), spread=0.1)
SOFTWARE = Software(1e-4, 2e-10, 3e-4, 0.0625)
PROFILE = Profile(GRAPH, (DEVICE,), (Link(0.1, 5.0, "a", "b"),), SOFTWARE, environment={"torch": "2"})


def test_a_measured_size_is_returned_as_measured() -> None:
    forward, backward = DEVICE.layer_seconds(4)
    assert forward.tolist() == [2.0, 0.5]
    assert backward.tolist() == [3.0, 4.0]


def test_sizes_between_and_beyond_are_linear() -> None:
    assert DEVICE.layer_seconds(3)[0].tolist() == [1.5, 0.5]
    assert DEVICE.layer_seconds(8)[1].tolist() == [5.0, 10.0]


def test_extrapolation_never_goes_below_zero() -> None:
    assert DEVICE.layer_seconds(1)[1].tolist() == [1.5, 0.0]


def test_a_single_size_is_proportional() -> None:
    device = DeviceProfile("a", (2,), ((1.0,),), ((3.0,),))
    assert np.allclose(device.layer_seconds(6), [[3.0], [9.0]])


def test_a_measured_link_replaces_the_declared_one() -> None:
    cluster = Cluster("c", (Device("a"), Device("b")), (Link(9.0, 9.0),))
    assert PROFILE.link(cluster, "a", "b").latency_s == 0.1
    assert replace(PROFILE, software=Software()).link(cluster, "b", "a").latency_s == 9.0


def test_a_declared_link_comes_after_what_its_sender_is_occupied() -> None:
    cluster = Cluster("c", (Device("a"), Device("b")), (Link(9.0, 9.0),))
    way = replace(PROFILE, software=Software(send_s=2.0, send_s_per_byte=3.0)).link(cluster, "b", "a")
    assert way.transfer_s(0) == 11.0
    assert way.transfer_s(10) == pytest.approx(11.0 + 10 * (1 / 9 + 3))


def test_what_is_left_after_the_sender_is_the_link_and_never_less_than_nothing() -> None:
    link = Link(0.1, 5.0, "a", "b", emulated=True)
    back = SOFTWARE.after(SOFTWARE.before(link))
    assert (back.latency_s, back.bandwidth_bytes_per_s) == pytest.approx((0.1, 5.0))
    assert (back.source, back.target, back.emulated) == ("a", "b", True)
    fast = SOFTWARE.after(Link(1e-5, 1e12))
    assert fast.latency_s == 0
    assert fast.transfer_s(1e6) < 1e-6


@pytest.mark.parametrize("value", [-1.0, float("nan"), "0.1", True])
def test_software_costs_are_numbers_of_seconds(value: object) -> None:
    with pytest.raises(ProfileError, match="collective_s="):
        Software(collective_s=value)


def test_software_is_part_of_what_a_profile_is() -> None:
    assert replace(PROFILE, software=Software()).content_hash != PROFILE.content_hash


def test_a_saved_profile_is_read_back_equal(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a profile of format"),
        ("{", "not JSON"),
        (PROFILE.to_json()[:300], "not JSON"),
        (PROFILE.to_json().replace('"graph"', '"grph"'), "damaged"),
        (PROFILE.to_json().replace('"format": 3', '"format": 0'), "measure again"),
        (PROFILE.to_json().replace("3.0", "NaN"), "backward_s has a value that is not a finite number"),
        (PROFILE.to_json().replace("3.0", "-3.0"), "backward_s has a value that is not a finite number"),
        (PROFILE.to_json().replace("3.0", '"3.0"'), "backward_s has a value that is not a finite number"),
        (PROFILE.to_json().replace("3.0", "[3.0]"), "backward_s has a value that is not a finite number"),
        (PROFILE.to_json().replace('"parameter_bytes": 4', '"parameter_bytes": -4'), "size that is not"),
        (PROFILE.to_json().replace('"producer": -1', '"producer": 7'), "a layer that it does not have"),
        (PROFILE.to_json().replace('"measured"', '"guessed"'), "origin='guessed' was asked for"),
        (PROFILE.to_json().replace("5.0", "NaN"), "bandwidth nan bytes/s"),
        (PROFILE.to_json().replace("0.0625", "-1"), "collective_s_per_byte=-1 was asked for"),
        (PROFILE.to_json().replace("collective_s_per", "per"), "damaged"),
        ('{"a":' * 200_000, "not JSON"),
        ("", "not JSON"),
    ],
)
def test_a_damaged_file_gives_one_clear_error(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ProfileError, match=message):
        Profile.load(tmp_path / "p.json")


def test_bytes_that_are_no_text_and_a_folder_are_no_profiles(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00{")
    for path in (tmp_path / "p.json", tmp_path):
        with pytest.raises(ProfileError, match=f"profile {path} cannot be read"):
            Profile.load(path)


def test_a_device_that_was_not_profiled_is_named() -> None:
    with pytest.raises(ProfileError, match="'b' was not profiled; this profile has a"):
        PROFILE.device("b")


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(ProfileError, match="has 1 layers, the graph 2"):
        Profile(GRAPH, (DeviceProfile("a", (1,), ((1.0,),), ((1.0,),)),))
