"""One checkpoint that several processes write, each the parts of arrays that it holds.

As Orbax does it: each process has a database of its own in the folder, and the first one makes one
index of all. The files stay where they are.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tensorstore as ts

from linen_compat.formats._paths import database, new_context
from nnx_pipeline.lab._files.stores import StorePath

_POLL = 0.05  # seconds


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

    def tell(self, folder: Path, sums: Mapping[str, Mapping[int, str]]) -> None:
        """Says that all is written, with the checksums of the chunks of each array."""
        self._write(folder, {"sums": sums})

    def fail(self, folder: Path, error: BaseException) -> None:
        """Says why not all can be written."""
        self._write(folder, {"error": f"process {self.number} of {self.count}: {error}"})

    def _write(self, folder: Path, values: object) -> None:
        file, text = self._file(folder), json.dumps(values)
        if isinstance(file, StorePath):
            file.write_text(text)
            return
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.rename(file)

    def wait_for_others(self, folder: Path) -> list[Path]:
        """The files in which the others say how they have ended.

        A process that is lost never does. JAX then ends this one.
        """
        files = [Part(n, self.count, self.mark)._file(folder) for n in range(1, self.count)]
        while not all(file.is_file() for file in files):
            time.sleep(_POLL)
        return files


class PartsOfOthers:
    """What the other processes have written."""

    def __init__(self, files: Sequence[Path], names: Sequence[str]) -> None:
        self._files, self.names = files, names
        said = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        for one in said:
            if "error" in one:
                raise OSError(one["error"])
        self._sums = [one["sums"] for one in said]

    @classmethod
    def when_done(cls, folder: Path, part: Part) -> "PartsOfOthers":
        """Waits for them. Raises OSError where one of them has failed."""
        files = part.wait_for_others(folder)
        return cls(files, [Part(n, part.count, part.mark).name for n in range(part.count)])

    def sums_of(self, leaf: str) -> dict[int, str]:
        """The checksums of the chunks of an array, by their numbers."""
        return {int(n): one for sums in self._sums for n, one in sums[leaf].items()}

    def remove(self) -> None:
        for file in self._files:
            file.unlink()


def merge(folder: Path, names: Sequence[str]) -> None:
    """Makes one database of those with these names in a folder; it refers to their files."""
    context = new_context()
    parent, *children = (
        ts.KvStore.open(database(place), context=context).result()
        for place in (folder, *(folder / name for name in names))
    )
    with ts.Transaction(atomic=True) as transaction:
        whole = parent.with_transaction(transaction)
        for copied in [child.experimental_copy_range_to(whole) for child in children]:
            copied.result()
