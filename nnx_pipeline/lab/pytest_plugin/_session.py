"""What a test and a test run have measured, until it is written to `memory-budgets.toml`."""

from dataclasses import dataclass, field
from pathlib import Path

from nnx_pipeline.lab.pytest_plugin._budgets import Budgets, Figures, Key


@dataclass
class Results:
    """What one test measured: a text of each measurement, and figures of each budget asked for.

    `hints` are lines about figures that are below their budget by more than the tolerance.
    """

    descriptions: list[str] = field(default_factory=list)
    requested: dict[Key, Figures] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)


@dataclass
class SessionBudgets:
    """The budgets of a test run, and what its reports say was measured.

    With xdist only the process that reports fills the last four fields; its workers do not.

    - `budgets`: what the file held at the start.
    - `update`: whether to write what is measured instead of comparing it.
    - `selected`: whether tests of some file were left out, so that one that did not run may still
      exist.
    - `collected`: how many tests pytest found, before any was left out.
    - `seen`: ids of the tests that were reported.
    - `passed`: for each test that passed, the figures of the budgets that it asked for.
    - `hints`, `summary`: lines for the end of the run, and those that say what changed in the file.
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
