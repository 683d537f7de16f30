"""The text and tables that the commands print."""

import contextlib
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    FileSizeColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from linen_compat.checkpoints._check import NUMERICS_TOLERANCE, Diagnosis, FirstDifference
from linen_compat.checkpoints._convert import Conversion
from linen_compat.formats._orbax.inspect import Inspection
from linen_compat.formats._orbax.layouts import HUGGINGFACE
from linen_compat.formats._streams import Progress as Passed
from nnx_pipeline.lab._report.columns import Column, Columns, number_columns
from nnx_pipeline.lab._report.output import Screen
from nnx_pipeline.lab.errors import counted, printable

_SHOWN = 40  # lines about single leaves


def _last_names(path: str) -> str:
    """A path of more than five names by the last four."""
    names = path.split("/")
    return path if len(names) <= 5 else "/".join(["…", *names[-4:]])


def inspection(found: Inspection) -> Columns:
    """A table of all parameters with their shapes and dtypes.

    On a narrow screen names have their last four parts.
    """
    head = Column("parameter", shorter=_last_names)
    table = Columns([head, Column("shape", 1), Column("dtype", 2)])
    for name, leaf in found.parameters.items():
        table.add_row(name, "×".join(map(str, leaf.shape)), leaf.dtype)
    return table


def diagnosis(found: Diagnosis) -> RenderableType:
    """A table that counts leaves by how they fit, and below it the leaves that do not."""
    result = found.comparison
    counts = {
        "matched": len(result.matched),
        "missing": len(result.missing),
        "extra": len(result.extra),
        "reshaped": len(result.reshaped),
        "recast": len(result.recast),
        "ignored": len(result.ignored),
        "randomly initialised": len(result.fresh),
    }
    head = (
        f"{found.format}: {counted(found.num_layers, 'layer')}, {counted(found.stages, 'stage')}, "
        f"{counted(found.repeats, 'repeat')}"
    )
    table = Columns([Column("leaves"), *number_columns("number")])
    for row in counts.items():
        table.add_row(*map(str, row))
    rows = [f"  recast: {d.leaf} from {d.found} to {d.expected}" for d in result.recast]
    rows += [f"  {problem}" for problem in result.problems]
    if len(rows) > _SHOWN:
        rows = [*rows[:_SHOWN], f"  and {len(rows) - _SHOWN} more; --json PATH has them all"]
    rows += [f"  {found.optimizer}"] if found.optimizer else []
    return Group(head, table, *map(_text, rows))


def first_difference(result: FirstDifference) -> str:
    """One line on how far the loaded model is from MaxText's mathematics."""
    if result.place is None:
        return f"numerics: every layer agrees to within {result.largest:.1e} of its largest value"
    return (
        f"numerics: {result.place} is off by {result.largest:.1e} of the largest value "
        f"(allowed: {NUMERICS_TOLERANCE})"
    )


def conversion(plan: Conversion) -> Text:
    """One line on what was written, and what was left behind."""
    layout = plan.layout
    what = HUGGINGFACE
    if layout is not None:
        parts = (counted(layout.stages, "stage"), counted(layout.repeats, "repeat"))
        what = ", ".join([layout.format, *parts])
    left = "; ".join(_named(*item) for item in plan.left_behind.items())
    rest = f"; left behind: {left}" if left else ""
    layers = plan.opened.source.num_layers
    return _text(f"{plan.destination}: {counted(layers, 'layer')} as {what}{rest}")


def _named(reason: str, names: tuple[str, ...], shown: int = 5) -> str:
    """Names in one line, and why they are named; of more than `shown` the first three."""
    if len(names) <= shown:
        return f"{', '.join(names)}, {reason}"
    return f"{', '.join(names[:3])} … ({len(names)} in all), {reason}"


def _text(words: str) -> Text:
    """A line, in which no name begins another one."""
    return Text(printable(words))


def first_of(problems: list[str], shown: int = 3) -> str:
    """The first problems in one line, and how many more there are."""
    more = f"; and {len(problems) - shown} more" if len(problems) > shown else ""
    return "; ".join(problems[:shown]) + more


@contextlib.contextmanager
def byte_bar(title: str, total: int | None) -> Iterator[Passed]:
    """Shows a progress bar of bytes on standard error, and yields the function that moves it.

    - `total`: in bytes, None where it is not known.
    """
    done = FileSizeColumn() if total is None else DownloadColumn()
    columns = (TextColumn(title), BarColumn(), done, TimeRemainingColumn())
    with Progress(*columns, console=Screen(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda name, nbytes: bar.update(task, advance=nbytes)
