"""docs/microbatch.md names the files that a training step really goes through, in their order."""

import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import mesh_of, small_config

from nnx_pipeline import DecoderLayer
from nnx_pipeline.train import abstract_batch, abstract_state
from nnx_pipeline.train.step import train_step

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "microbatch.md").read_text(encoding="utf-8")
THERE, _, CALLED = PAGE.partition("## There")[2].partition("## What these call")
TABLE = "\n".join(line for line in THERE.splitlines() if line.startswith("|"))
MOST_FILES = 8
LINK = r"\]\(\.\./([\w/.]+)\)"
LAYER = "nnx_pipeline/modules/decoder_layer.py"  # its first line is where the way ends


class FirstLine(Exception):
    """Raised in the place of a layer."""


def files_to_a_layer(mesh: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], set[str]]:
    """The files of this package between `train_step` and the first line of a layer.

    First those of the functions that are still running there, in the order of the calls; then those
    of all functions that were called, whether they have returned or not.
    """
    entered: set[str] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    def stop(*args: Any, **options: Any) -> Any:
        raise FirstLine

    config, grid = small_config(), mesh_of(mesh)
    with jax.set_mesh(grid):
        state, batch = abstract_state(config, grid), abstract_batch(config, grid)
        monkeypatch.setattr(DecoderLayer, "__call__", stop)
        sys.setprofile(note)
        try:
            with pytest.raises(FirstLine) as error:
                jax.eval_shape(train_step, state, batch)
        finally:
            sys.setprofile(None)
    running = [frame.filename for frame in traceback.extract_tb(error.tb)]
    return in_package(running), set(in_package(entered))


def in_package(files: Iterable[str]) -> list[str]:
    """The files that are of this package, each once, by their path in the repository."""
    paths = [Path(file) for file in files]
    here = [path for path in paths if path.is_relative_to(ROOT / "nnx_pipeline")]
    return list(dict.fromkeys(str(path.relative_to(ROOT)) for path in here))


def test_the_files_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = re.findall(LINK, TABLE)
    running, entered = files_to_a_layer("stage=2,fsdp=2", monkeypatch)
    assert listed == [*running, LAYER]
    assert len(listed) <= MOST_FILES
    called = re.findall(LINK, CALLED.partition("\n## ")[0])
    assert set(called) == entered - set(listed)


def test_the_way_without_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = re.findall(LINK, TABLE)
    (link, words), *_ = re.findall(rf"Without stages, .*?{LINK}: files (.*)", PAGE, re.DOTALL)
    words = words.partition(".\n")[0].replace("this one", str(len(listed) + 1))
    chosen = [[*listed, link][int(number) - 1] for number in re.findall(r"\d", words)]
    running, _ = files_to_a_layer("fsdp=2", monkeypatch)
    assert chosen == [*running, LAYER]


def test_the_functions_are_there() -> None:
    table = CALLED.partition("\n## ")[0]
    lines = (TABLE + table).splitlines()
    rows = [line.split(" | ") for line in lines if line[:1] == "|" and "](../" in line]
    assert len(rows) > MOST_FILES
    for _, files, functions, *_ in rows:
        text = "".join((ROOT / file).read_text("utf-8") for file in re.findall(LINK, files))
        for name in re.findall(r"`([\w.]+)`", functions):
            last = name.rpartition(".")[2]
            assert re.search(rf"(def|class) {last}\b", text), f"{files} has no {name}"
