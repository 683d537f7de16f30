"""One program compiled by several versions of JAX, as tables for the terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from nnx_pipeline.lab._report.columns import Column, Columns, texts
from nnx_pipeline.lab._report.view import figures
from nnx_pipeline.lab._report.view.figures import DASH, megabytes
from nnx_pipeline.lab._report.view.remarks import CPU_WARNING, Remark, warnings
from nnx_pipeline.lab.compile._settings import written

Row = Mapping[str, Any]  # the JSON of `compile`, with the version and the error


class Figure(NamedTuple):
    """Where the JSON of a program has a figure, and how it reads as a text."""

    group: str
    name: str
    text: Callable[[Any], str]


FIGURES = {
    "temp MB": Figure("memory", "temp_bytes", megabytes),
    "heap MB": Figure("memory", "heap_bytes", megabytes),
    "peak MB": Figure("memory", "peak_bytes", megabytes),
    "account MB": Figure("memory", "account_bytes", megabytes),
    "TFLOP": Figure("", "flops", lambda flops: DASH if flops is None else f"{flops / 1e12:,.3f}"),
    "compute ms": Figure("time", "compute_seconds", figures.milliseconds),
    "step ms": Figure("time", "step_seconds", figures.milliseconds),
    "compile s": Figure("seconds", "compile", lambda s: DASH if s is None else f"{s:.1f}"),
}


def versions_view(title: str, rows: Sequence[Row]) -> RenderableType:
    done = [row for row in rows if not row["error"]]
    parts: list[RenderableType] = [Text(title, style="italic"), _packages(rows), _figures(rows)]
    others = [row if row["error"] else row.get("other_gemm") for row in rows]
    if done and done[0].get("other_gemm"):
        parts.insert(2, Text(f"matrix products by {figures.TRITON}"))
        if any(row["memory"] != row["other_gemm"]["memory"] for row in done):
            named = [{**row, **(other or {})} for row, other in zip(rows, others, strict=True)]
            library = figures.library(done[0]["platform"])
            parts += [Text(f"matrix products by {library}"), _figures(named)]
        else:
            parts.append(figures.same_memory(done[0]["platform"]))
    return Group(*parts, *_remarks(rows, done))


def _packages(rows: Sequence[Row]) -> Columns:
    names = dict.fromkeys(
        name for row in rows for name, value in row.get("versions", {}).items() if value
    )
    heads = ["jax", *(name for name in names if name != "jax")]
    table = Columns([Column(name, order) for order, name in enumerate(heads)], is_bare=True)
    for row in rows:
        known = {**row.get("versions", {}), "jax": row["version"]}
        table.add_row(*(known.get(name) or DASH for name in heads))
    return table


def _figures(rows: Sequence[Row]) -> Columns:
    # The first ones stay longest.
    heads = [
        Column(name.replace(" ", "\n"), order, is_number=True) for order, name in enumerate(FIGURES)
    ]
    table = Columns([Column(""), *heads], is_bare=True)
    first = _values(rows[0])
    for row in rows:
        values = _values(row)
        least = _sign(row)
        shown = (
            f"{least if figure.group == 'time' and value is not None else ''}{figure.text(value)}"
            for value, figure in zip(values, FIGURES.values(), strict=True)
        )
        table.add_row(row["version"], *shown)
        if row is not rows[0] and not row["error"]:
            alike = _sign(rows[0]) == _sign(row)  # else the times say nothing of each other
            changes = (
                _change(before, after) if alike or figure.group != "time" else DASH
                for before, after, figure in zip(first, values, FIGURES.values(), strict=True)
            )
            table.add_row("", *changes)
    return table


def _sign(row: Row) -> str:
    time = row.get("time") or {}
    return "≥ " if time.get("is_lower_bound") else "≳ " if time.get("is_partial") else ""


def _values(row: Row) -> list[float | None]:
    """The figures of a program; None for what is not known, and for all if it did not compile."""
    values = []
    for figure in FIGURES.values():
        part = row.get(figure.group) if figure.group else row
        values.append(None if row["error"] or not part else part.get(figure.name))
    return values


def _change(before: float | None, after: float | None) -> str:
    if not before or after is None:
        return DASH
    if after == before:
        return "="
    return figures.relative_change(before, after)


def _remarks(rows: Sequence[Row], done: Sequence[Row]) -> list[Text]:
    settings = written(done[0]["xla"]) if done else ""
    left_out = "left out, because the compiler does not take it"
    notes = [
        f"jax {row['version']}: {note}"
        for row in done
        for note in (*(f"{left_out}: {name}" for name in row["xla_left_out"]), *row["notes"])
    ]
    is_of_cpu = any(row["platform"] == "cpu" for row in done)
    remarks = [Remark(f"compiler settings: {settings}")] if settings else []
    remarks += warnings([*notes, *[CPU_WARNING] * is_of_cpu])
    failed = [row for row in rows if row["error"]]
    remarks += [Remark(f"jax {row['version']}: {row['error']}", "error") for row in failed]
    return texts(remarks)
