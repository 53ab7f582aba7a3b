"""Keeps what was measured between runs: one JSON file per key, written whole or not at all.

    file = {format, key, entries: [...], hash of all that}

Files are replaced atomically, so reading takes no lock; whatever is wrong with a file costs a new
measurement and a line in the log.
"""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from filelock import FileLock
from platformdirs import user_cache_path

from lightning_hetpipe.errors import ClusterError, ProfileError

DIRECTORY = "HETPIPE_CACHE_DIR"  # environment variable: where measurements are kept
FORMAT = 1
_LOCK_S = 10.0

log = logging.getLogger(__name__)
E = TypeVar("E")


@dataclass(frozen=True)
class KeptFile(Generic[E]):
    """The entries that are kept under one key.

    Attributes:
        key: All that the entries are known to depend on; equal keys share a file.
        about: What was measured, for the log.
        pack, unpack: Make JSON of an entry, and an entry of JSON.
        most: Entries to keep; the oldest go first.
        given: Where files are kept; by default ``$HETPIPE_CACHE_DIR``, or the user's cache directory.
    """

    key: str
    about: str
    pack: Callable[[E], Any]
    unpack: Callable[[Any], E]
    most: int
    given: Path | None = None

    @property
    def path(self) -> Path:
        named = self.given or os.environ.get(DIRECTORY)
        folder = Path(named) if named else user_cache_path("lightning-hetpipe") / "profiles"
        return folder / f"{hash_of(self.key)}.json"

    def entries(self) -> list[E]:
        """What is kept, oldest first; nothing, and a line in the log, if the file is not sound."""
        try:
            return self._read()
        except ProfileError as error:
            log.warning("%s: %s; measuring %s again", self.path, error, self.about)
            return []

    def keep(self, entry: E, first: Callable[[Sequence[E]], E | None]) -> E:
        """Adds an entry, unless another process kept an equal one meanwhile. A failure is logged only.

        Args:
            first: The entry that makes the new one superfluous, if there is one.

        Returns:
            The entry that is kept.
        """
        path = self.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.parent / ".lock", timeout=_LOCK_S):
                entries: list[E] = []
                with contextlib.suppress(ProfileError):  # said before
                    entries = self._read()
                found = first(entries)
                if found is None:
                    self._write([*entries, entry][-self.most :])
                return entry if found is None else found
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            log.warning("the measurement of %s is not kept for the next run: %s", self.about, error)
            return entry

    def _read(self) -> list[E]:
        """What is kept.

        Raises:
            ProfileError: It is not sound.
        """
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise ProfileError(f"it is not of format {FORMAT}")
            if data.pop("hash", None) != hash_of(canonical(data)):
                raise ProfileError("its content was changed after it was written")
            if data["key"] != self.key:
                raise ProfileError("it was measured under another key")
            return [self.unpack(entry) for entry in data["entries"]]
        except FileNotFoundError:
            return []
        except ProfileError:
            raise
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            cause = str(error) if isinstance(error, ClusterError) else repr(error)
            raise ProfileError(f"it cannot be read ({cause})") from error

    def _write(self, entries: Sequence[E]) -> None:
        data: dict[str, Any] = {
            "format": FORMAT,
            "key": self.key,
            "entries": [self.pack(entry) for entry in entries],
        }
        data["hash"] = hash_of(canonical(data))
        handle, whole = tempfile.mkstemp(".new", self.path.stem, self.path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
            os.replace(whole, self.path)
        except BaseException:
            os.unlink(whole)
            raise


def canonical(data: object) -> str:
    return json.dumps(data, sort_keys=True)


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
