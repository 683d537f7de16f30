"""Each file in examples/ runs, and fits a screen or little more."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, user_environment

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples_and_each_is_short() -> None:
    assert EXAMPLES
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES}
    assert max(lengths.values()) <= 80, lengths


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    """It has assertions of its own about what it shows."""
    assert "assert " in path.read_text()
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, cwd=tmp_path, env=user_environment()
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
