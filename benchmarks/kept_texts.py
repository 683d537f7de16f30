"""Runs `nnx-pipeline memory`, and keeps what the compiler writes of the program.

    python benchmarks/kept_texts.py FOLDER memory FILE.py:FUNCTION …

The next run with the same words, file and compiler reads the texts in FOLDER in the place of
compiling, so that changed code is judged by the same program within seconds. It estimates no time.
"""

import dataclasses
import gzip
import hashlib
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nnx_pipeline.lab._cli import main
from nnx_pipeline.lab._files import replace
from nnx_pipeline.lab.compile import _figures as figures
from nnx_pipeline.lab.compile._cache_key import packages
from nnx_pipeline.lab.compile.measure import Lowered, Measurement
from nnx_pipeline.lab.compile.platform import Platform

_measure, _read = Lowered.measure, figures.read_program


class Texts(NamedTuple):
    """What the compiler writes: the program, its buffer assignment, and its bytes of temp."""

    hlo: str
    buffers: str | None
    temp: int | None


def measure(path: Path, lowered: Lowered) -> Measurement:
    """As `Lowered.measure`, from the texts in a file where there is one."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, gzip.compress(pickle.dumps(_compiled(lowered)), compresslevel=3))
    found, texts = pickle.loads(gzip.decompress(path.read_bytes()))
    program = _read(*texts[:3], lowered.lines)
    return dataclasses.replace(found, attribution=program.attribution, assigned=program.assigned)


def path_of(folder: Path, words: Sequence[str]) -> Path:
    """Where the texts of a command are."""
    platform = Platform.parse(words[[*words].index("--platform") + 1])
    (subject,) = (word for word in words if ".py:" in word and "inputs" not in word)
    file = Path(subject.rpartition(":")[0])
    options = [word for word in words if ".py:" not in word]
    parts = [file.read_text(), subject.rpartition(":")[2], *options, packages(platform)]
    key = hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]
    return folder / f"{file.stem}-{key}.pickle.gz"


def _compiled(lowered: Lowered) -> tuple[Measurement, Texts]:
    """The measurement without what is read again, and the texts that it is read from."""
    texts: list[Texts] = []

    def read(hlo: str, buffers: str | None, temp: int | None, *rest: Any) -> figures.ProgramFigures:
        texts.append(Texts(hlo, buffers, temp))
        return _read(hlo, buffers, temp, *rest)

    figures.read_program = read
    found = _measure(lowered)
    figures.read_program = _read
    return dataclasses.replace(found, attribution=None, time=None, unread=()), texts[0]


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    path = path_of(Path(folder), words)
    Lowered.measure = lambda lowered: measure(path, lowered)  # type: ignore[method-assign]
    sys.argv[1:] = words
    main.main()
