"""A pytest plugin with the fixture `compile_memory`, and budgets in `memory-budgets.toml`.

pytest imports this file before any conftest.py, in every project where this package is installed.
So it must import fast, and no JAX, whose flags a conftest may still set.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.lab.pytest_plugin import _budgets as budgets
from nnx_pipeline.lab.pytest_plugin import _limits as limits
from nnx_pipeline.lab.pytest_plugin._baseline import OPTION as BASELINE
from nnx_pipeline.lab.pytest_plugin._baseline import budgets_at
from nnx_pipeline.lab.pytest_plugin._budgets import Budgets, Key, Results, SessionBudgets

if TYPE_CHECKING:
    from nnx_pipeline.lab.pytest_plugin.fixture import CompileMemory

UPDATE = "--update-memory-budgets"
STRICT = "--memory-strict"  # pytest has a `--strict` of its own
TOLERANCE = "memory_budget_tolerance"
RESULTS = pytest.StashKey[Results]()
SESSION = pytest.StashKey[SessionBudgets]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("compile memory")
    group.addoption(
        UPDATE,
        action="store_true",
        help=f"Write the figures of passing tests to {budgets.FILE} instead of comparing them.",
    )
    group.addoption(
        STRICT,
        action="store_true",
        help="Fail a test, and do not skip it, where the compiler is missing or has no budget.",
    )
    group.addoption(
        BASELINE,
        metavar="REVISION",
        help="Compare with what the same tests measure at a git revision, such as main, instead of "
        f"{budgets.FILE}.",
    )
    parser.addini(
        TOLERANCE,
        "The share by which a memory budget may be exceeded, such as 0.01 for 1 %.",
        default=str(budgets.TOLERANCE),
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(UPDATE) and config.getoption(BASELINE):
        raise pytest.UsageError(
            f"{UPDATE} cannot be combined with {BASELINE}; leave one of them out"
        )
    config.addinivalue_line("markers", limits.ABOUT)
    path = config.rootpath / budgets.FILE
    try:
        config.stash[SESSION] = SessionBudgets(
            path=path,
            budgets=budgets.read_budgets(path),
            update=config.getoption(UPDATE),
            strict=config.getoption(STRICT),
            baseline=config.getoption(BASELINE) or "",
            tolerance=_share(config.getini(TOLERANCE)),
            # `--lf` leaves out tests without telling.
            selected=any("::" in arg for arg in config.args) or bool(config.getoption("lf", False)),
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
            f"{TOLERANCE} = {text!r} is not a number from 0 to below 1; write 0.01 for 1 %"
        )
    return share


@pytest.fixture
def compile_memory(request: pytest.FixtureRequest) -> CompileMemory:
    """Compiles a function for a platform and returns what it needs; nothing is computed.

    Call `compile_memory(fn, args, mesh=…, platform=…)` with a tuple of abstract arguments, or
    `compile_memory.step(config, mesh, platform)` for a training step of nnx_pipeline. The result
    has figures (`temp_bytes`, `heap_bytes`, `peak_bytes`, `step_seconds`, `flops`, `collectives`,
    …) and the methods `assert_at_most(temp_bytes=…)` and `within_budget()`. The test is skipped
    where the compiler of the platform is not installed.
    """
    from nnx_pipeline.lab.pytest_plugin.fixture import CompileMemory

    node = request.node
    results = node.stash.setdefault(RESULTS, Results())
    results.unused = limits.marked_budgets(node.iter_markers(limits.MARKER))
    return CompileMemory(id_of_test(node), request.config.stash[SESSION], results)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fails a test whose `memory_budget` nothing was compared with."""
    done = yield
    results = pyfuncitem.stash.get(RESULTS, None)
    marked = limits.marked_budgets(pyfuncitem.iter_markers(limits.MARKER))
    for one in results.unused if results else marked:
        on = f" for {one.platform}" if one.platform else ""
        pytest.fail(
            f"@{limits.MARKER} limits nothing: the test compiles nothing{on}; call the fixture "
            "compile_memory, or remove the marker",
            pytrace=False,
        )
    return done


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds figures to a failed report, and to every report what the test measured."""
    report = yield
    results = item.stash.get(RESULTS, Results())
    # The message of MemoryExceeded has the figures already. The class is compared by name, because
    # importing it would import JAX.
    shown = call.excinfo is not None and type(call.excinfo.value).__name__ == "MemoryExceeded"
    crash = getattr(report.longrepr, "reprcrash", None)
    if shown and call.excinfo and crash:
        # What the short summary has, which pytest cuts off at the width of the terminal: the class
        # with its module would leave no room for the figures.
        crash.message = str(call.excinfo.value).partition("\n")[0]
    if report.failed and not shown:
        report.sections += [("compile memory", text) for text in results.descriptions]
    measured = results if report.when == "call" else Results()
    # xdist sends the attributes of a report too, if they are lists, dicts, strings and numbers.
    vars(report)["memory_budgets"] = {
        "test": id_of_test(item),
        "asked": [[list(key), dict(figures)] for key, figures in measured.requested.items()],
        "hints": measured.hints,
        "selected": item.config.stash[SESSION].selected,
    }
    return report


def id_of_test(item: pytest.Item) -> str:
    """The id of a test without the group that `--dist=loadgroup` of xdist appends to it."""
    marker = item.get_closest_marker("xdist_group")
    if marker is None:
        return item.nodeid
    group = marker.args[0] if marker.args else marker.kwargs.get("name", "default")
    return item.nodeid.removesuffix(f"@{group}")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.config.stash[SESSION].collected += 1


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Counts tests: a conftest may remove some without calling `pytest_deselected`."""
    mine = session.config.stash[SESSION]
    mine.selected |= len(session.items) < mine.collected
    items = [one for one in session.items if "compile_memory" in getattr(one, "fixturenames", ())]
    if mine.baseline and items:
        mine.budgets = budgets.parsed(_text_at(session.config), mine.baseline)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Gives a worker of xdist the budgets of the revision, which are measured once."""
    if node.config.stash[SESSION].baseline:
        node.workerinput[BASELINE] = _text_at(node.config)


def _text_at(config: pytest.Config) -> str:
    """The budgets of the revision as a budget file has them."""
    if BASELINE in (given := getattr(config, "workerinput", {})):
        return str(given[BASELINE])
    mine = config.stash[SESSION]
    try:
        mine.text = mine.text or budgets_at(config, mine.baseline)
    except InputError as error:
        raise pytest.UsageError(str(error)) from error
    return mine.text


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        items[0].config.stash[SESSION].selected = True


class Collector:
    """Writes the budget file at the end, by what reports say; workers of xdist have none."""

    def __init__(self, session: SessionBudgets) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        measured: dict[str, Any] | None = getattr(report, "memory_budgets", None)
        if measured is None:  # the report of xdist for a test in which a worker crashed
            self.session.seen.add(report.nodeid)
            return
        self.session.seen.add(measured["test"])
        self.session.selected |= measured["selected"]
        self.session.hints += measured["hints"]
        if report.when == "call" and report.passed:
            requested = {Key(*key): figures for key, figures in measured["asked"]}
            self.session.passed[measured["test"]] = requested

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        mine = self.session
        if not mine.update:
            return
        # Only a run that came to its end, with status 0 or 1 (tests failed), shows what is gone.
        stopped = session.shouldstop or session.shouldfail
        whole = not mine.selected and not stopped and exitstatus in (0, 1)
        try:
            old = budgets.read_budgets(mine.path)
            new = budgets.updated(old, mine.passed, lambda test: _gone(test, mine, whole))
            if new != old:
                budgets.write_budgets(mine.path, new)
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
    """Whether a test's file is missing, or ran without it though `whole` files were run."""
    file = test.partition("::")[0]
    if not (session.path.parent / file).exists():
        return True
    ran = any(seen.partition("::")[0] == file for seen in session.seen)
    return whole and ran and test not in session.seen


def _what_changed(old: Budgets, new: Budgets) -> list[str]:
    added = [f"new: {key}" for key in sorted(set(new) - set(old))]
    removed = [f"removed: {key} ({key.compiler})" for key in sorted(set(old) - set(new))]
    changed = [
        f"changed: {key}: {budgets.in_words(old[key])} -> {budgets.in_words(new[key])}"
        for key in sorted(set(old) & set(new))
        if old[key] != new[key]
    ]
    same = len(set(old) & set(new)) - len(changed)
    return [*added, *changed, *removed, f"{counted(same, 'budget')} unchanged"]
