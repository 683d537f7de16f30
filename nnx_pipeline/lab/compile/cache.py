"""Results on disk, by the content that they came from, so that a second run compiles nothing."""

import datetime
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnx_pipeline.files import write_text

FOLDER_VARIABLE = "NNX_PIPELINE_CACHE"
LONGEST_DAYS, MOST_BYTES = 30, 256 * 2**20
# Entries, and the temporary files of writes that were killed.
_OURS = re.compile(r"[0-9a-f]{64}\.json|\.nnx-pipeline\..*")


class Cache:
    """One JSON file per result in a folder. What cannot be read counts as not there.

    folder: made when the first result is written; None keeps nothing. fresh: what is there is
    ignored, and replaced by what is put. A folder that cannot be written is no error: `warn` hears
    of it once. The first write removes entries that are older than 30 days, and the oldest ones
    while there are more than 256 MiB.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        fresh: bool = False,
        warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    ) -> None:
        self.folder, self.fresh, self.warn = folder, fresh, warn
        self._pruned = False

    @classmethod
    def of_user(cls, *, fresh: bool = False) -> "Cache":
        """That of the command line.

        It is in $NNX_PIPELINE_CACHE, else $XDG_CACHE_HOME/nnx-pipeline, else
        ~/.cache/nnx-pipeline.
        """
        if named := os.environ.get(FOLDER_VARIABLE):
            return cls(Path(named), fresh=fresh)
        try:
            caches = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        except RuntimeError:  # a user without a home
            return cls(None)
        return cls(Path(caches) / "nnx-pipeline", fresh=fresh)

    def get(self, key: str | None) -> tuple[Any, str] | None:
        """The value put under that key and when, in ISO format; None without one."""
        if self.folder is None or self.fresh or key is None:
            return None
        try:
            entry = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            whole = entry["key"] == key and entry["sha256"] == _hash(entry["value"])
            return (entry["value"], str(entry["measured"])) if whole else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def put(self, key: str | None, value: Any) -> None:
        """Keeps a value that JSON can hold; without a key, nothing."""
        if self.folder is None or key is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry = {"key": key, "measured": now, "sha256": _hash(value), "value": value}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(str(self.folder / f"{key}.json"), json.dumps(entry))
            if not self._pruned:
                self._pruned = True
                self._prune()
        except OSError as error:
            self.warn(f"{self.folder}: results are not kept there ({error.strerror or error})")
            self.folder = None

    def _prune(self) -> None:
        assert self.folder is not None, "called by put alone"
        files = [path for path in self.folder.iterdir() if _OURS.fullmatch(path.name)]
        known = sorted(filter(None, map(_age_and_size, files)))
        total, oldest = sum(size for _, size, _ in known), time.time() - LONGEST_DAYS * 86_400
        for written, size, path in known:
            if written < oldest or total > MOST_BYTES:
                path.unlink(missing_ok=True)
                total -= size


def _age_and_size(path: Path) -> tuple[float, int, Path] | None:
    """None for a file that another process has just taken away or renamed."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime, found.st_size, path


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
