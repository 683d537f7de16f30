"""Lines of text on the parts of a program that are missing from its figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from nnx_pipeline.errors import counted
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.hlo.unread import Unread

FIGURES = {
    "flops": "the matrix products",
    "collectives": "the collectives",
    "buffers": "the list of buffers",
    "account": "the account",
    "time": "the estimated time",
    "time_bound": "the estimated time",
}
SHOWN = 3  # instructions that a line names


def unread_lines(measured: Sequence[Measurement]) -> list[str]:
    """One line for each kind of instruction or text that figures leave out.

    - `measured`: the programs; what several of them leave out is named once.
    """
    groups: dict[tuple[tuple[str, ...], str, str], dict[str, Unread]] = defaultdict(dict)
    for measurement in measured:
        for item in measurement.unread:
            groups[item.figures, item.what, item.reason][item.name] = item
    return [_line(list(items.values())) for items in groups.values()]


def _line(items: list[Unread]) -> str:
    first = items[0]
    figures = " and in ".join(FIGURES[figure] for figure in first.figures)
    names = [_called(item) for item in items[:SHOWN] if item.name]
    names += [f"{len(items) - SHOWN} more"] if len(items) > SHOWN else []
    how = "only a lower bound" if first.figures == ("time_bound",) else "not"
    return f"{how} in {figures}: {' '.join([first.what, ', '.join(names)]).strip()}: {first.reason}"


def _called(item: Unread) -> str:
    times = (
        "an unknown number of times" if item.executed is None else counted(item.executed, "time")
    )
    return f"{item.name} ({times} per step)"
