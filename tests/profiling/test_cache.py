import json
import logging
import math
import multiprocessing
import resource
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightning_hetpipe.cluster import Device, Emulation
from lightning_hetpipe.profiles import DeviceProfile
from lightning_hetpipe.profiling import cache, kept
from lightning_hetpipe.profiling.cache import ProfileKey, cached_device_profile

KEY = ProfileKey(
    graph="abc",
    inputs="x: [8, 3] float32",
    precision="float32",
    device=Device("left", emulation=Emulation(0.5)),
    micro_batches=(1, 2),
    torch_version="2.9.1",
    processor="Chip 9000",
)


def figures(seconds: float, name: str = "left") -> DeviceProfile:
    row = (seconds, 2 * seconds)
    return DeviceProfile(name, (1, 2), (row, row), (row, row), 0.02, 1e-9, (100.0, 0.1 + 0.2))


def refuse() -> DeviceProfile:
    pytest.fail("measured again")


@pytest.fixture(autouse=True)
def only_this_directory_and_warnings(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(kept.DIRECTORY, str(tmp_path))
    caplog.set_level(logging.WARNING, "lightning_hetpipe")


def kept_file(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def test_what_was_measured_once_is_not_measured_again(tmp_path, caplog):
    assert cached_device_profile(KEY, lambda: figures(0.1), tmp_path) == figures(0.1)
    assert cached_device_profile(KEY, refuse, tmp_path) == figures(0.1)
    assert not caplog.messages


def test_devices_of_one_kind_share_figures_under_their_own_names(tmp_path):
    cached_device_profile(KEY, lambda: figures(0.1), tmp_path)
    twin = replace(KEY, device=replace(KEY.device, name="right"))
    assert cached_device_profile(twin, refuse, tmp_path) == figures(0.1, "right")


@pytest.mark.parametrize(
    "change",
    [
        {"graph": "abd"},
        {"inputs": "x: [8, 4] float32"},
        {"precision": "bfloat16"},
        {"device": Device("left", emulation=Emulation(0.25))},
        {"device": Device("left", threads=2, emulation=Emulation(0.5))},
        {"micro_batches": (1, 2, 4)},
        {"torch_version": "2.10.0"},
        {"processor": "Chip 9001"},
        {"optimizer": "AdamW(lr=0.1)"},
        {"settings": "untuned"},
    ],
    ids=str,
)
def test_another_key_is_measured_and_kept_apart(tmp_path, change):
    cached_device_profile(KEY, lambda: figures(0.1), tmp_path)
    other = replace(KEY, **change)
    assert cached_device_profile(other, lambda: figures(0.7), tmp_path).forward_s[0][0] == 0.7
    assert cached_device_profile(KEY, refuse, tmp_path) == figures(0.1)


def test_another_way_of_measuring_measures_again(tmp_path, monkeypatch):
    cached_device_profile(KEY, lambda: figures(0.1), tmp_path)
    monkeypatch.setattr(cache, "PROFILER", cache.PROFILER + 1)
    assert cached_device_profile(KEY, lambda: figures(0.7), tmp_path) == figures(0.7)


def test_the_environment_names_the_directory_and_an_argument_overrules_it(tmp_path, monkeypatch):
    named, given = tmp_path / "named", tmp_path / "given"
    monkeypatch.setenv(kept.DIRECTORY, str(named))
    cached_device_profile(KEY, lambda: figures(0.1))
    cached_device_profile(KEY, lambda: figures(0.2), given)
    assert kept_file(named) != kept_file(given)
    assert cached_device_profile(KEY, refuse) == figures(0.1)
    assert cached_device_profile(KEY, refuse, given) == figures(0.2)


def test_without_both_profiles_are_kept_in_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.delenv(kept.DIRECTORY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cached_device_profile(KEY, lambda: figures(0.1))
    assert list(tmp_path.glob("home/**/*.json"))


def edited(path: Path, **changes: object) -> str:
    return json.dumps(json.loads(path.read_text()) | changes)


def with_faster_figures(path: Path) -> str:
    data = json.loads(path.read_text())
    data["entries"][0]["profile"]["forward_s"][0][0] /= 10
    return json.dumps(data)


def signed_again(path: Path, **changes: object) -> str:
    """A file whose hash is right though its content is not ours."""
    data = json.loads(path.read_text()) | changes
    del data["hash"]
    return json.dumps(data | {"hash": kept.hash_of(kept.canonical(data))})


def entry_with(**changes: object) -> dict[str, object]:
    return {"reference_s": 0.0, "profile": asdict(figures(0.1)) | changes}


DAMAGE = {
    "empty": lambda path: "",
    "truncated": lambda path: path.read_text()[: len(path.read_text()) // 2],
    "not JSON": lambda path: "seconds: 3",
    "another JSON": lambda path: "[1, 2]",
    "deeply nested": lambda path: "[" * 200_000,
    "another format": lambda path: edited(path, format=kept.FORMAT + 1),
    "another key": lambda path: edited(path, key=replace(KEY, graph="xyz").text),
    "another key, signed": lambda path: signed_again(path, key=replace(KEY, graph="xyz").text),
    "other figures": with_faster_figures,
    "other fields, signed": lambda path: signed_again(
        path, entries=[{"reference_s": 0.0, "profile": {"a": 1}}]
    ),
    "no entries, signed": lambda path: signed_again(path, entries=None),
    "NaN, signed": lambda path: signed_again(path, entries=[entry_with(forward_s=((math.nan, 1), (1, 1)))]),
    "negative, signed": lambda path: signed_again(path, entries=[entry_with(spread=-0.1)]),
    "text for numbers, signed": lambda path: signed_again(path, entries=[entry_with(peak_bytes="12")]),
    "a NaN pace, signed": lambda path: signed_again(path, entries=[entry_with() | {"reference_s": math.nan}]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_sound_costs_one_line_and_a_new_measurement(tmp_path, caplog, damage):
    cached_device_profile(KEY, lambda: figures(0.1), tmp_path)
    path = kept_file(tmp_path)
    path.write_text(DAMAGE[damage](path))
    assert cached_device_profile(KEY, lambda: figures(0.3), tmp_path) == figures(0.3)
    assert [message.count("measuring left again") for message in caplog.messages] == [1]
    assert cached_device_profile(KEY, refuse, tmp_path) == figures(0.3)


def test_bytes_that_are_no_text_cost_one_line_and_a_new_measurement(tmp_path, caplog):
    cached_device_profile(KEY, lambda: figures(0.1), tmp_path)
    kept_file(tmp_path).write_bytes(b"\xff\xfe\x00{")
    assert cached_device_profile(KEY, lambda: figures(0.3), tmp_path) == figures(0.3)
    assert len(caplog.messages) == 1


def test_a_folder_in_the_place_of_a_file_costs_a_measurement_at_every_run_and_says_so(tmp_path, caplog):
    (tmp_path / f"{kept.hash_of(KEY.text)}.json").mkdir()
    assert cached_device_profile(KEY, lambda: figures(0.3), tmp_path) == figures(0.3)
    assert "measuring left again" in caplog.messages[0]
    assert "not kept for the next run" in caplog.messages[1]


def test_a_file_that_may_not_be_read_costs_one_line_and_a_new_measurement(tmp_path, monkeypatch, caplog):
    cached_device_profile(KEY, lambda: figures(0.1), tmp_path)
    read = Path.read_text

    def refuse_to_read(path: Path, **options: str) -> str:
        if path == kept_file(tmp_path):
            raise PermissionError(13, "Permission denied")
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", refuse_to_read)  # the superuser may read any real file
    assert cached_device_profile(KEY, lambda: figures(0.3), tmp_path) == figures(0.3)
    assert ["Permission denied" in message for message in caplog.messages] == [True]


def test_the_file_of_another_key_under_this_keys_name_is_not_used(tmp_path, caplog):
    other = replace(KEY, graph="xyz")
    cached_device_profile(other, lambda: figures(0.1), tmp_path)
    foreign = kept_file(tmp_path)
    foreign.rename(tmp_path / f"{kept.hash_of(KEY.text)}.json")
    assert cached_device_profile(KEY, lambda: figures(0.3), tmp_path) == figures(0.3)
    assert "under another key" in caplog.messages[0]


@pytest.mark.parametrize("now_s", [0.056, 0.045])
def test_a_profile_holds_at_nearly_the_same_pace(tmp_path, now_s):
    cached_device_profile(KEY, lambda: figures(0.1), tmp_path, reference=lambda: 0.05)
    assert cached_device_profile(KEY, refuse, tmp_path, reference=lambda: now_s) == figures(0.1)


@pytest.mark.parametrize("now_s", [0.06, 0.2, 0.04])
def test_a_device_that_was_throttled_meanwhile_is_measured_again_and_both_paces_are_kept(tmp_path, now_s):
    cached_device_profile(KEY, lambda: figures(0.1), tmp_path, reference=lambda: 0.05)
    throttled = cached_device_profile(KEY, lambda: figures(0.4), tmp_path, reference=lambda: now_s)
    assert throttled == figures(0.4)
    assert cached_device_profile(KEY, refuse, tmp_path, reference=lambda: now_s) == figures(0.4)
    assert cached_device_profile(KEY, refuse, tmp_path, reference=lambda: 0.05) == figures(0.1)


def test_a_busy_moment_is_not_taken_for_another_pace(tmp_path):
    cached_device_profile(KEY, lambda: figures(0.1), tmp_path, reference=lambda: 0.05)
    readings = iter([0.2, 0.05])
    assert cached_device_profile(KEY, refuse, tmp_path, reference=lambda: next(readings)) == figures(0.1)


def test_only_the_paces_met_last_are_kept(tmp_path):
    for pace in range(cache.MAX_ENTRIES + 3):
        cached_device_profile(KEY, lambda: figures(0.1), tmp_path, reference=lambda pace=pace: 2.0**pace)
    assert len(json.loads(kept_file(tmp_path).read_text())["entries"]) == cache.MAX_ENTRIES


def test_a_measurement_that_fails_leaves_nothing_behind(tmp_path):
    def fail() -> DeviceProfile:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        cached_device_profile(KEY, fail, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_only_logged(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    assert cached_device_profile(KEY, lambda: figures(0.1), folder) == figures(0.1)
    assert any("not kept for the next run" in message for message in caplog.messages)


def test_a_directory_that_cannot_be_written_to_still_gives_what_it_keeps(tmp_path, monkeypatch, caplog):
    cached_device_profile(KEY, lambda: figures(0.1), tmp_path)

    def refuse_to_write(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(kept, "FileLock", refuse_to_write)
    assert cached_device_profile(KEY, refuse, tmp_path) == figures(0.1)
    other = replace(KEY, graph="xyz")
    assert cached_device_profile(other, lambda: figures(0.2), tmp_path) == figures(0.2)
    assert ["Permission denied" in message for message in caplog.messages] == [True]


def test_a_full_disk_is_only_logged_and_leaves_no_half_a_file(tmp_path, caplog):
    cached_device_profile(KEY, lambda: figures(0.1), tmp_path, reference=lambda: 1.0)
    before = kept_file(tmp_path).read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        found = cached_device_profile(KEY, lambda: figures(0.2), tmp_path, reference=lambda: 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found == figures(0.2)
    assert ["not kept for the next run" in message for message in caplog.messages] == [True]
    assert kept_file(tmp_path).read_text() == before
    assert not list(tmp_path.glob("*.new"))


def profile_at_once(folder, barrier, seconds, results):
    def measure() -> DeviceProfile:
        barrier.wait(20)  # both found nothing, and measure
        return figures(seconds)

    found = cached_device_profile(KEY, measure, folder, reference=lambda: 0.05)
    results.put(found)


def test_two_processes_that_profile_at_once_agree_on_one_profile(tmp_path):
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        folder, barrier, results = tmp_path / str(attempt), context.Barrier(2), context.Queue()
        processes = [
            context.Process(target=profile_at_once, args=(folder, barrier, seconds, results))
            for seconds in (0.1, 0.2)
        ]
        for process in processes:
            process.start()
        found = [results.get(timeout=20) for _ in processes]
        for process in processes:
            process.join(20)
        assert found[0] == found[1]
        assert found[0] in (figures(0.1), figures(0.2))
        assert cached_device_profile(KEY, refuse, folder, reference=lambda: 0.05) == found[0]


def keep_many(folder, first, results):
    for number in range(first, first + 20):
        key = replace(KEY, graph=str(number % 3))
        cached_device_profile(key, lambda: figures(0.1), folder, reference=lambda n=number: 1.5 ** (n % 10))
    results.put(first)


def test_processes_that_write_the_same_files_never_meet_a_broken_one(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=keep_many, args=(tmp_path, first, results)) for first in (0, 7)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 30
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        for path in tmp_path.glob("*.json"):
            assert json.loads(path.read_text())["format"] == kept.FORMAT
    for process in processes:
        process.join(5)
        assert process.exitcode == 0
    counts = [len(json.loads(path.read_text())["entries"]) for path in tmp_path.glob("*.json")]
    assert len(counts) == 3
    assert sum(counts) == len({(n % 3, n % 10) for n in range(27)})
