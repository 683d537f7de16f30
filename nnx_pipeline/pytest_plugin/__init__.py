"""A pytest plugin: the fixture `compile_memory`, and budgets of memory in `memory-budgets.toml`.

pytest imports this file before any conftest.py, in every project of an environment that has it. It
must therefore be quick, and must not import JAX, whose flags a conftest may still set: the fixture
does.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nnx_pipeline import budgets
from nnx_pipeline.budgets import Budgets, Figures, Key
from nnx_pipeline.errors import InputError

if TYPE_CHECKING:
    from nnx_pipeline.budget_fixture import CompileMemory

UPDATE = "--update-memory-budgets"
TOLERANCE = "memory_budget_tolerance"
RESULTS = pytest.StashKey["Results"]()
SESSION = pytest.StashKey["SessionBudgets"]()


@dataclass
class Results:
    """What one test measured: the texts of its figures, what it asked for, and hints."""

    descriptions: list[str] = field(default_factory=list)
    asked: dict[Key, Figures] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)


@dataclass
class SessionBudgets:
    """The budgets of a test run. The process that reports collects; workers of xdist do not.

    selected: whether tests of some file were left out, so that a missing one may still exist.
    """

    path: Path
    budgets: Budgets
    update: bool
    tolerance: float
    selected: bool = False
    collected: int = 0
    seen: set[str] = field(default_factory=set)
    passed: dict[str, dict[Key, Figures]] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("compile memory")
    group.addoption(
        UPDATE,
        action="store_true",
        help=f"Write what the tests that pass measure to {budgets.FILE} instead of comparing.",
    )
    parser.addini(
        TOLERANCE,
        "The share by which a memory budget may be exceeded, such as 0.01 for 1 %.",
        default=str(budgets.TOLERANCE),
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.rootpath / budgets.FILE
    try:
        config.stash[SESSION] = SessionBudgets(
            path=path,
            budgets=budgets.read(path),
            update=config.getoption(UPDATE),
            tolerance=_share(config.getini(TOLERANCE)),
            selected=_names_single_tests(config),
        )
    except InputError as error:
        raise pytest.UsageError(str(error)) from error


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1
    if not 0 <= share < 1:
        raise InputError(
            f"{TOLERANCE} = {text!r} is no share of 0 or more and below 1; write 0.01 for 1 %"
        )
    return share


def _names_single_tests(config: pytest.Config) -> bool:
    """Whether the command line names tests rather than files; `--lf` leaves out some silently."""
    return any("::" in arg for arg in config.args) or bool(config.getoption("lf", False))


@pytest.fixture
def compile_memory(request: pytest.FixtureRequest) -> CompileMemory:
    """Compiles a function for a platform and gives what it takes; nothing is computed.

    `compile_memory(fn, args, mesh=…, platform=…)` with a tuple of abstract arguments, or
    `compile_memory.step(config, mesh, platform)` for a training step of nnx_pipeline. The result
    has figures (`temp_bytes`, `heap_bytes`, `peak_bytes`, `flops`, `collectives`, …),
    `assert_at_most(temp_bytes=…)` and `within_budget()`. Skips the test where the compiler of the
    platform is not installed.
    """
    from nnx_pipeline.budget_fixture import CompileMemory

    results = request.node.stash.setdefault(RESULTS, Results())
    return CompileMemory(name_of(request.node), request.config.stash[SESSION], results)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Puts the figures below a failure, and what was measured into the report.

    A report goes from the workers of xdist to the process that collects.
    """
    report = yield
    results = item.stash.get(RESULTS, Results())
    shown = call.excinfo is not None and type(call.excinfo.value).__name__ == "MemoryExceeded"
    if report.failed and not shown:
        report.sections += [("compile memory", text) for text in results.descriptions]
    measured = results if report.when == "call" else Results()
    # An attribute of a report travels with it, if it is made of lists, dicts, texts and numbers.
    vars(report)["memory_budgets"] = {
        "test": name_of(item),
        "asked": [[list(key), dict(figures)] for key, figures in measured.asked.items()],
        "hints": measured.hints,
        "selected": item.config.stash[SESSION].selected,
    }
    return report


def name_of(item: pytest.Item) -> str:
    """The test without the group that xdist's `--dist=loadgroup` appends."""
    marker = item.get_closest_marker("xdist_group")
    if marker is None:
        return item.nodeid
    group = marker.args[0] if marker.args else marker.kwargs.get("name", "default")
    return item.nodeid.removesuffix(f"@{group}")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.config.stash[SESSION].collected += 1


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """A conftest may leave out items and tell nobody."""
    mine = session.config.stash[SESSION]
    mine.selected |= len(session.items) < mine.collected


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        items[0].config.stash[SESSION].selected = True


class Collector:
    """Collects the reports; only the process that writes the file has one."""

    def __init__(self, session: SessionBudgets) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        measured: dict[str, Any] | None = getattr(report, "memory_budgets", None)
        if measured is None:  # the test of a worker that crashed
            self.session.seen.add(report.nodeid)
            return
        self.session.seen.add(measured["test"])
        self.session.selected |= measured["selected"]
        self.session.hints += measured["hints"]
        if report.when == "call" and report.passed:
            asked = {Key(*key): figures for key, figures in measured["asked"]}
            self.session.passed[measured["test"]] = asked

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        mine = self.session
        if not mine.update:
            return
        stopped = session.shouldstop or session.shouldfail
        whole = not mine.selected and not stopped and exitstatus in (0, 1)
        try:
            old = budgets.read(mine.path)
            new = budgets.updated(old, mine.passed, lambda test: _gone(test, mine, whole))
            if new != old:
                budgets.write(mine.path, new)
        except (OSError, InputError) as error:
            pytest.exit(f"{mine.path} was not written: {error}", returncode=1)
        mine.summary = _what_changed(old, new)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        lines = [*self.session.summary, *sorted(self.session.hints)]
        if lines:
            terminalreporter.section(budgets.FILE)
            for line in lines:
                terminalreporter.line(line)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Collector(session.config.stash[SESSION]))


def _gone(test: str, session: SessionBudgets, whole: bool) -> bool:
    """Whether a test is no more: its file is not there, or has run as a whole without it."""
    file = test.partition("::")[0]
    if not (session.path.parent / file).exists():
        return True
    ran = any(seen.partition("::")[0] == file for seen in session.seen)
    return whole and ran and test not in session.seen


def _what_changed(old: Budgets, new: Budgets) -> list[str]:
    added = [f"new: {key}" for key in sorted(set(new) - set(old))]
    removed = [f"removed: {key} ({key.compiler})" for key in sorted(set(old) - set(new))]
    changed = [
        f"changed: {key}: {_figures(old[key])} -> {_figures(new[key])}"
        for key in sorted(set(old) & set(new))
        if old[key] != new[key]
    ]
    same = len(set(old) & set(new)) - len(changed)
    return [*added, *changed, *removed, f"{same} budgets as they were"]


def _figures(figures: Figures) -> str:
    return ", ".join(f"{k.removesuffix('_bytes')} {v:,}" for k, v in sorted(figures.items()))
