"""Shows what a step must hold and take beside what its program holds and takes."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab.attribution.floor import Floor, Gap, Term, between
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.report.columns import Column, Columns
from nnx_pipeline.lab.report.memory_tables import megabytes
from nnx_pipeline.lab.report.time_table import estimated, milliseconds

SMALLEST = 50_000  # bytes; a row below it would say 0.0 MB in every column
_OF_TERMS = (Column(""), Column("MB", is_number=True), Column("formula", 1, is_prose=True))
ABOUT = "what any program for this step must hold"
ABOUT_EXPECTED = "what the compiler is expected to hold"


def floor_view(measurement: Measurement) -> list[RenderableType]:
    """The terms of the floor, how far the program is above it, and which roles lie between.

    - `measurement`: of a step; one without a floor gives [].
    """
    floor = measurement.floor
    if floor is None:
        return []
    lines = [Text(line) for line in floor_lines(measurement)]
    if floor.peak is None:
        return list(lines)
    return [_terms(floor), _expected(floor), _gaps(measurement), *lines]


def floor_lines(measurement: Measurement) -> list[str]:
    """Measured over floor for heap, account and step, or why there is no floor of the heap."""
    floor, memory, time = measurement.floor, measurement.memory, measurement.time
    if floor is None:
        return []
    told = [f"floor of the heap: – ({reason})" for reason in floor.unknown]
    pairs = {
        "heap": (memory.heap_bytes, floor.heap_bytes),
        "account": (memory.account_bytes, floor.account_bytes),
    }
    for name, (held, least) in pairs.items():
        if held is not None and least:
            above = f"{held / least:.2f} times the floor of {megabytes(least)}"
            told.append(
                f"{name}: {megabytes(held)} MB, {above}{_beside_expected(measurement, name)}"
            )
    if floor.time:
        least_ms = milliseconds(floor.time.step_seconds)
        parts = f"{milliseconds(floor.time.compute_seconds)} useful products at the peak"
        parts += f" + {milliseconds(floor.time.bubble_seconds)} bubble"
        step = time.step_seconds if time else None
        above, bound = "floor ", "≥ " * bool(time and time.is_lower_bound)
        if step:
            above = f"{bound}{step / floor.time.step_seconds:.1f} times the floor of "
        told.append(f"step: {estimated(time, 'step_seconds')} ms, {above}{least_ms} ({parts})")
    return told


def _beside_expected(measurement: Measurement, name: str) -> str:
    """How the heap stands to what was expected, for the end of its line."""
    held = measurement.memory.heap_bytes
    expected = measurement.floor.expected_bytes if measurement.floor else None
    if name != "heap" or not held or not expected:
        return ""
    return f", and {held / expected:.2f} times the expected {megabytes(expected)}"


def gaps_of(measurement: Measurement) -> list[Gap]:
    """The roles between floor and heap, largest excess first, without those that round to 0."""
    if measurement.floor is None or measurement.attribution is None:
        return []
    gaps = between(measurement.floor, measurement.attribution)
    return [gap for gap in gaps if max(gap.bytes, gap.least_bytes) >= SMALLEST]


def terms_of(floor: Floor) -> list[Term]:
    """The terms of the floor at its peak, largest first."""
    terms = floor.peak.terms if floor.peak else ()
    return sorted(terms, key=lambda term: -term.bytes)


def expected_terms(floor: Floor) -> list[Term]:
    """What the heap is expected to hold at its peak, largest first."""
    terms = floor.expected_peak.terms if floor.expected_peak else ()
    return sorted(terms, key=lambda term: -term.bytes)


def _terms(floor: Floor) -> RenderableType:
    moment = floor.peak.name if floor.peak else "–"
    table = Columns(_OF_TERMS, title=f"{ABOUT}; most at: {moment}")
    for term in floor.arguments:
        table.add_row(term.name, megabytes(term.bytes), term.formula)
    table.add_section()
    for term in terms_of(floor):
        table.add_row(term.name, megabytes(term.bytes), term.formula)
    table.add_section()
    table.add_row("arguments", megabytes(floor.argument_bytes), "")
    table.add_row("heap", megabytes(floor.heap_bytes), "")
    return table


def _expected(floor: Floor) -> RenderableType:
    moment = floor.expected_peak
    if moment is None:
        return Group()
    table = Columns(_OF_TERMS, title=f"{ABOUT_EXPECTED}; most at: {moment.name}")
    for term in expected_terms(floor):
        table.add_row(term.name, signed(term.bytes), term.formula)
    table.add_section()
    table.add_row("heap", megabytes(moment.bytes), "")
    return table


def signed(size: int) -> str:
    """Bytes as MB, with a minus sign in front of what is below 0."""
    return f"−{megabytes(-size)}" if size < 0 else megabytes(size)


def _gaps(measurement: Measurement) -> RenderableType:
    gaps = gaps_of(measurement)
    if not gaps:
        return Group()
    table = Table(title="the heap at its peak beside the floor, by role", title_justify="left")
    table.add_column("role", no_wrap=True)
    for column in ("MB", "floor", "above"):
        table.add_column(column, justify="right", no_wrap=True)
    for gap in gaps:
        above = f"{gap.excess / 1e6:+,.1f}".replace("-", "−")
        table.add_row(gap.role, megabytes(gap.bytes), megabytes(gap.least_bytes), above)
    return table
