"""Keeps profiles between runs: one JSON file per key, written whole or not at all."""

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.plans import content_hash
from lightning_hetpipe.profiles import Profile

log = logging.getLogger(__name__)


def cached_profile(
    key: Mapping[str, object], make: Callable[[], Profile], folder: Path | None = None
) -> Profile:
    """The profile that was kept under this key, or a new one, kept from now on.

    Args:
        key: All that the figures depend on: model, shapes, dtype, devices, versions.
        make: Measures; called while nobody else measures for the same key.
        folder: Where profiles are kept; the user's cache folder by default.
    """
    folder = folder or user_cache_path("lightning-hetpipe") / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{content_hash(json.dumps(key, sort_keys=True, default=str))}.json"
    with FileLock(path.with_suffix(".lock")):
        if path.exists():
            try:
                return Profile.load(path)
            except ProfileError as error:
                log.warning("a kept profile is not used: %s", error)
        profile = make()
        whole = path.with_suffix(f".{os.getpid()}")
        profile.save(whole)
        whole.replace(path)
        return profile
