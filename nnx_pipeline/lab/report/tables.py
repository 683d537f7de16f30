"""Shows results as tables for the terminal, and writes them as JSON."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab.comparison.numerics import Numerics
from nnx_pipeline.lab.comparison.outcome import NAMES, NOT_APPLICABLE, Outcome, Quantity
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.report.account_table import OTHER_ROWS, account_table, blind_spots
from nnx_pipeline.lab.report.fit import ADVICE, fit_lines
from nnx_pipeline.lab.report.floor_table import floor_view
from nnx_pipeline.lab.report.memory_tables import difference_view, megabytes
from nnx_pipeline.lab.report.output import emit_json, show
from nnx_pipeline.lab.report.sentences import closing_sentences
from nnx_pipeline.lab.report.settings_lines import arm_lines, left_out_lines, settings_lines
from nnx_pipeline.lab.report.time_table import estimated, time_table
from nnx_pipeline.lab.report.unread import unread_lines

CPU_WARNING = (
    "CPU figures mislead: remat can raise them, and the peak leaves out the temporaries of a loop. "
    "Compare on a TPU or NVIDIA platform."
)
TOO_LARGE = " ✗"
GEMM_NAMES = {"triton": "Triton", "cublas": "cuBLASLt"}
SAME_MEMORY = Text(f"matrix products by {GEMM_NAMES['cublas']}: the same memory")
QUANTITIES: tuple[Quantity, ...] = ("temp", "heap", "account")
COLUMNS = ("temp", "heap", "peak", "account")  # of a table of arms
LEFT_OUT = ("peak MB", "heap MB")  # on a narrow screen, the first one first
_LABEL = 14  # letters of a label that a figure may take no room from
_FIGURE = len("account MB")  # width of a column of figures, in letters
_KEY = "  {}:"  # before the label of an arm
_KEY_WIDTH = len(_KEY.format("a"))


def compiler(measurement: Measurement) -> str:
    """The name of the platform, with the versions of the packages that its compiler is from."""
    versions = ", ".join(f"{name} {value}" for name, value in measurement.versions.items() if value)
    return f"{measurement.platform} ({versions})"


def measurement_view(
    title: str,
    measurement: Measurement,
    *,
    hint: bool = True,
    advice: Mapping[str, str] = ADVICE,
) -> RenderableType:
    """What one program costs: memory, collectives, matrix products, time, and notes.

    - `title`: the first line.
    - `measurement`: the program, such as a training step.
    - `hint`: whether to name the option that shows both kinds of matrix product.
    - `advice`: what to try where it does not fit, see `fit.fit_lines`.
    """
    memory = account_table(measurement)
    memory.add_section()
    for label, field in OTHER_ROWS:
        memory.add_row(label, megabytes(getattr(measurement.memory, field)))
    traffic = Table(title="collectives per device and step", title_justify="left")
    traffic.add_column("", no_wrap=True)
    for column in ("in program", "executed", "result MB"):
        traffic.add_column(column, justify="right", no_wrap=True)
    for name, count in (measurement.collectives or {}).items():
        times = ("–" if count[key] is None else str(count[key]) for key in ("ops", "executed"))
        traffic.add_row(name, *times, megabytes(count["bytes"]))
    lines: list[RenderableType] = [
        Text(title, style="bold"),
        Text(f"compiler: {compiler(measurement)}"),
        *(Text(f"{name}: {taken}") for name, taken in measurement.choices.items()),
        *_settings([measurement]),
        memory,
        traffic if measurement.collectives is not None else Text("collectives: –"),
        Text(f"matrix products: {_products(measurement)}"),
        time_table(measurement.time),
        *floor_view(measurement),
        Text("seconds: " + ", ".join(f"{k} {v:.2f}" for k, v in measurement.seconds.items())),
    ]
    if measurement.is_of_cpu:
        lines.append(Text(CPU_WARNING, style="yellow"))
    lines += [*_gemm([measurement], hint), *blind_spots([measurement])]
    lines += _unread([measurement])
    lines += [Text(note, style="yellow") for note in measurement.notes]
    return Group(*lines, *fit_lines(measurement, advice))


def account_view(measurement: Measurement) -> RenderableType:
    """The account alone, with remarks on its figures."""
    warning = [Text(CPU_WARNING, style="yellow")] if measurement.is_of_cpu else []
    told = [*warning, *blind_spots([measurement]), *_settings([measurement])]
    told += [Text(note, style="yellow") for note in measurement.notes]
    return Group(account_table(measurement), *told, *fit_lines(measurement))


def outcomes_view(title: str, outcomes: Sequence[Outcome], *, hint: bool = True) -> RenderableType:
    """One experiment after the other: the verdict, then the figures of both arms.

    - `title`: the first line.
    - `outcomes`: the experiments.
    - `hint`: as for `measurement_view`.
    """
    arms = [arm for outcome in outcomes for arm in _arms(outcome)]
    letters = max((len(label) for label, _ in arms), default=0)
    timed = any(result and result.time for _, result in arms)
    heads = [*(f"{name} MB" for name in COLUMNS), *(["step ms"] if timed else [])]
    parts: list[RenderableType] = [
        Text(title, style="italic"),
        _Rows([("", heads)], letters, heads, keys=""),
    ]
    for outcome in outcomes:
        rows = [(label, _figures(result, timed)) for label, result in _arms(outcome)]
        told = [Padding(Text(line), (0, 0, 0, 2)) for line in arm_lines(outcome)]
        parts += [Text(heading(outcome), style="bold"), *told, _Rows(rows, letters, heads)]
    parts.append(_LeftOut(_Rows([], letters, heads)))
    notes = [Text(f"{o.question.name}: {o.note}", style="yellow") for o in outcomes if o.note]
    measured = [m for o in outcomes for m in (o.a, o.b) if m]
    notes += closing_lines(measured, [o.numerics for o in outcomes if o.numerics], hint=hint)
    changes = [
        difference_view(
            f"{outcome.question.name}: what differs at the peak of the heap", outcome.buffers
        )
        for outcome in outcomes
        if outcome.buffers
    ]
    return Group(*parts, *changes, *notes, *closing_sentences(outcomes))


@dataclass(frozen=True)
class _Rows:
    """Labels and figures of the arms, aligned in the same columns for all experiments.

    - `rows`: label and figures of each arm.
    - `letters`: the length of the longest label. A label too long for the room that there is takes
      several lines, once the figures that a narrow screen leaves out are gone.
    - `heads`: what the figures are.
    - `keys`: the letter of each arm; "" for a row of heads.
    """

    rows: Sequence[tuple[str, Sequence[str]]]
    letters: int
    heads: Sequence[str]
    keys: str = "ab"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table.grid(padding=(0, 2, 0, 0))
        shown = self._shown(options.max_width)
        table.add_column("", width=_KEY_WIDTH)
        room = self._room(options.max_width, len(shown))
        table.add_column("", width=max(8, min(self.letters, room)), overflow="fold")
        for _ in shown:
            table.add_column(justify="right", no_wrap=True, min_width=_FIGURE)
        for key, (label, figures) in zip(self.keys or " ", self.rows, strict=False):
            kept = (figures[at] for at in shown)
            table.add_row(_KEY.format(key) if self.keys else "", label, *kept)
        yield table

    def missing(self, width: int) -> list[str]:
        """The heads of the figures that there is no room for."""
        shown = self._shown(width)
        return [head for at, head in enumerate(self.heads) if at not in shown]

    def _shown(self, width: int) -> list[int]:
        """Which figures there is room for, beside a label of `_LABEL` letters at most."""
        shown = list(range(len(self.heads)))
        for name in LEFT_OUT:
            if name in self.heads and self._room(width, len(shown)) < min(self.letters, _LABEL):
                shown.remove(self.heads.index(name))
        return shown

    def _room(self, width: int, columns: int) -> int:
        """The letters that are left for the label beside so many figures."""
        return width - columns * (_FIGURE + 2) - (_KEY_WIDTH + 2)


@dataclass(frozen=True)
class _LeftOut:
    """One line that names the figures which `rows` leaves out; nothing where it shows all."""

    rows: _Rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if missing := self.rows.missing(options.max_width):
            names = ", ".join(missing)
            yield Text(f"left out at {options.max_width} columns: {names}", style="dim")


def _figures(result: Measurement | None, timed: bool) -> list[str]:
    """The figures of an arm: its memory, and its estimated step if any arm of the table has one."""
    sizes = [getattr(result.memory, f"{name}_bytes") if result else None for name in COLUMNS]
    step = estimated(result.time if result else None, "step_seconds")
    return [*map(megabytes, sizes), *([step] if timed else [])]


def _arms(outcome: Outcome) -> list[tuple[str, Measurement | None]]:
    return [
        (f"{label}{TOO_LARGE if _exceeds(result) else ''}", result)
        for label, result in outcome.arms
    ]


def heading(outcome: Outcome) -> str:
    """Name and claim, the verdict and its figure, and whether both arms compute the same."""
    told = verdict_words(outcome)
    ratio = outcome.ratio(outcome.question.judged_by)
    if ratio is not None:
        told += f", b/a {ratio:.3f}"
    if outcome.numerics:
        told += f"; same numbers: {same_numbers(outcome.numerics)}"
    return f"{_name(outcome)}: {told}"


def verdict_words(outcome: Outcome) -> str:
    """The verdict with the figure that it is about, such as `holds by temp`."""
    words = outcome.verdict
    if words != NOT_APPLICABLE:
        words += f" by {NAMES[outcome.question.judged_by]}"
    return f"{words}, failed" if outcome.failed else words


def show_measurements(
    title: str,
    results: Sequence[Measurement],
    *,
    json_path: str | None,
    advice: Mapping[str, str] = ADVICE,
) -> None:
    """Prints the tables of `compile` and `measure`, and writes their JSON.

    - `title`: the first line of a table.
    - `results`: the program once, or with Triton's and with cuBLASLt's matrix products.
    - `json_path`: the file for the JSON; `-` writes it to standard output instead of the tables,
      and None writes none.
    - `advice`: as for `measurement_view`.
    """
    view = functools.partial(measurement_view, title, hint=len(results) == 1, advice=advice)
    show(view(results[0]), json_path=json_path)
    for other in results[1:]:
        differs = other.memory != results[0].memory
        show(view(other) if differs else SAME_MEMORY, json_path=json_path)
    emit_json(json_path, with_other_gemm([result.to_json() for result in results]))


def with_other_gemm(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of a program, with that of its variant for cuBLASLt as the field `other_gemm`.

    - `rows`: the JSON of the program, and that of the variant if there is one.
    """
    first, *others = rows
    return {**first, "other_gemm": others[0]} if others else first


def show_outcomes(
    title: str, found: Sequence[Sequence[Outcome]], platform: str, *, json_path: str | None
) -> None:
    """Prints the tables of `ab` and `compare`, and writes their JSON.

    - `title`: the first line of a table.
    - `found`: the experiments once, or with Triton's and with cuBLASLt's matrix products.
    - `platform`: what the JSON names as the platform.
    - `json_path`: as for `show_measurements`.
    """
    result: dict[str, Any] = {"schema": 1, "platform": platform}
    for key, outcomes in zip(("experiments", "experiments_cublas"), found, strict=False):
        result[key] = [outcome.to_json() for outcome in outcomes]
    both = len(found) > 1
    named = f"{title}, matrix products by {GEMM_NAMES['triton']}" if both else title
    show(outcomes_view(named, found[0], hint=not both), json_path=json_path)
    if both:
        pairs = zip(*found, strict=True)
        differing = [other for one, other in pairs if differ_by_gemm(one, other) or other.failed]
        named = f"{title}, matrix products by {GEMM_NAMES['cublas']}, where that differs"
        view = outcomes_view(named, differing, hint=False) if differing else SAME_MEMORY
        show(view, json_path=json_path)
    emit_json(json_path, result)


def closing_lines(
    measured: Sequence[Measurement], compared: Sequence[Numerics] = (), *, hint: bool = True
) -> list[Text]:
    """The lines below a table: compiler, blind spots, what does not fit, what is from a cache.

    - `measured`: the programs of the table.
    - `compared`: comparisons of numbers, which may be from a cache too.
    - `hint`: as for `measurement_view`.
    """
    lines = [Text(f"compiler: {compiler(measured[0])}")] if measured else []
    lines += _settings(measured)
    if measured and measured[0].is_of_cpu:
        lines.append(Text(CPU_WARNING, style="yellow"))
    lines += [*_gemm(measured, hint), *blind_spots(measured), *_too_large(measured)]
    lines += _unread(measured)
    lines += [
        Text(f"same numbers: losses and gradients at tiny on CPU devices, {where}")
        for where in dict.fromkeys(f"{one.mesh}, {one.pipeline}" for one in compared)
    ]
    once = {id(one): one.measured for one in measured}  # arms may share a program
    results = [*once.values(), *(one.measured for one in compared)]
    kept = sorted(filter(None, results))
    if kept:
        span = kept[0] if kept[0] == kept[-1] else f"{kept[0]} to {kept[-1]}"
        lines.append(
            Text(
                f"{len(kept)} of {len(results)} results are from earlier runs, {span}; "
                "--fresh measures them again"
            )
        )
    return lines


def _settings(measured: Sequence[Measurement]) -> list[Text]:
    left_out = [Text(line, style="yellow") for line in left_out_lines(measured)]
    return [*map(Text, settings_lines(measured)), *left_out]


def _gemm(measured: Sequence[Measurement], hint: bool) -> list[Text]:
    kinds = list(dict.fromkeys(one.gemm for one in measured if one.gemm))
    if not kinds:
        return []
    text = f"matrix products by {' and by '.join(GEMM_NAMES[kind] for kind in kinds)}"
    band = "; --gemm both shows the range" if hint and len(kinds) == 1 else ""
    either = " or ".join(GEMM_NAMES.values())
    return [Text(f"{text}; autotuning on a GPU may pick {either}{band}")]


def differ_by_gemm(one: Outcome, other: Outcome) -> bool:
    """Whether the other kind of matrix product changes the memory of an arm, or the verdict."""

    def figures(outcome: Outcome) -> list[Any]:
        return [m.memory if m else None for m in (outcome.a, outcome.b)]

    return (one.verdict, figures(one)) != (other.verdict, figures(other))


def _too_large(measured: Sequence[Measurement]) -> list[Text]:
    large = [one for one in measured if _exceeds(one)]
    if not large:
        return []
    most, size = max(one.needed_bytes for one in large), large[0].device_memory_bytes
    text = (
        f"does not fit{TOO_LARGE}: {megabytes(most)} MB of arguments, outputs, constants and heap"
    )
    refused = any(one.is_refused for one in large)
    why = "; the compiler refused it, so that temp, peak and time are not known" if refused else ""
    return [Text(f"{text}, and a device has {megabytes(size)} MB{why}", style="red")]


def _exceeds(measurement: Measurement | None) -> bool:
    return bool(measurement and measurement.exceeds_device_memory)


def _name(outcome: Outcome) -> str:
    name, claim = outcome.question.name, outcome.question.claim
    return f"{name} ({claim})" if claim else name


def same_numbers(numerics: Numerics) -> str:
    """Whether the arms compute the same, in a few words."""
    if numerics.bitwise_equal:
        return "to the bit"
    return f"{'' if numerics.within_tolerance else 'NO: '}to {numerics.max_abs_diff:.1e}"


def _unread(measured: Sequence[Measurement]) -> list[Text]:
    return [Text(line, style="yellow") for line in unread_lines(measured)]


def _products(measurement: Measurement) -> str:
    known = measurement.flops is None and measurement.known_flops is not None
    part = f", {teraflops(measurement.known_flops)} of them known" if known else ""
    return f"{teraflops(measurement.flops)} per device and step{part}"


def teraflops(flops: int | None) -> str:
    """The operations of a step as a text with their unit; a dash where there is no figure."""
    return "–" if flops is None else f"{flops / 1e12:,.3f} TFLOP"
