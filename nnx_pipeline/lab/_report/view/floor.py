"""What a step must hold and take, and how much more its program holds and takes."""

from collections.abc import Sequence
from typing import NamedTuple

from nnx_pipeline.lab._report.view.figures import DASH, estimated, megabytes, milliseconds, sign
from nnx_pipeline.lab.attribution._floor import Gap, Moment, Term, between
from nnx_pipeline.lab.compile.measure import Measurement

SMALLEST = 50_000  # bytes; a row below it would say 0.0 MB in every column
ABOUT = "what any program for this step must hold"
ABOUT_EXPECTED = "what the compiler is expected to hold"


class TermRow(NamedTuple):
    name: str
    size: str
    formula: str


def term_rows(terms: Sequence[Term]) -> list[TermRow]:
    return [
        TermRow(term.name, megabytes(term.bytes).replace("-", "−"), term.formula) for term in terms
    ]


def rows_at(moment: Moment) -> list[TermRow]:
    return term_rows(sorted(moment.terms, key=lambda term: -term.bytes))


def floor_lines(measurement: Measurement) -> list[str]:
    """Measured over floor for heap, account and step, or why there is no floor of the heap."""
    floor, memory, time = measurement.floor, measurement.memory, measurement.time
    if floor is None:
        return []
    lines = [f"floor of the heap: {DASH} ({reason})" for reason in floor.unknown]
    if memory.heap_bytes is not None and floor.heap_bytes:
        line = f"heap: {_above(memory.heap_bytes, floor.heap_bytes)}"
        if memory.heap_bytes and (expected := floor.expected_bytes):
            ratio = memory.heap_bytes / expected
            line += f", and {ratio:.2f} times the expected {megabytes(expected)}"
        lines.append(line)
    if memory.account_bytes is not None and floor.account_bytes:
        lines.append(f"account: {_above(memory.account_bytes, floor.account_bytes)}")
    if floor.time:
        least = milliseconds(floor.time.step_seconds)
        parts = f"{milliseconds(floor.time.compute_seconds)} useful products at the peak"
        parts += f" + {milliseconds(floor.time.bubble_seconds)} bubble"
        step = time.step_seconds if time else None
        above, bound = "floor ", sign(time)
        if step:
            above = f"{bound}{step / floor.time.step_seconds:.1f} times the floor of "
        lines.append(f"step: {estimated(time, 'step_seconds')} ms, {above}{least} ({parts})")
    return lines


def _above(size: int, least: int) -> str:
    return f"{megabytes(size)} MB, {size / least:.2f} times the floor of {megabytes(least)}"


def gaps_of(measurement: Measurement) -> list[Gap]:
    if measurement.floor is None or measurement.attribution is None:
        return []
    gaps = between(measurement.floor, measurement.attribution)
    return [gap for gap in gaps if max(gap.bytes, gap.least_bytes) >= SMALLEST]
