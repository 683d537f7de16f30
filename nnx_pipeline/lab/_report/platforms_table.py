"""One program on several platforms, as a table for the terminal."""

import dataclasses
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from nnx_pipeline.lab._report.columns import Column, Columns, texts
from nnx_pipeline.lab._report.view import figures, remarks
from nnx_pipeline.lab._report.view.figures import DASH
from nnx_pipeline.lab.compile.measure import Measurement

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
    bounds = [one.platform for one in measured if one.time and one.time.is_lower_bound]
    closing = [
        *(remarks.Remark(line, "error") for line in failed),
        *remarks.cpu_remarks([one for one in measured if one.is_of_cpu]),
        *remarks.gemm_remarks([one for one in measured if one.gemm], hint=False),
    ]
    if any(found.rate for found in measured):
        closing.append(remarks.Remark("tokens/s are those of one chip"))
    timed = [one for one in measured if one.time and one.time.step_seconds]
    for line in dict.fromkeys(figures.band(one.time) for one in timed if one.time):
        names = [one.platform for one in timed if one.time and figures.band(one.time) == line]
        closing.append(remarks.Remark(f"step on {', '.join(names)}: {line}"))
    if bounds:
        text = f"a step takes no less on {', '.join(bounds)}; `nnx-pipeline measure` says why"
        closing.append(remarks.Remark(text))
    return Group(Text(title, style="bold"), table, *texts(closing))


def _cells(found: Measurement, scale: float) -> list[str]:
    rate, time, size = found.rate, found.time, found.device_memory_bytes
    most = "≤ " if time and time.is_lower_bound else ""
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
    return f"{'≥ ' * found.time.is_lower_bound}{cost:,.2f}"
