"""Budgets of tests: the file that holds them, and which figures exceed them.

`memory-budgets.toml` holds one `[[budget]]` per test, name within the test, platform and compiler
version. A figure that an entry lacks is not checked. Nothing here imports JAX: pytest reads the
file before any conftest can set JAX's flags.
"""

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from platform import machine
from typing import Any, NamedTuple

from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.pytest_plugin._limits import MarkedBudget

FILE = "memory-budgets.toml"
BYTES = ("temp_bytes", "heap_bytes", "peak_bytes", "account_bytes")
# The whole step and not its compute alone: else a collective that nothing hides any more would cost
# nothing. It is computed from the compiled program, so that the same program always takes the same.
SECONDS = ("step_seconds",)
FIGURES = (*BYTES, *SECONDS)
TOLERANCE = 0.01  # the share by which a budget may be exceeded
_DIGITS = 9  # of seconds behind the point: nanoseconds

_HEAD = """\
# Budgets of tests, per device: bytes as a compiler of this version gave them, and the seconds of a
# step as estimated from the program that it made.
# Written by `pytest --update-memory-budgets`; comments are not kept.
"""
_PACKAGES = {
    **{"cpu": ("jaxlib",), "tpu": ("jaxlib", "libtpu")},
    **{"cuda": ("jaxlib", "jax-cuda13-pjrt"), "rocm": ("jaxlib", "jax-rocm7-pjrt")},
}

Figures = Mapping[str, float]  # bytes are whole numbers


class Key(NamedTuple):
    """What a budget is for; `name` tells several budgets of one test apart."""

    test: str
    name: str
    platform: str
    compiler: str

    def __str__(self) -> str:
        return f"{self.test}{f' ({self.name})' if self.name else ''} on {self.platform}"


Budgets = dict[Key, Figures]


class Change(NamedTuple):
    """A figure of FIGURES that differs from its budget; None for one that is not known."""

    figure: str
    budget: float
    measured: float | None

    def __str__(self) -> str:
        name, unit, number = _wording(self.figure, max(self.budget, self.measured or 0))
        if self.measured is None:
            why = "the compiler gives no figure" if self.figure in BYTES else "there is no estimate"
            return f"{name} has a budget of {number(self.budget)} {unit} and {why}"
        difference = self.measured - self.budget
        share = f" ({difference / self.budget:+.1%})" if self.budget else ""
        side = "above" if difference > 0 else "below"
        return (
            f"{name} {number(self.measured)} {unit} is {number(abs(difference))}{share} {side} "
            f"its budget of {number(self.budget)}"
        )


_UNITS = {
    "bytes": (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1)),
    "seconds": (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)),
}


def in_short(exceeded: Mapping[str, tuple[float | None, float]], what: str) -> str:
    """The figure that exceeds its limit most, such as `heap 26.4 MB, budget 24.0 MB (+10.0%)`.

    - `exceeded`: the measured figure, None if it is not known, and the limit.
    - `what`: what the limit is called.
    """
    figure, (value, limit) = max(exceeded.items(), key=lambda item: _excess(*item[1]))
    name, _, kind = figure.rpartition("_")
    units = _UNITS.get(kind, ((kind, 1),))
    largest = max(value or 0, limit)
    unit, size = next((one for one in units if largest >= one[1]), units[-1])
    name = name or figure
    if value is None:
        return f"{name} not known, {what} {limit / size:,.1f} {unit}"
    for digits in (0,) if size == 1 else (1, 2, 3, 6):
        before, after = (f"{number / size:,.{digits}f} {unit}" for number in (limit, value))
        if before != after:
            break
    share = f" ({value / limit - 1:+.1%})" if limit else ""
    return f"{name} {after}, {what} {before}{share}"


def _excess(value: float | None, limit: float) -> float:
    return math.inf if value is None or not limit else value / limit


def in_words(figures: Figures) -> str:
    """The figures of a budget in one line, such as `heap 1,024, estimated step 1.250 ms`."""
    parts = []
    for figure, value in sorted(figures.items()):
        name, unit, number = _wording(figure, value)
        parts.append(f"{name} {number(value)}{'' if figure in BYTES else f' {unit}'}")
    return ", ".join(parts)


def _wording(figure: str, largest: float) -> tuple[str, str, Callable[[float], str]]:
    """The name and unit of a figure, and how to write it; ms or µs by the largest number."""
    if figure in BYTES:
        return figure.removesuffix("_bytes"), "bytes", lambda value: f"{value:,}"
    unit, size = ("ms", 1e-3) if largest >= 1e-3 else ("µs", 1e-6)
    return "estimated step", unit, lambda value: f"{value / size:,.3f}"


def compiler_of(platform: str, versions: Mapping[str, str | None]) -> str:
    """The versions that a budget is for: `jaxlib 0.10.2, libtpu 0.0.42.1`."""
    packages = _PACKAGES.get(platform.partition(":")[0])
    if packages is None:
        raise InputError(
            f"platform={platform!r} cannot have a budget: devices differ between machines; choose "
            "cpu, or a compiler such as tpu:v5p:2x2x2 or cuda:h100:8"
        )
    parts = [f"{name} {versions[name]}" for name in packages]
    # XLA compiles different programs for the CPUs of a laptop and for those of a server.
    return ", ".join([*parts, machine()] if platform == "cpu" else parts)


def figures_of(result: object) -> dict[str, float | None]:
    figures = {name: getattr(result, name) for name in FIGURES}
    for name in SECONDS:
        if figures[name] is not None:
            figures[name] = round(figures[name], _DIGITS)
    return figures


def above(measured: Mapping[str, float | None], budget: Figures, tolerance: float) -> list[Change]:
    return [
        Change(name, allowed, value)
        for name, allowed in budget.items()
        if (value := measured.get(name)) is None or value > allowed * (1 + tolerance)
    ]


def below(measured: Mapping[str, float | None], budget: Figures, tolerance: float) -> list[Change]:
    return [
        Change(name, allowed, value)
        for name, allowed in budget.items()
        if (value := measured.get(name)) is not None and value < allowed * (1 - tolerance)
    ]


def read_budgets(path: Path) -> Budgets:
    """The budgets of a file, none if there is no file; raises InputError unless all are valid."""
    try:
        return parsed(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}; {_CURE}") from error


def parsed(text: str, path: Path | str) -> Budgets:
    """The budgets of the text of a file; raises InputError unless all are valid."""
    content = tomllib.loads(text)
    budgets: Budgets = {}
    entries = content.pop("budget", [])
    if content or not isinstance(entries, list):
        names = ", ".join(content) or "budget"
        raise InputError(f"{path} holds [[budget]] entries only and has {names!r}; {_CURE}")
    for number, entry in enumerate(entries, start=1):
        key, figures = _entry(path, number, entry)
        if key in budgets:
            raise InputError(f"{path}: budget {number} is a second one for {key}; {_CURE}")
        budgets[key] = figures
    return budgets


_CURE = "correct it, or delete it and run `pytest --update-memory-budgets`"


def _entry(path: Path | str, number: int, entry: object) -> tuple[Key, Figures]:
    where = f"{path}: budget {number}"
    if not isinstance(entry, dict):
        raise InputError(f"{where} is {entry!r} and not a table; {_CURE}")
    missing = sorted({"test", "platform", "compiler"} - set(entry))
    if missing:
        raise InputError(f"{where} has no {missing[0]!r}; {_CURE}")
    texts = {name: entry.get(name, "") for name in Key._fields}
    wrong = [f"{name} = {value!r}" for name, value in texts.items() if not isinstance(value, str)]
    figures = {name: value for name, value in entry.items() if name not in Key._fields}
    wrong += [f"{name} = {it!r}" for name, it in figures.items() if not _is_figure(name, it)]
    if wrong:
        raise InputError(
            f"{where} has {wrong[0]}; strings are {', '.join(Key._fields)}, whole numbers of bytes "
            f"are {', '.join(BYTES)}, and a number of seconds is {', '.join(SECONDS)}; {_CURE}"
        )
    return Key(**texts), figures


def _is_figure(name: str, value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)  # `true` is no number
    if name in BYTES:
        return whole and value >= 0
    # TOML has `nan` and `inf`.
    number = whole or (isinstance(value, float) and math.isfinite(value))
    return name in SECONDS and number and value >= 0


def to_toml(budgets: Mapping[Key, Figures]) -> str:
    """The content of the file, sorted by key so that the same budgets give the same text."""
    return "\n".join([_HEAD, *(_table(key, budgets[key]) for key in sorted(budgets))])


def _table(key: Key, figures: Figures) -> str:
    # A JSON string is a TOML string, too, once the one control character is escaped that JSON
    # lets pass.
    texts = {
        name: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        for name, value in zip(Key._fields, key, strict=True)
        if value
    }
    numbers = {name: f"{figures[name]:_}" for name in BYTES if name in figures}
    # Written out: `1.2e-05` is harder to compare with its neighbour in a diff.
    numbers |= {name: f"{figures[name]:.{_DIGITS}f}" for name in SECONDS if name in figures}
    return "\n".join(["[[budget]]", *(f"{k} = {v}" for k, v in {**texts, **numbers}.items()), ""])


def write_budgets(path: Path, budgets: Mapping[Key, Figures]) -> None:
    write_text(str(path), to_toml(budgets))


def updated(
    old: Mapping[Key, Figures],
    passed: Mapping[str, Mapping[Key, Figures]],
    gone: Callable[[str], bool],
) -> Budgets:
    """The budgets after a test run that updates them; those of other compiler versions are kept.

    Of a test in `passed` the entries that it did not ask for are removed, and all of a test that is
    `gone`.
    """
    requested = {test: {(key.name, key.platform) for key in keys} for test, keys in passed.items()}
    merged = {
        key: figures
        for key, figures in old.items()
        if not gone(key.test)
        and (key.test not in requested or (key.name, key.platform) in requested[key.test])
    }
    for keys in passed.values():
        merged.update(keys)
    return merged


def same_elsewhere(budgets: Iterable[Key], key: Key) -> list[str]:
    return sorted(other.compiler for other in budgets if other[:3] == key[:3] and other != key)


@dataclass
class Results:
    descriptions: list[str] = field(default_factory=list)
    requested: dict[Key, Figures] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    unused: list[MarkedBudget] = field(default_factory=list)  # nothing was compared with them yet


@dataclass
class SessionBudgets:
    """The budgets of a test run; workers of xdist leave the last four fields empty."""

    path: Path
    budgets: Budgets
    update: bool
    strict: bool  # what would be skipped fails
    tolerance: float
    baseline: str = ""  # the revision that the budgets are of
    text: str = ""  # the budgets of the revision, once they are measured
    selected: bool = False  # tests were left out: one that did not run may still exist
    collected: int = 0
    seen: set[str] = field(default_factory=set)
    passed: dict[str, dict[Key, Figures]] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
