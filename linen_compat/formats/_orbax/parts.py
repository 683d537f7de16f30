"""One checkpoint that several processes write, each the parts of arrays that it holds.

As Orbax does it: each process has a database of its own in the folder, and the first one makes one
index of all. The files stay where they are.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tensorstore as ts

from linen_compat.formats._paths import database, in_folder, new_context
from linen_compat.formats._streams import Mismatch
from nnx_pipeline.lab._files.stores import StorePath

_POLL = 0.05  # seconds
_ROOM = 4096  # bytes, for an error where the disk is full


@dataclass(frozen=True)
class Part:
    """What one process of `count` writes; all parts of a checkpoint have one `mark`."""

    number: int
    count: int
    mark: str

    @property
    def name(self) -> str:
        """The folder of its database, as Orbax calls it."""
        return f"ocdbt.process_{self.number}"

    def _file(self, folder: Path) -> Path:
        return folder / f"process_{self.number}.{self.mark}.json"

    def can_begin(self, folder: Path) -> bool:
        """Whether this process sees the folder and can write there; takes room for an error."""
        if self.number == 0 or isinstance(folder, StorePath):
            return folder.is_dir()
        try:
            self._file(folder).with_suffix(".tmp").write_bytes(b" " * _ROOM)
        except OSError:
            return False
        return True

    def tell(self, folder: Path, sums: Mapping[str, Mapping[int, str]]) -> None:
        """Says that all is written, with the checksums of the chunks of each array."""
        self._write(folder, {"sums": sums, "files": files_of(folder / self.name)})

    def fail(self, folder: Path, error: BaseException) -> None:
        """Says why not all can be written. RuntimeError, where not even that can be said, must end
        this process, for which the others would wait."""
        said = f"process {self.number} of {self.count}: {str(error)[:500]}"
        try:
            self._write(folder, {"error": said})
        except OSError as second:
            raise RuntimeError(f"{said}; and the other processes cannot be told") from second

    def _write(self, folder: Path, values: object) -> None:
        file, text = self._file(folder), json.dumps(values)
        if isinstance(file, StorePath):
            file.write_text(text)
            return
        unfinished = file.with_suffix(".tmp")
        # Over what has room already, and so not emptied first.
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as opened:
            opened.write(text.encode())
            opened.truncate()
        unfinished.rename(file)

    def wait_for_others(self, folder: Path) -> list[Path]:
        """The files in which the others say how they have ended.

        A process that is lost never does. JAX then ends this one.
        """
        files = [Part(n, self.count, self.mark)._file(folder) for n in range(1, self.count)]
        names = {file.name for file in files}
        # Listed, because NFS remembers for a minute that a single file was not there.
        while not names <= {path.name for path in folder.iterdir()}:
            time.sleep(_POLL)
        return files


class PartsOfOthers:
    """What the other processes have written."""

    def __init__(self, files: Sequence[Path], names: Sequence[str]) -> None:
        self._files, self.names = files, names
        said = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        for one in said:
            if "error" in one:
                raise Mismatch(one["error"])
        self._sums, self.num_files = [one["sums"] for one in said], [one["files"] for one in said]

    @classmethod
    def when_done(cls, folder: Path, part: Part) -> "PartsOfOthers":
        """Waits for them. Raises Mismatch where one of them has failed."""
        files = part.wait_for_others(folder)
        return cls(files, [Part(n, part.count, part.mark).name for n in range(part.count)])

    def sums_of(self, leaf: str) -> dict[int, str]:
        """The checksums of the chunks of an array, by their numbers."""
        return {int(n): one for sums in self._sums for n, one in sums[leaf].items()}

    def remove(self) -> None:
        for file in self._files:
            file.unlink()


def files_of(part: Path) -> int:
    """How many files with arrays the database of a process has."""
    return sum(1 for _ in (part / "d").iterdir())


def merge(folder: Path, names: Sequence[str]) -> None:
    """Makes one database of those with these names in a folder; it refers to their files."""
    context = new_context()
    # Below the folder's own path, so that what refers to them stays right where it is moved.
    inside = [{"driver": "ocdbt", "base": in_folder(folder, f"{name}/")} for name in names]
    parent, *children = (
        ts.KvStore.open(spec, context=context).result() for spec in (database(folder), *inside)
    )
    with ts.Transaction(atomic=True) as transaction:
        whole = parent.with_transaction(transaction)
        for copied in [child.experimental_copy_range_to(whole) for child in children]:
            copied.result()
