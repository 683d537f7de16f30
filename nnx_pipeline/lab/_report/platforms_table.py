"""One program on several platforms, as a table for the terminal."""

import dataclasses
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from nnx_pipeline.lab._report.columns import Column, Columns, texts
from nnx_pipeline.lab._report.view import figures, remarks
from nnx_pipeline.lab._report.view.figures import DASH
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform

Row = tuple[str, Measurement | str]  # a platform, and what was measured or why nothing was
_COST = Column("10⁹ tokens cost", 1, is_number=True)
_COLUMNS = (
    Column("platform"),
    Column("chips", 5, is_number=True),
    Column("needs", is_number=True),
    Column("of", 3, is_number=True),
    Column("fits"),
    Column("step ms", is_number=True),
    Column("tokens/s", 2, is_number=True),
    Column("MFU", 4, is_number=True),
)
_WITHOUT = {
    "time": "not known for",
    "time_bound": "with the least that it takes, for",
    "time_rule": "by a rule for",
}
_FITS = {True: "no", False: "yes", None: DASH}


def platforms_view(title: str, rows: Sequence[Row]) -> RenderableType:
    measured = [found for _, found in rows if not isinstance(found, str)]
    is_large = any(found.needed_bytes >= 1e9 for found in measured)
    unit, scale = ("GB", 1e9) if is_large else ("MB", 1e6)
    columns = [
        dataclasses.replace(column, name=f"{column.name} {unit}")
        if column.name in ("needs", "of")
        else column
        for column in _COLUMNS
    ]
    has_prices = any(found.price for found in measured)
    table = Columns([*columns, _COST] if has_prices else columns)
    for name, found in rows:
        if isinstance(found, str):
            table.add_row(name, *[DASH] * (len(table.columns) - 1))
        else:
            table.add_row(*_cells(found, scale), *([_cost(found)] if has_prices else []))
    failed = [f"{name}: {found}" for name, found in rows if isinstance(found, str)]
    closing = [
        *(remarks.Remark(line, "error") for line in failed),
        *(
            remarks.Remark(_too_large(one), "error")
            for one in measured
            if one.exceeds_device_memory
        ),
        *remarks.cpu_remarks([one for one in measured if one.is_of_cpu]),
        *remarks.gemm_remarks([one for one in measured if one.gemm], hint=False),
    ]
    if any(found.rate for found in measured):
        closing.append(remarks.Remark("tokens/s are those of one chip"))
    # Of a program that the compiler refused a note says so.
    steps = _by_text((_time(one), one.platform) for one in measured if not one.is_refused)
    closing += [remarks.Remark(f"step on {names}: {line}") for line, names in steps.items()]
    notes = _by_text((note, one.platform) for one in measured for note in _notes(one))
    every = ", ".join(dict.fromkeys(one.platform for one in measured))
    closing += remarks.warnings(
        note if names == every else f"{names}: {note}" for note, names in notes.items()
    )
    return Group(Text(title, style="bold"), table, *texts(closing))


def _by_text(said: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Each text once, with the platforms that it is said of."""
    found: dict[str, list[str]] = {}
    for text, platform in said:
        found.setdefault(text, []).append(platform)
    return {text: ", ".join(dict.fromkeys(platforms)) for text, platforms in found.items()}


def _notes(found: Measurement) -> list[str]:
    why = Platform.parse(found.platform).why_a_roofline
    return [note for note in found.notes if not why or why not in note]  # `_time` has that


def _too_large(found: Measurement) -> str:
    """By how much it does not fit, and the largest buffer."""
    lines = [remark.text.strip() for remark in remarks.fit_remarks(found, advice={})[:2]]
    largest = "; largest buffer ".join(lines)
    return f"{found.platform}: {largest}; nnx-pipeline measure says what to try"


def _time(found: Measurement) -> str:
    """By what the step is estimated, of which instructions it is not, and how good that is."""
    if found.time is None:
        return "nothing is known of its time"
    parts = [figures.basis_of(found.time)]
    if why := Platform.parse(found.platform).why_a_roofline:
        parts[0] += f" ({why})"
    without: dict[tuple[str, str], list[str]] = {}
    for item in found.unread:
        for figure in _WITHOUT.keys() & {*item.figures}:
            without.setdefault((_WITHOUT[figure], item.reason), []).append(item.what)
    for (how, reason), kinds in without.items():
        parts.append(f"{how} {', '.join([*dict.fromkeys(kinds)][: remarks.SHOWN])} ({reason})")
    return "; ".join([*parts, *([figures.band(found.time)] if found.time.step_seconds else [])])


def _cells(found: Measurement, scale: float) -> list[str]:
    rate, time, size = found.rate, found.time, found.device_memory_bytes
    most = figures.most(time)
    return [
        found.platform,
        str(found.chips),
        f"{found.needed_bytes / scale:,.1f}",
        DASH if size is None else f"{size / scale:,.1f}",
        _FITS[found.exceeds_device_memory],
        figures.estimated(time, "step_seconds"),
        f"{most}{rate.per_chip_second:,.0f}" if rate else DASH,
        f"{most}{time.mfu:.1%}" if time and time.mfu is not None else DASH,
    ]


def _cost(found: Measurement) -> str:
    cost = found.rate.cost_of(10**9) if found.rate else None
    if cost is None or found.time is None:
        return DASH
    return f"{figures.sign(found.time)}{cost:,.2f}"
