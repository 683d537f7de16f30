"""A disk cache of results, keyed by their inputs, so that a second run compiles nothing."""

import datetime
import functools
import hashlib
import itertools
import json
import os
import re
import stat
import time
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnx_pipeline.lab._files import local, read_regular, replace, say

FOLDER_VARIABLE = "NNX_PIPELINE_CACHE"
LONGEST_DAYS, MOST_BYTES = 30, 256 * 2**20
# Entries, and the temporary files that a write leaves which is killed.
_OURS = re.compile(r"[0-9a-f]{64}\.json|\.nnx-pipeline\..*")


class Cache:
    """A folder with one JSON file per result, None to keep nothing; a file that cannot be read
    counts as missing. With `fresh`, `put` replaces what is there. The first write removes entries
    older than 30 days, then the oldest beyond 256 MiB. `warn` is called once if it cannot be
    written.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        fresh: bool = False,
        warn: Callable[[str], None] = say,
    ) -> None:
        self.folder, self.fresh, self.warn = folder, fresh, warn
        self._pruned = False

    @classmethod
    def of_user(cls, *, fresh: bool = False) -> "Cache":
        """The command line's: in $NNX_PIPELINE_CACHE, else $XDG_CACHE_HOME/nnx-pipeline, else
        ~/.cache/nnx-pipeline; without a home folder and these variables there is none."""
        if named := os.environ.get(FOLDER_VARIABLE):
            return cls(local(named), fresh=fresh)
        try:
            caches = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        except RuntimeError:  # a user without a home
            return cls(None)
        return cls(local(caches) / "nnx-pipeline", fresh=fresh)

    def get(self, key: str | None) -> tuple[Any, str] | None:
        """The value stored under `key` and when that was, in ISO format; None if there is none."""
        if self.folder is None or self.fresh or key is None:
            return None
        try:
            entry = json.loads(read_regular(self.folder / f"{key}.json"))
            # A damaged entry, or one that was renamed, counts as missing.
            whole = entry["key"] == key and entry["sha256"] == _hash(entry["value"])
            return (entry["value"], str(entry["measured"])) if whole else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def put(self, key: str | None, value: object) -> None:
        """Stores a value that JSON can hold; if that fails, warns once and stores no more."""
        if self.folder is None or key is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry = {"key": key, "measured": now, "sha256": _hash(value), "value": value}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace(self.folder / f"{key}.json", json.dumps(entry).encode())
            if not self._pruned:
                self._pruned = True
                self._prune()
        except OSError as error:
            self.warn(f"{self.folder}: results cannot be kept there ({error.strerror or error})")
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


def restored(kind: Any, value: Any) -> Any:
    """The inverse of `dataclasses.asdict` and JSON; raises KeyError or TypeError for anything
    else."""
    parts = typing.get_args(kind)
    if hasattr(kind, "__dataclass_fields__"):
        hints = _hints(kind)
        return kind(**{name: restored(hints[name], item) for name, item in {**value}.items()})
    if typing.get_origin(kind) is tuple:
        kinds = itertools.repeat(parts[0]) if parts[-1] is ... else parts
        return tuple(map(restored, kinds, value))
    if typing.get_origin(kind) is types.UnionType and value is not None:
        return restored(parts[0], value)  # what may be absent is written `X | None`
    return value


_hints = functools.cache(typing.get_type_hints)


def _age_and_size(path: Path) -> tuple[float, int, Path] | None:
    """Time of last change, bytes and path; None of a folder, and of what has just been removed."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return None if stat.S_ISDIR(found.st_mode) else (found.st_mtime, found.st_size, path)


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
