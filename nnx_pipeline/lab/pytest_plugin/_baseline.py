"""The option `--memory-baseline`: the budgets are what the same tests measure at a revision."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.pytest_plugin import _budgets as budgets

if TYPE_CHECKING:
    import pytest

OPTION = "--memory-baseline"
# Options that write a report, which is that of this run.
_REPORTS = ("--junit", "--cov", "--html", "--csv", "--report-log", "--json-report")
_ENDED = (0, 1, 5)  # pytest's exit codes: all passed, some failed, there are none


def budgets_at(config: pytest.Config, revision: str) -> str:
    """Runs the tests that compile programs, with all files as they were; returns their budgets.

    Raises InputError for a revision that there is not, or whose tests do not run.
    """
    # Imports JAX, whose flags a conftest has set by now.
    from nnx_pipeline.lab._baseline.environment import HERE
    from nnx_pipeline.lab._baseline.process import Files, started
    from nnx_pipeline.lab._baseline.repository import Repository

    repository = Repository.here()
    commit = repository.commit(revision)
    with repository.files_of(commit) as folder, tempfile.TemporaryDirectory() as made:
        files = Files(repository.root, folder)
        written = folder / config.rootpath.resolve().relative_to(repository.root.resolve())
        # What was recorded there may be of tests that fail now.
        (written / budgets.FILE).unlink(missing_ok=True)
        words = _words(config)
        code, said = started("run_tests", words, HERE, files, Path(made), lambda line: None)
        if code not in _ENDED:
            last = [line.strip() for line in said.splitlines() if line.strip()][-1:]
            raise InputError(f"{OPTION} {revision}: its tests do not run ({' '.join(last)})")
        found = written / budgets.FILE
        return found.read_text("utf-8") if found.exists() else budgets.to_toml({})


def _words(config: pytest.Config) -> list[str]:
    """The words of this run without the option, and without what would write its reports."""
    given: Sequence[str] = config.invocation_params.args
    kept = [word for word in given if not word.startswith((f"{OPTION}=", *_REPORTS))]
    if OPTION in kept:
        at = kept.index(OPTION)
        del kept[at : at + 2]
    alone = ["-n0"] if config.pluginmanager.hasplugin("xdist") else []
    return [*kept, "--update-memory-budgets", "-q", "--color=no", *alone]
