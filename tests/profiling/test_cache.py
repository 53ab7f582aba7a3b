import pytest

from lightning_hetpipe.graph import Layer, LayerGraph
from lightning_hetpipe.profiles import DeviceProfile, Profile
from lightning_hetpipe.profiling.cache import cached_profile

GRAPH = LayerGraph((Layer("fc", "Linear"),), ())


def profile(seconds):
    return Profile(GRAPH, (DeviceProfile("cpu", (1,), ((seconds,),), ((seconds,),)),))


def refuse():
    pytest.fail("measured again")


def test_what_was_measured_once_is_not_measured_again(tmp_path):
    first = cached_profile({"model": "a"}, lambda: profile(1.0), tmp_path)
    assert cached_profile({"model": "a"}, refuse, tmp_path) == first


def test_another_key_is_another_profile(tmp_path):
    cached_profile({"model": "a", "torch": "2.9"}, lambda: profile(1.0), tmp_path)
    other = cached_profile({"model": "a", "torch": "2.10"}, lambda: profile(2.0), tmp_path)
    assert other == profile(2.0)


def test_a_damaged_file_is_reported_and_measured_again(tmp_path, caplog):
    cached_profile({"model": "a"}, lambda: profile(1.0), tmp_path)
    (path,) = tmp_path.glob("*.json")
    path.write_text("{")
    assert cached_profile({"model": "a"}, lambda: profile(3.0), tmp_path) == profile(3.0)
    assert "a kept profile is not used" in caplog.text
    assert cached_profile({"model": "a"}, refuse, tmp_path) == profile(3.0)


def test_a_measurement_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError, match="out of memory"):
        cached_profile({"model": "a"}, lambda: (_ for _ in ()).throw(RuntimeError("out of memory")), tmp_path)
    assert list(tmp_path.glob("*.json")) == []
