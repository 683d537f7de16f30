"""The functions that run at once in two commands, by file, as docs/microbatch.md shows them."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "microbatch.md").read_text(encoding="utf-8")
# Runs a command until it calls a function of this package, and prints the file of each of the
# package's functions that then run.
SCRIPT = """
import importlib, sys, traceback
from pathlib import Path
root, module, holder, name, *command = sys.argv[1:]

def stop(*args, **options):
    for frame in traceback.extract_stack()[:-1]:
        file = Path(frame.filename)
        # The environment may be in the checkout, as README makes it. Before Python 3.12 a
        # comprehension was a function of its own.
        ours = file.is_relative_to(root) and "site-packages" not in file.parts
        if ours and frame.name != "<listcomp>":
            print("runs", file.relative_to(root), file=sys.stderr)
    print("runs", module.replace(".", "/") + ".py", file=sys.stderr)
    sys.exit()

place = importlib.import_module(module)
setattr(getattr(place, holder) if holder else place, name, stop)
sys.argv = ["nnx-pipeline", *command]
from nnx_pipeline.lab._cli.console import main
main()
"""
TINY = "--model tiny --mesh stage=2,fsdp=2 --set model.num_layers=4 --steps 1"
OWN = "own_functions:scaled --inputs own_functions:inputs --platform cpu"
WALKS = {
    "train": ("nnx_pipeline.modules.decoder_layer", "DecoderLayer", "__call__", TINY),
    "measure": ("nnx_pipeline.lab._hlo.module", "", "parse", OWN),
}


@functools.cache
def files_of(command: str) -> list[str]:
    """The file of each function that runs when the command has reached its goal, outermost first.

    The goal is the first line of a layer for `train`, and the reader of the compiled program for
    `measure`.
    """
    module, holder, name, options = WALKS[command]
    argv = [str(ROOT), module, holder, name, command, *options.split()]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv],
        capture_output=True,
        text=True,
        cwd=ROOT / "tests",
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
    )
    found = [line.split()[1] for line in done.stderr.splitlines() if line[:5] == "runs "]
    assert found, done.stderr
    return found


def runs(files: list[str]) -> list[tuple[str, int]]:
    """Each stay in a file, with the number of its functions."""
    return [(file, len(list(same))) for file, same in itertools.groupby(files)]


def table(command: str) -> str:
    rows = [f"| `{file}` | {count} |" for file, count in runs(files_of(command))]
    return "\n".join([f"| `{command}` | functions |", "|---|--:|", *rows])


@pytest.mark.parametrize(("command", "most"), [("train", 22), ("measure", 13)])
def test_no_file_is_entered_twice(command: str, most: int) -> None:
    files = [file for file, _ in runs(files_of(command))]
    assert sorted(set(files)) == sorted(files), table(command)
    assert len(files_of(command)) <= most, table(command)


@pytest.mark.parametrize("command", WALKS)
def test_the_page_shows_the_walk(command: str) -> None:
    assert table(command) in PAGE, f"write this table to docs/microbatch.md:\n{table(command)}"
