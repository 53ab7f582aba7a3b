"""Keeps measured devices, links and software costs between runs.

A key says everything that is known to matter. What is not known (a CPU quota, a throttled clock) shows in
``reference_s``, the seconds of a fixed computation: a file has one entry per pace that was met.
"""

import contextlib
import json
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_hetpipe.checks import is_number
from lightning_hetpipe.cluster import Device, Link
from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.profiles import DeviceProfile, Software, read_device
from lightning_hetpipe.profiling.kept import KeptFile

PROFILER = 6  # counts the ways of measuring; another one measures again
SAME_PACE = 0.15  # relative difference of reference_s within which a kept profile holds
MAX_ENTRIES = 16
_TRIES = 2

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
    file = KeptFile(key.text, key.device.name, asdict, _read_entry, MAX_ENTRIES, directory)
    kept = file.entries()
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
        found = file.keep(_Entry(reference_s, measure()), lambda others: _matching(others, reference_s))
    return replace(found.profile, device=key.device.name)


def links_file(key: Mapping[str, object], directory: Path | None = None) -> KeptFile[tuple[Link, ...]]:
    """Where the links between some ranks are kept.

    Args:
        key: All that they are known to depend on, as JSON knows it.
        directory: As for `cached_device_profile`.
    """
    text = json.dumps({"links": PROFILER, **key}, sort_keys=True)
    return KeptFile(text, "the links", lambda links: list(map(asdict, links)), _read_links, 1, directory)


def software_file(key: Mapping[str, object], directory: Path | None = None) -> KeptFile[Software]:
    """Where the costs of messages and collectives on some processors are kept.

    Args:
        key: All that they are known to depend on, as JSON knows it.
        directory: As for `cached_device_profile`.
    """
    text = json.dumps({"software": PROFILER, **key}, sort_keys=True)
    about = "what messages and collectives cost"
    return KeptFile(text, about, asdict, lambda data: Software(**data), 1, directory)


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


def _matching(entries: Sequence[_Entry], reference_s: float) -> _Entry | None:
    """The entry of the nearest pace, if that is near enough."""
    nearest = min(entries, key=lambda entry: abs(entry.reference_s - reference_s), default=None)
    if nearest is None or abs(nearest.reference_s - reference_s) > SAME_PACE * nearest.reference_s:
        return None
    return nearest


def _read_links(data: Any) -> tuple[Link, ...]:
    return tuple(Link(**entry) for entry in data)


def _read_entry(data: Any) -> _Entry:
    """An entry from what `dataclasses.asdict` made of it.

    Raises:
        ProfileError: It is not sound.
    """
    if not is_number(data["reference_s"]):
        raise ProfileError(f"its reference_s is {data['reference_s']!r}")
    return _Entry(data["reference_s"], read_device(data["profile"]))
