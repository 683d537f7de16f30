"""A comparison as a comment for a pull request, in the Markdown that GitHub shows."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from nnx_pipeline.lab._report.program_tables import TOP, signed, sized
from nnx_pipeline.lab._report.view import figures, remarks
from nnx_pipeline.lab._report.view.buffers import SMALLEST, difference_row
from nnx_pipeline.lab._report.view.figures import DASH, megabytes, milliseconds
from nnx_pipeline.lab._report.view.sentences import changes_of
from nnx_pipeline.lab.attribution._result import ADVICE, BufferDifference
from nnx_pipeline.lab.comparison.outcome import NO_EFFECT, Outcome
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import counted, printable

MARKER = "<!-- nnx-pipeline -->"  # by it the comment of an earlier run is found
LONGEST = 60_000  # characters; GitHub refuses a comment of more than 65,536
MORE = 25  # rows below the first ones
_BETWEEN = 10  # characters between two parts of a comment, and some more
_CHANGED = "●"  # before a line that the change touches


# The lines that a change touches, by the path of their file, absolute or from the root of a
# repository. An empty range is a place from which lines were removed.
ChangedLines = Mapping[str, Collection[range]]


class _Row(NamedTuple):
    change: BufferDifference
    is_changed: bool  # the change touches its line


def outcomes_markdown(
    title: str,
    by_gemm: Sequence[Sequence[Outcome]],
    *,
    changed: ChangedLines = MappingProxyType({}),
    link: str | None = None,
    command: str = "",
) -> str:
    """The comment; it begins with MARKER.

    - `title`: what is compared.
    - `by_gemm`: the outcomes once, or with Triton's and with a library's matrix products.
    - `changed`: the lines that a change touches: their buffers come first.
    - `link`: the address of the page.
    - `command`: what made the comparison.
    """
    named = list(_named(by_gemm))
    end = [f"[The page of this comparison]({link})"] if link else []
    end += [_details("How this was compared", _how(by_gemm, command))]
    if len(named) == 1:
        ((_, outcome),) = named
        blocks = [
            f"{_headline(outcome)}\n\n{_text(title)}",
            *_blocks(outcome, _rows(outcome, changed)),
        ]
    else:
        blocks = [f"**{counted(len(named), 'comparison')}**: {_text(title)}", _summary(named)]
        room = LONGEST - sum(map(len, [*blocks, *end])) - _BETWEEN * (len(named) + 5)
        for at, (name, outcome) in enumerate(named):
            inner = "\n\n".join([_headline(outcome), *_blocks(outcome, _rows(outcome, changed))])
            block = _details(f"{name}: {figures.verdict_words(outcome)}", inner)
            room -= len(block)
            if room < 0:
                blocks.append(f"{len(named) - at} more are too long for a comment.")
                break
            blocks.append(block)
    return "\n\n".join([MARKER, *blocks, *end]) + "\n"


def _named(by_gemm: Sequence[Sequence[Outcome]]) -> Iterator[tuple[str, Outcome]]:
    first, *others = by_gemm
    for at, outcome in enumerate(first):
        name = outcome.question.name
        yield name, outcome
        for other in (outcomes[at] for outcomes in others):
            if figures.differ_by_gemm(outcome, other) or other.failed:
                yield f"{name}, {figures.library_of(other)}", other


def _headline(outcome: Outcome) -> str:
    words = figures.verdict_words(outcome)
    if not outcome.question.claim:  # what follows names the account
        words = words.removesuffix(" by the account")
    said = f": {changes_of(outcome)}." if outcome.a and outcome.b else ""
    return f"**{words[0].upper()}{words[1:]}**{said}"


def _summary(named: Sequence[tuple[str, Outcome]]) -> str:
    rows = []
    for name, outcome in named:
        sizes = map(megabytes, outcome.bytes_of("account"))
        times = [arm.time if arm else None for arm in (outcome.a, outcome.b)]
        steps = (figures.estimated(time, "step_seconds") for time in times)
        words = figures.verdict_words(outcome)
        rows.append((_text(name), words, " → ".join(sizes), " → ".join(steps)))
    return _table(("", "verdict", "account, MB", "step, ms"), rows, numbers=range(2, 4))


def _blocks(outcome: Outcome, rows: Sequence[_Row]) -> Iterator[str]:
    arms = zip("ab", outcome.question.labels, strict=True)
    yield "\n".join(f"- {key}: {_code(label)}" for key, label in arms)
    if outcome.note:
        yield f"Note: {_text(outcome.note)}"
    if not (outcome.a and outcome.b):
        return
    yield _figures(outcome.a, outcome.b)
    warnings = [*remarks.cpu_remarks([outcome.b]), *remarks.fit_remarks(outcome.b, {})[:1]]
    bands = dict.fromkeys(figures.band(one.time) for one in (outcome.a, outcome.b) if one.time)
    yield _bullets(
        [
            *(f"b: {remark.text}" for remark in warnings),
            *(f"the step is an estimate; {band}" for band in bands),
        ]
    )
    if rows:
        yield "What differs at the peak of the heap:"
        yield _differences(rows[:TOP])
        if rows[0].is_changed:
            yield f"{_CHANGED} lines that the change touches"
        rest = [row for row in rows[TOP:] if abs(row.change.change) >= SMALLEST]
        if more := rest[:MORE]:
            left_out = f", of {len(rest)}" if len(rest) > MORE else ""
            yield _details(f"{len(more)} more{left_out}", _differences(more))
        least = NO_EFFECT * outcome.a.needed_bytes
        changes = [row.change for row in rows[:TOP]]
        grown = dict.fromkeys(change.role for change in changes if change.change > least)
        if cures := [ADVICE[role] for role in grown if role in ADVICE]:
            yield f"To try, for what grew:\n\n{_bullets(cures)}"


def _figures(a: Measurement, b: Measurement) -> str:
    rows = []
    for name in ("account", "heap", "temp"):
        before, after = (getattr(arm.memory, f"{name}_bytes") for arm in (a, b))
        sizes = map(megabytes, (before, after))
        rows.append((f"{name}, MB", *sizes, *_change(before, after, megabytes)))
        if name == "account" and (device := b.device_memory_bytes):
            shares = [DASH if n is None else f"{n / device:.1%}" for n in (before, after)]
            rows.append((f"of the {device / 1e9:,.1f} GB of a device", *shares, "", ""))
    known = [arm.time.step_seconds if arm.time else None for arm in (a, b)]
    before, after = known if figures.are_alike(a.time, b.time) else (None, None)
    shown = (figures.estimated(arm.time, "step_seconds") for arm in (a, b))
    rows.append(("estimated step, ms", *shown, *_change(before, after, milliseconds)))
    return _table(("per device", "a", "b", "b − a", ""), rows, numbers=range(1, 5))


def _change(
    before: float | None, after: float | None, show: Callable[[float], str]
) -> tuple[str, str]:
    if before is None or after is None:
        return DASH, ""
    sign = "+" if after > before else "−" if after < before else ""
    share = figures.relative_change(before, after) if before and sign else ""
    return f"{sign}{show(abs(after - before))}", share


def _rows(outcome: Outcome, changed: ChangedLines) -> list[_Row]:
    """The differences between the buffers, those of changed lines first."""
    rows = [
        _Row(one, any(_is_in(place, changed) for side in one.sides for place in side.places))
        for one in outcome.buffers or ()
    ]
    return sorted(rows, key=lambda row: not row.is_changed)


def _differences(rows: Sequence[_Row]) -> str:
    cells = []
    for change, is_changed in rows:
        shown = difference_row(change)
        mark = f"{_CHANGED} " * is_changed
        sizes = (signed(change.change), sized(change.a_bytes), sized(change.b_bytes))
        line = shown.source if shown.source == DASH else _code(shown.source)
        array = _code(shown.shape) if shown.shape else ""
        what = (_text(shown.role), f"{mark}{line}", _text(shown.operation), array)
        cells.append((*sizes, *what))
    heads = ("b − a, MB", "a", "b", "role", "line", "operation", "array")
    return _table(heads, cells, numbers=range(3))


def _is_in(place: str, changed: ChangedLines) -> bool:
    path, _, line = place.rpartition(":")
    parts = Path(path).parts
    return any(
        int(line) in (lines or range(lines.start, lines.start + 1))
        for file, ranges in changed.items()
        if parts[-len(Path(file).parts) :] == Path(file).parts
        for lines in ranges
    )


def _how(by_gemm: Sequence[Sequence[Outcome]], command: str) -> str:
    outcomes = [outcome for some in by_gemm for outcome in some]
    measured = [arm for one in outcomes for arm in (one.a, one.b) if arm]
    compared = [one.numerics for one in outcomes if one.numerics]
    closing = remarks.closing_remarks(measured, compared, hint=False, fresh=True)
    texts = dict.fromkeys(remark.text for remark in closing)
    lines = _bullets(text for text in texts if not text.startswith("step: "))  # said above
    return f"{lines}\n\n```sh\n{printable(command)}\n```" if command else lines


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_text(line)}" for line in lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: range) -> str:
    """The columns of `numbers` are aligned on the right; cells are Markdown."""
    rule = ["--:" if at in numbers else "---" for at in range(len(head))]
    lines = (" | ".join(cell or " " for cell in row) for row in (head, rule, *rows))
    return "\n".join(f"| {line} |" for line in lines)


def _details(summary: str, inner: str) -> str:
    return f"<details><summary>{_html(summary)}</summary>\n\n{inner}\n\n</details>"


def _html(text: str) -> str:
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _code(text: str) -> str:
    """Text as code, in a cell of a table too, where GitHub reads `\\|` as a bar."""
    text = printable(text).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " * (text[:1] == "`" or text[-1:] == "`")
    return f"{fence}{space}{text}{space}{fence}"


def _text(text: str) -> str:
    """Text as it is; an @ is shown as code, since GitHub would write to the person of that name."""
    text = re.sub(r"([\\`*_\[\]|~])", r"\\\1", printable(text))
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("@", "`@`")
