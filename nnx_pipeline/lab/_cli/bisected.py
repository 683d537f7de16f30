"""What the command `bisect` does: the search, over commits or over versions of a package."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version
from rich.console import Group
from rich.text import Text

from nnx_pipeline.lab._baseline.arm import Arm, at_revision
from nnx_pipeline.lab._baseline.environment import environment_of, parse_wanted
from nnx_pipeline.lab._baseline.execute import execute
from nnx_pipeline.lab._baseline.repository import Commit, Repository
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import Subject
from nnx_pipeline.lab._cli.support import Failed
from nnx_pipeline.lab._cli.values import Target
from nnx_pipeline.lab._report.columns import Column, Columns
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab.comparison.limit import Limit, in_units, parse_limit
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.errors import InputError, Unavailable

_ENOUGH = 0.01  # the share by which BAD must be above GOOD where no limit is given


@dataclass
class Search:
    """The states between a good and a bad one, and what was measured of them.

    - `measure`: compiles one of them, or returns why it did not compile; may raise InputError and
      Unavailable.
    - `found`: what came of it, by the state, in the order in which they were compiled.
    """

    measure: Callable[[Any], Measurement | str]
    say: Progress
    found: dict[Any, Measurement | str] = field(default_factory=dict)

    def of(self, state: Any) -> Measurement | str:
        if state not in self.found:
            try:
                self.found[state] = self.measure(state)
            except (InputError, Unavailable) as error:
                self.found[state] = str(error)
        return self.found[state]

    def end(self, state: Any) -> Measurement:
        """One of the two given states; raises as `measure`, and Failed if it did not compile."""
        found = self.found[state] = self.measure(state)
        if isinstance(found, str):
            raise Failed(f"{state} did not compile, and the search needs it: {found}")
        return found

    def first_beyond(self, states: Sequence[Any], limit: Limit) -> list[Any]:
        """The first state beyond the limit; several where those between did not compile.

        The last of `states` is beyond it, and what is before the first is not.
        """
        low, high, left = -1, len(states) - 1, set(range(len(states) - 1))
        while inside := [at for at in left if low < at < high]:
            middle = min(inside, key=lambda at: (abs(2 * at - low - high), at))
            left.remove(middle)
            found = self.of(states[middle])
            value = None if isinstance(found, str) else limit.of(found)
            if value is None:
                word = "passed over"
            elif value > limit.value:
                high, word = middle, "beyond"
            else:
                low, word = middle, "within"
            shown = in_units(limit.figure, value)
            self.say(f"{states[middle]}: {shown}, {word}; {high - low - 1} left")
        return [*states[low + 1 : high + 1]]


def run_bisect(
    ends: tuple[str, str], subject: Subject, target: Target, text: str | None, json_path: str | None
) -> None:
    limit = parse_limit("--limit", text) if text is not None else None
    platform = target.for_other_process()[0]
    gemm = target.gemm or ("triton" if platform.is_gpu else None)
    words = [*subject.words(), *dataclasses.replace(target, gemm=gemm).words()]
    versions = ["==" in end for end in ends]
    if any(versions) and not all(versions):
        raise InputError(
            f"{ends[0]} {ends[1]}: give two revisions, or two versions of a package such as "
            "jax==0.10.2 jax==0.12.0.1"
        )
    first: Sequence[object]
    with progress() as say:
        if all(versions):
            limit, first, search = _versions(ends, words, platform.kind, limit, say)
        else:
            limit, first, search = _commits(ends, words, limit, say)
    title = f"{subject.title()}, {platform}: {limit} is crossed"
    show(_view(title, limit, first, search), json_path=json_path)
    emit_json(json_path, _document(str(platform), limit, first, search))


def _commits(
    ends: tuple[str, str], words: Sequence[str], limit: Limit | None, say: Progress
) -> tuple[Limit, list[Commit], Search]:
    repository = Repository.here()
    good, bad = map(repository.commit, ends)
    states = repository.between(good, bad)
    if not states:
        raise InputError(f"{ends[0]} {ends[1]}: there is no commit after {good} up to {bad}")

    def measure(commit: Commit) -> Measurement | str:
        with at_revision(repository, commit, commit.short, words) as arm:
            return _first(arm, say)

    search = Search(measure, say)
    limit = _crossed(limit, search, good, bad)
    first = search.first_beyond(states, limit)
    while len(first) == 1 and len(parents := repository.parents(first[0])) == 2:
        # What a merge brought in is on the way from where its branch began.
        merged = repository.along(*parents)
        found = search.of(parents[1])
        value = None if isinstance(found, str) else limit.of(found)
        if not merged or value is None or value <= limit.value:
            break
        first = search.first_beyond(merged, limit)
    return limit, first, search


def _versions(
    ends: tuple[str, str],
    words: Sequence[str],
    kind: str,
    limit: Limit | None,
    say: Progress,
) -> tuple[Limit, list[str], Search]:
    good, bad = (parse_wanted("bisect", end) for end in ends)
    older, newer = sorted((good.version, bad.version), key=Version)
    if good.name != bad.name or older == newer:
        raise InputError(f"{ends[0]} {ends[1]}: give two versions of one package")

    def measure(state: str) -> Measurement | str:
        environment = environment_of("bisect", [state], kind, say)
        return _first(Arm(label=state, words=tuple(words), environment=environment), say)

    search = Search(measure, say)
    limit = _crossed(limit, search, str(good), str(bad))
    between = _published(good.name, older, newer)
    if bad.version == older:  # what a newer version needs less: the search goes back from it
        between.reverse()
    states = [f"{good.name}=={one}" for one in (*between, bad.version)]
    return limit, search.first_beyond(states, limit), search


def _first(arm: Arm, say: Progress) -> Measurement | str:
    found = arm.measured(say)
    return found if isinstance(found, str) else found[0]


def _published(name: str, oldest: str, newest: str) -> list[str]:
    """The versions between two, oldest first, without those that are no releases."""
    asked = [sys.executable, "-m", "pip", "index", "versions", name, "--ignore-requires-python"]
    code, said = execute([*asked, "--disable-pip-version-check"], keep_output=True)
    listed = re.search(r"Available versions: (.*)", said)
    if code or not listed:
        raise Failed(f"pip does not list the versions of {name}: {' '.join(said.split())[:200]}")
    found = sorted(map(Version, listed[1].split(", ")))
    return [str(one) for one in found if Version(oldest) < one < Version(newest)]


def _crossed(limit: Limit | None, search: Search, good: Any, bad: Any) -> Limit:
    """The limit as a value that `bad` is beyond and `good` is not; raises Failed."""
    one, other = search.end(good), search.end(bad)
    if limit is not None:
        limit = limit.beside(one)
        values = [limit.of(found) for found in (one, other)]
        shown = [in_units(limit.figure, value) for value in values]
        if None in values:
            raise Failed(f"the {limit.figure} is not known of {good} and {bad}; choose another")
        within, beyond = (value or 0 for value in values)
        if not within <= limit.value < beyond:
            raise Failed(
                f"{limit} is not crossed between {good} ({shown[0]}) and {bad} ({shown[1]})"
            )
        return limit
    for figure in ("account", "step"):
        half = Limit(figure, 0.0)
        before, after = half.of(one), half.of(other)
        if before is not None and after is not None and after > before * (1 + _ENOUGH):
            return dataclasses.replace(half, value=(before + after) / 2)
    raise Failed(
        f"{bad} needs no more memory and no more time than {good}, by {_ENOUGH:.0%}: there is "
        "nothing to find"
    )


def _view(title: str, limit: Limit, first: Sequence[Any], search: Search) -> Group:
    table = Columns([Column("compiled"), Column(limit.figure, is_number=True), Column("")])
    for state, found in search.found.items():
        value = None if isinstance(found, str) else limit.of(found)
        word = "not compiled" if value is None else "beyond" if value > limit.value else "within"
        table.add_row(str(state), in_units(limit.figure, value), word)
    errors = [
        Text(f"{state}: {found}", style="yellow")
        for state, found in search.found.items()
        if isinstance(found, str)
    ]
    said = (
        f"first beyond it: {first[0]}"
        if len(first) == 1
        else f"first beyond it is one of {len(first)}, as those between did not compile: "
        + "; ".join(map(str, first))
    )
    return Group(Text(title, style="italic"), table, *errors, Text(said, style="bold"))


def _document(platform: str, limit: Limit, first: Sequence[Any], search: Search) -> dict[str, Any]:
    def named(state: Any) -> dict[str, str]:
        if isinstance(state, Commit):
            return {"commit": state.id, "subject": state.subject}
        return {"version": str(state)}

    return {
        "schema": 1,
        "platform": platform,
        "limit": {"figure": limit.figure, "value": limit.value},
        "first": [named(state) for state in first],
        "compiled": [
            {
                **named(state),
                "error": found if isinstance(found, str) else None,
                "value": None if isinstance(found, str) else limit.of(found),
            }
            for state, found in search.found.items()
        ],
    }
