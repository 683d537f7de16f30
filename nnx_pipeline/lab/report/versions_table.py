"""One program compiled by several versions of JAX, as tables for the terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from nnx_pipeline.lab.compile.settings import written
from nnx_pipeline.lab.report.columns import Column, Columns
from nnx_pipeline.lab.report.memory_tables import megabytes
from nnx_pipeline.lab.report.tables import CPU_WARNING, GEMM_NAMES, SAME_MEMORY
from nnx_pipeline.lab.report.time_table import milliseconds

Row = Mapping[str, Any]  # the JSON of `compile`, with the version and the error
FIGURES: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "temp MB": ("memory", "temp_bytes", megabytes),
    "heap MB": ("memory", "heap_bytes", megabytes),
    "peak MB": ("memory", "peak_bytes", megabytes),
    "account MB": ("memory", "account_bytes", megabytes),
    "TFLOP": ("", "flops", lambda flops: "–" if flops is None else f"{flops / 1e12:,.3f}"),
    "compute ms": ("time", "compute_seconds", milliseconds),
    "step ms": ("time", "step_seconds", milliseconds),
    "compile s": ("seconds", "compile", lambda s: "–" if s is None else f"{s:.1f}"),
}


def versions_view(title: str, rows: Sequence[Row]) -> RenderableType:
    """The versions of the packages, then the figures of each with the difference to the first.

    - `title`: the first line.
    - `rows`: the JSON of each program in the order of the versions; `error` says why there is none.
    """
    done = [row for row in rows if not row["error"]]
    parts: list[RenderableType] = [Text(title, style="italic"), _packages(rows), _figures(rows)]
    others = [row if row["error"] else row.get("other_gemm") for row in rows]
    if done and done[0].get("other_gemm"):
        parts.insert(2, Text(f"matrix products by {GEMM_NAMES['triton']}"))
        if any(row["memory"] != row["other_gemm"]["memory"] for row in done):
            named = [{**row, **(other or {})} for row, other in zip(rows, others, strict=True)]
            parts += [Text(f"matrix products by {GEMM_NAMES['cublas']}"), _figures(named)]
        else:
            parts.append(SAME_MEMORY)
    return Group(*parts, *_remarks(rows, done))


def _packages(rows: Sequence[Row]) -> Columns:
    """The version of each package that decides what a compiler does."""
    names = dict.fromkeys(
        name for row in rows for name, value in row.get("versions", {}).items() if value
    )
    heads = ["jax", *(name for name in names if name != "jax")]
    table = Columns([Column(name, order) for order, name in enumerate(heads)], is_bare=True)
    for row in rows:
        known = {**row.get("versions", {}), "jax": row["version"]}
        table.add_row(*(known.get(name) or "–" for name in heads))
    return table


def _figures(rows: Sequence[Row]) -> Columns:
    """A line of figures for each version, and below it the differences to the first version."""
    # The first ones stay longest.
    heads = [
        Column(name.replace(" ", "\n"), order, is_number=True) for order, name in enumerate(FIGURES)
    ]
    table = Columns([Column(""), *heads], is_bare=True)
    first = _values(rows[0])
    for row in rows:
        values = _values(row)
        least = "≥ " * _is_bound(row)
        shown = (
            f"{least if group == 'time' and value is not None else ''}{show(value)}"
            for value, (group, _, show) in zip(values, FIGURES.values(), strict=True)
        )
        table.add_row(row["version"], *shown)
        if row is not rows[0] and not row["error"]:
            alike = _is_bound(rows[0]) == _is_bound(row)  # else the times say nothing of each other
            changes = (
                _change(*pair) if alike or group != "time" else "–"
                for pair, (group, *_) in zip(
                    zip(first, values, strict=True), FIGURES.values(), strict=True
                )
            )
            table.add_row("", *changes)
    return table


def _is_bound(row: Row) -> bool:
    """Whether the estimated times of a program are lower bounds."""
    return bool((row.get("time") or {}).get("is_lower_bound"))


def _values(row: Row) -> list[float | None]:
    """The figures of a program; None for what is not known, and for all if it did not compile."""
    found = []
    for group, name, _ in FIGURES.values():
        part = row.get(group) if group else row
        found.append(None if row["error"] or not part else part.get(name))
    return found


def _change(before: float | None, after: float | None) -> str:
    """By what part a figure has grown; a dash where one of them is not known or nothing."""
    if not before or after is None:
        return "–"
    if after == before:
        return "="
    return f"{after / before - 1:+.1%}".replace("-", "−")


def _remarks(rows: Sequence[Row], done: Sequence[Row]) -> list[Text]:
    """Settings, what is left out of them, notes and errors, with the version that they are of."""
    lines = (
        [Text(f"compiler settings: {written(done[0]['xla'])}")] if done and done[0]["xla"] else []
    )
    for row in done:
        left = [
            f"left out, because the compiler does not take it: {s}" for s in row["xla_left_out"]
        ]
        notes = (Text(f"jax {row['version']}: {n}", style="yellow") for n in [*left, *row["notes"]])
        lines += notes
    if any(row["platform"] == "cpu" for row in done):
        lines.append(Text(CPU_WARNING, style="yellow"))
    failed = (row for row in rows if row["error"])
    return lines + [Text(f"jax {row['version']}: {row['error']}", style="red") for row in failed]
