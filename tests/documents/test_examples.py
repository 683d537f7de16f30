"""Each file in examples/ runs, and fits a screen or little more."""

import re
from pathlib import Path

import pytest
from documents import TEXT
from helpers import ROOT, pytest_in, run_fresh, user_environment

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SCRIPTS = [path for path in EXAMPLES if not path.name.startswith("test_")]


def test_each_example_is_short_and_a_page_leads_to_it() -> None:
    assert EXAMPLES
    assert [path.name for path in EXAMPLES if f"(../examples/{path.name})" not in TEXT] == []
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES}
    assert max(lengths.values()) <= 80, lengths


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    """It has assertions of its own about what it shows."""
    assert "assert " in path.read_text()
    done = run_fresh(path, folder=tmp_path, environment=user_environment())
    assert done.code == 0, done.err
    assert done.out


@pytest.mark.slow
def test_the_example_of_a_budget_fails_without_donation(tmp_path: Path) -> None:
    """As the comment in it says, and passes as it is."""
    (source,) = (path.read_text() for path in EXAMPLES if path not in SCRIPTS)
    file = tmp_path / "test_budget.py"
    file.write_text(source)
    assert "2 passed" in pytest_in(tmp_path, "--update-memory-budgets").out
    assert "2 passed" in pytest_in(tmp_path).out
    without = source.replace('@nnx.jit(donate_argnames=("model", "optimizer"))', "@nnx.jit")
    assert without != source
    file.write_text(without)
    exceeded = pytest_in(tmp_path).out
    assert "2 failed" in exceeded
    # pytest marks the lines of an error with E; with CI=1 its summary repeats them.
    assert len(re.findall(r"^E .*MemoryExceeded: ", exceeded, re.MULTILINE)) == 2
