"""Shows results as tables for the terminal, and writes them as JSON."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab._report.columns import small_table, texts
from nnx_pipeline.lab._report.output import show
from nnx_pipeline.lab._report.program_tables import (
    difference_view,
    floor_view,
    memory_view,
    time_table,
    times_view,
)
from nnx_pipeline.lab._report.view import figures, remarks
from nnx_pipeline.lab._report.view.figures import DASH, TRITON, megabytes
from nnx_pipeline.lab._report.view.sentences import closing_sentences
from nnx_pipeline.lab._report.view.words import PAGE
from nnx_pipeline.lab.attribution._result import ADVICE, Attribution
from nnx_pipeline.lab.comparison.outcome import Outcome
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import InputError

LEFT_OUT = ("peak MB", "heap MB")  # on a narrow screen, the first one first
_LABEL = 14  # letters of a label that a figure may take no room from
_FIGURE = len("account MB")  # width of a column of figures, in letters
_KEY = "  {}:"  # before the label of an arm
_KEY_WIDTH = len(_KEY.format("a"))


def measurement_view(
    title: str,
    measurement: Measurement,
    *,
    hint: bool = True,
    advice: Mapping[str, str] = ADVICE,
) -> RenderableType:
    """What one program costs; `hint` names the option that shows both kinds of products."""
    memory = _account_table(measurement)
    memory.add_section()
    for label, field in figures.OTHER_ROWS.items():
        memory.add_row(label, megabytes(getattr(measurement.memory, field)))
    lines: list[RenderableType] = [
        Text(title, style="bold"),
        Text(f"compiler: {figures.compiler(measurement)}"),
        *(Text(f"{name}: {choice}") for name, choice in measurement.choices.items()),
        *texts(remarks.settings_remarks([measurement])),
        memory,
        _traffic(measurement),
        Text(f"matrix products: {_products(measurement)}"),
        time_table(measurement.time),
        *texts(remarks.rate_remarks(measurement)),
        *floor_view(measurement),
        Text("seconds: " + ", ".join(f"{k} {v:.2f}" for k, v in measurement.seconds.items())),
    ]
    closing = [
        *remarks.cpu_remarks([measurement]),
        *remarks.gemm_remarks([measurement], hint=hint),
        *remarks.blind_spots([measurement]),
        *remarks.warnings([*remarks.unread_lines([measurement]), *measurement.notes]),
        *remarks.fit_remarks(measurement, advice),
    ]
    return Group(*lines, *texts(closing))


def account_view(measurement: Measurement, *, advice: Mapping[str, str] = ADVICE) -> RenderableType:
    closing = [
        *remarks.cpu_remarks([measurement]),
        *remarks.blind_spots([measurement]),
        *remarks.settings_remarks([measurement]),
        *remarks.warnings(measurement.notes),
        *remarks.fit_remarks(measurement, advice),
    ]
    return Group(_account_table(measurement), *texts(closing))


def memory_report(title: str, measurement: Measurement, *, top: int) -> RenderableType:
    """All that `nnx-pipeline memory` shows of one program; raises InputError where its compiler
    gave no buffer assignment."""
    attribution = buffers_of(measurement)
    by = f", matrix products by {figures.products_by(measurement)}" if measurement.gemm else ""
    named = f"{title}, {figures.compiler(measurement)}{by}"
    parts = [memory_view(named, attribution, top=top), account_view(measurement)]
    if measurement.time or measurement.unread:
        parts.append(times_view(measurement, top=top))
    return Group(*parts)


def buffers_of(measurement: Measurement) -> Attribution:
    """What the heap holds; raises InputError where the compiler gave no buffer assignment."""
    if measurement.attribution is not None:
        return measurement.attribution
    unread = remarks.unread_lines([measurement])
    about = [line for line in unread if remarks.FIGURES["buffers"] in line]
    raise InputError(
        about[0]
        if about
        else f"{measurement.platform} gave no buffer assignment; a program from JAX's persistent "
        "compilation cache has none: unset jax_compilation_cache_dir"
    )


def _account_table(measurement: Measurement) -> Table:
    table = Table(title="memory per device", title_justify="left")
    table.add_column("", overflow="fold")
    table.add_column("MB", justify="right", no_wrap=True)
    *parts, (label, total) = figures.account_rows(measurement).items()
    for part, size in parts:
        table.add_row(part, megabytes(size))
    table.add_section()
    table.add_row(label, megabytes(total), style="bold")
    return table


def _traffic(measurement: Measurement) -> RenderableType:
    if measurement.collectives is None:
        return Text(f"collectives: {DASH}")
    rows = []
    for name, count in measurement.collectives.items():
        times = (DASH if count[key] is None else str(count[key]) for key in ("ops", "executed"))
        rows.append((name, *times, megabytes(count["bytes"])))
    heads = ("", "in program", "executed", "result MB")
    return small_table("collectives per device and step", heads, rows)


def outcomes_view(title: str, outcomes: Sequence[Outcome], *, hint: bool = True) -> RenderableType:
    arms = [arm for outcome in outcomes for arm in _arms(outcome)]
    letters = max((len(label) for label, _ in arms), default=0)
    timed = any(result and result.time for _, result in arms)
    heads = [*(f"{name} MB" for name in figures.COLUMNS), *(["step ms"] if timed else [])]
    parts: list[RenderableType] = [
        Text(title, style="italic"),
        _Rows([("", heads)], letters, heads, keys=""),
    ]
    for outcome in outcomes:
        rows = [(label, _figures(result, timed)) for label, result in _arms(outcome)]
        settings = [Padding(Text(line), (0, 0, 0, 2)) for line in remarks.arm_lines(outcome)]
        parts += [Text(heading(outcome), style="bold"), *settings, _Rows(rows, letters, heads)]
    parts.append(_LeftOut(_Rows([], letters, heads)))
    closing = remarks.warnings(f"{o.question.name}: {o.note}" for o in outcomes if o.note)
    measured = [m for o in outcomes for m in (o.a, o.b) if m]
    closing += remarks.closing_remarks(
        measured, [o.numerics for o in outcomes if o.numerics], hint=hint, fresh=True
    )
    changes = [
        difference_view(
            f"{outcome.question.name}: what differs at the peak of the heap", outcome.buffers
        )
        for outcome in outcomes
        if outcome.buffers
    ]
    return Group(*parts, *changes, *texts([*closing, *closing_sentences(outcomes)]))


@dataclass(frozen=True)
class _Rows:
    """Labels and figures of the arms, aligned in the same columns for all experiments.

    A label too long for its room takes several lines, once the figures of LEFT_OUT are gone.
    """

    rows: Sequence[tuple[str, Sequence[str]]]
    letters: int
    heads: Sequence[str]
    keys: str = "ab"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table.grid(padding=(0, 2, 0, 0))
        shown = self.shown(options.max_width)
        table.add_column("", width=_KEY_WIDTH)
        room = self._room(options.max_width, len(shown))
        table.add_column("", width=max(8, min(self.letters, room)), overflow="fold")
        for _ in shown:
            table.add_column(justify="right", no_wrap=True, min_width=_FIGURE)
        for key, (label, sizes) in zip(self.keys or " ", self.rows, strict=False):
            cells = (sizes[at] for at in shown)
            table.add_row(_KEY.format(key) if self.keys else "", label, *cells)
        yield table

    def shown(self, width: int) -> list[int]:
        shown = list(range(len(self.heads)))
        for name in LEFT_OUT:
            if name in self.heads and self._room(width, len(shown)) < min(self.letters, _LABEL):
                shown.remove(self.heads.index(name))
        return shown

    def _room(self, width: int, columns: int) -> int:
        return width - columns * (_FIGURE + 2) - (_KEY_WIDTH + 2)


@dataclass(frozen=True)
class _LeftOut:
    rows: _Rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self.rows.shown(options.max_width)
        if missing := [head for at, head in enumerate(self.rows.heads) if at not in shown]:
            names = f"left out at {options.max_width} columns: {', '.join(missing)}"
            yield Text(names, style="dim")


def _figures(result: Measurement | None, timed: bool) -> list[str]:
    sizes = [
        getattr(result.memory, f"{name}_bytes") if result else None for name in figures.COLUMNS
    ]
    step = figures.estimated(result.time if result else None, "step_seconds")
    return [*map(megabytes, sizes), *([step] if timed else [])]


def _arms(outcome: Outcome) -> list[tuple[str, Measurement | None]]:
    return [
        (f"{label}{remarks.TOO_LARGE if result and result.exceeds_device_memory else ''}", result)
        for label, result in outcome.arms
    ]


def heading(outcome: Outcome) -> str:
    question = outcome.question
    name = f"{question.name} ({question.claim})" if question.claim else question.name
    text = f"{name}: {figures.verdict_words(outcome)}"
    if (ratio := outcome.ratio(question.judged_by)) is not None:
        text += f", b/a {ratio:.3f}"
    if outcome.numerics:
        text += f"; same numbers: {figures.same_numbers(outcome.numerics)}"
    return text


def show_measurements(
    title: str,
    results: Sequence[Measurement],
    *,
    json_path: str | None,
    advice: Mapping[str, str] = ADVICE,
) -> None:
    """Shows the program once, or with Triton's and with a library's matrix products."""
    view = functools.partial(measurement_view, title, hint=len(results) == 1, advice=advice)
    show(view(results[0]), json_path=json_path)
    for other in results[1:]:
        line = figures.in_place_of_report(results[0], other)
        show(view(other) if line is None else line, json_path=json_path)


def with_other_gemm(rows: Sequence[dict[str, object]]) -> dict[str, object]:
    first, *others = rows
    return {**first, "other_gemm": others[0]} if others else first


def show_outcomes(
    title: str, by_gemm: Sequence[Sequence[Outcome]], platform: str, *, json_path: str | None
) -> None:
    """Shows the outcomes once, or with Triton's and with a library's matrix products."""
    both = len(by_gemm) > 1
    named = f"{title}, matrix products by {TRITON}" if both else title
    show(outcomes_view(named, by_gemm[0], hint=not both), json_path=json_path)
    if both:
        pairs = zip(*by_gemm, strict=True)
        differing = [
            other for one, other in pairs if figures.differ_by_gemm(one, other) or other.failed
        ]
        named = f"{title}, matrix products by {figures.library(platform)}, where that differs"
        view = outcomes_view(named, differing, hint=False)
        show(view if differing else figures.same_memory(platform), json_path=json_path)


def outcomes_json(by_gemm: Sequence[Sequence[Outcome]], platform: str) -> dict[str, object]:
    result: dict[str, object] = {"schema": 1, "platform": platform}
    for key, outcomes in zip(("experiments", "experiments_cublas"), by_gemm, strict=False):
        result[key] = [outcome.to_json() for outcome in outcomes]
    return result


def _products(measurement: Measurement) -> str:
    known = measurement.flops is None and measurement.known_flops is not None
    part = f", {figures.teraflops(measurement.known_flops)} of them known" if known else ""
    return f"{figures.teraflops(measurement.flops)} per device and step{part}"


def word_list(*groups: Mapping[str, str]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for group in groups:
        for word, sentence in group.items():
            table.add_row(word, sentence)
    return Group(table, Text(PAGE, style="dim"))
