"""Keeps measured devices between runs: one JSON file per key, written whole or not at all.

    file = {format, key, entries: [{reference_s, profile}, ...], hash of all that}

A key says everything that is known to matter. What is not known (a CPU quota, a throttled clock) shows in
``reference_s``, the seconds of a fixed computation: a file has one entry per pace that was met. Files are
replaced atomically, so reading takes no lock; whatever is wrong with a file costs a new measurement only.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

from lightning_hetpipe.cluster import Device
from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.profiles import DeviceProfile, read_device

DIRECTORY = "HETPIPE_CACHE_DIR"  # environment variable: where profiles are kept
PROFILER = 3  # counts the ways of measuring; another one measures again
FORMAT = 1
SAME_PACE = 0.15  # relative difference of reference_s within which a kept profile holds
MAX_ENTRIES = 16
_TRIES = 2
_LOCK_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileKey:
    """All that a device's figures are known to depend on.

    Attributes:
        graph: Fingerprint of the model's graph.
        inputs: Shapes and dtypes of the module's inputs.
        precision: Dtype that is computed in, such as ``float32``.
        device: Its `kind_key` counts, not its name; emulation included.
        micro_batches: Sizes in samples.
        torch_version: Such as ``2.9.1``.
        processor: What the maker calls it; `processor_name` for a CPU.
        optimizer: Class and settings of the optimizer that was measured, if one was.
        settings: Whatever else changes speed here, such as a tuned allocator.
    """

    graph: str
    inputs: str
    precision: str
    device: Device
    micro_batches: tuple[int, ...]
    torch_version: str
    processor: str
    optimizer: str = ""
    settings: str = ""

    @property
    def text(self) -> str:
        """The key as JSON; equal keys have equal texts."""
        known = {**vars(self), "device": repr(self.device.kind_key), "profiler": PROFILER}
        return json.dumps(known, sort_keys=True)


def cached_device_profile(
    key: ProfileKey,
    measure: Callable[[], DeviceProfile],
    directory: Path | None = None,
    *,
    reference: Callable[[], float] | None = None,
) -> DeviceProfile:
    """The profile that was kept under a key, or a new one, kept from now on.

    Several processes may call this at once: each measures, and all that find the same pace return
    what the first of them kept.

    Args:
        key: Of the profile.
        measure: Makes a new one.
        directory: Where profiles are kept; by default ``$HETPIPE_CACHE_DIR``, or the user's cache directory.
        reference: Seconds of a fixed computation on the device, see `reference.reference_seconds`. A
            profile that was kept at another pace is not used.

    Returns:
        A profile with the name of ``key.device``.
    """
    path = _directory(directory) / f"{_hash(key.text)}.json"
    kept: list[_Entry] = []
    try:
        kept = _read(path, key)
    except ProfileError as error:
        log.warning("%s: %s; measuring %s again", path, error, key.device.name)
    for _ in range(_TRIES if kept else 1):  # a busy moment is no other pace
        reference_s = reference() if reference else 0.0
        found = _matching(kept, reference_s)
        if found is not None:
            break
    if found is None:
        if kept:
            log.info(
                "%s keeps another pace (reference %.3g s) than when it was profiled: measuring again",
                key.device.name,
                reference_s,
            )
        found = _keep(path, key, _Entry(reference_s, measure()))
    return replace(found.profile, device=key.device.name)


def processor_name() -> str:
    """What the maker calls this machine's CPU.

    >>> processor_name() != ""
    True
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    with contextlib.suppress(OSError):  # boards
        return Path("/proc/device-tree/model").read_text(encoding="utf-8", errors="replace").strip("\0 \n")
    return platform.processor() or platform.machine() or "unknown"


@dataclass(frozen=True)
class _Entry:
    reference_s: float
    profile: DeviceProfile


def _directory(given: Path | None) -> Path:
    named = given or os.environ.get(DIRECTORY)
    return Path(named) if named else user_cache_path("lightning-hetpipe") / "profiles"


def _matching(entries: list[_Entry], reference_s: float) -> _Entry | None:
    """The entry of the nearest pace, if that is near enough."""
    nearest = min(entries, key=lambda entry: abs(entry.reference_s - reference_s), default=None)
    if nearest is None or abs(nearest.reference_s - reference_s) > SAME_PACE * nearest.reference_s:
        return None
    return nearest


def _read(path: Path, key: ProfileKey) -> list[_Entry]:
    """What is kept.

    Raises:
        ProfileError: It is not sound.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ProfileError(f"it is not of format {FORMAT}")
        if data.pop("hash", None) != _hash(_canonical(data)):
            raise ProfileError("its content was changed after it was written")
        if data["key"] != key.text:
            raise ProfileError("it was measured under another key")
        return [_Entry(entry["reference_s"], read_device(entry["profile"])) for entry in data["entries"]]
    except FileNotFoundError:
        return []
    except ProfileError:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ProfileError(f"it cannot be read ({error!r})") from error


def _keep(path: Path, key: ProfileKey, entry: _Entry) -> _Entry:
    """Adds an entry, unless another process did meanwhile; returns the one that is kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / ".lock", timeout=_LOCK_S):
            entries = []
            with contextlib.suppress(ProfileError):  # said before
                entries = _read(path, key)
            first = _matching(entries, entry.reference_s)
            if first is None:
                _write(path, key, [*entries, entry][-MAX_ENTRIES:])
            return first or entry
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        log.warning("the profile of %s is not kept for the next run: %s", key.device.name, error)
        return entry


def _write(path: Path, key: ProfileKey, entries: list[_Entry]) -> None:
    data: dict[str, Any] = {
        "format": FORMAT,
        "key": key.text,
        "entries": [
            {"reference_s": entry.reference_s, "profile": asdict(entry.profile)} for entry in entries
        ],
    }
    data["hash"] = _hash(_canonical(data))
    handle, whole = tempfile.mkstemp(".new", path.stem, path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(whole, path)
    except BaseException:
        os.unlink(whole)
        raise


def _canonical(data: object) -> str:
    return json.dumps(data, sort_keys=True)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
