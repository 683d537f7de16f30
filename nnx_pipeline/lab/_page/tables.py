"""The tables of an HTML page."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nnx_pipeline.lab._page.charts import SMALLEST, DrawnArm, roles_of
from nnx_pipeline.lab._page.markup import Content, Markup, element, fragment
from nnx_pipeline.lab._report.view import figures, floor
from nnx_pipeline.lab._report.view.buffers import BufferRow, difference_row
from nnx_pipeline.lab._report.view.figures import DASH, megabytes
from nnx_pipeline.lab.attribution._result import BufferDifference
from nnx_pipeline.lab.attribution.account import ROWS
from nnx_pipeline.lab.compile.measure import Measurement


class LabelledProgram(NamedTuple):
    """One of the programs of a table; its letter is `a`, `b`, or "" for the only one."""

    key: str
    label: str
    result: Measurement | None


def table(
    caption: str | None,
    head: Sequence[str],
    rows: Sequence[Sequence[Content]],
    *,
    numbers: int,
    narrow: bool = False,
) -> Markup:
    """An HTML table with figures in its last columns; unless `narrow`, a list on a phone."""
    kinds = [None] * (len(head) - numbers) + ["number"] * numbers
    names = [element("th", h, scope="col", class_=css) for h, css in zip(head, kinds, strict=True)]

    def cell(index: int, content: Content) -> Markup:
        if index == 0:
            return element("th", content, scope="row", class_="wide")
        return element("td", content, class_=kinds[index] or "wide", data_label=head[index])

    return element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", element("tr", names)),
        element("tbody", [element("tr", [cell(i, c) for i, c in enumerate(row)]) for row in rows]),
        class_=None if narrow else "stacks",
    )


def change(before: float | None, after: float | None, *, coloured: bool = True) -> Markup | str:
    """By how many MB a size in bytes grows; `coloured` where more is a loss and less a gain."""
    if before is None or after is None:
        return DASH
    words = f"{(after - before) / 1e6:+,.1f}"
    # A difference that rounds to nothing has neither a sign nor a colour.
    if words.strip("+-0.,") == "":
        return "0.0"
    css = ("more" if after > before else "less") if coloured else None
    return element("span", words.replace("-", "−"), class_=css)


def roles_table(arms: Sequence[DrawnArm]) -> Markup:
    sizes = [arm.attribution.by_role() for arm in arms]
    rows = []
    for role in roles_of(arms):
        if all(of_arm.get(role, 0) < SMALLEST for of_arm in sizes):
            continue  # its row would say 0.0 everywhere
        row = [_named(role), *(megabytes(of_arm.get(role, 0)) for of_arm in sizes)]
        if len(arms) == 2:
            row.append(change(sizes[0].get(role, 0), sizes[1].get(role, 0)))
        rows.append(row)
    head = [
        "role",
        *("MB" if arm.is_alone else f"{arm.key}, MB" for arm in arms),
        *["b − a"] * (len(arms) == 2),
    ]
    return table(None, head, rows, numbers=len(head) - 1, narrow=True)


def _named(role: str, name: str = "") -> Content:
    colour = f"background:{figures.ROLE_COLOURS[role]}"
    return [element("span", class_="swatch", style=colour, aria_hidden="true"), name or role]


def what(row: BufferRow) -> Content:
    return [
        element("span", row.shape or row.operation or "no value", class_="code"),
        element("span", row.source, class_="quiet code") if row.source != DASH else None,
        element("span", row.operation, class_="quiet") if row.operation and row.shape else None,
    ]


def buffers_table(caption: str, rows: Sequence[BufferRow]) -> Markup:
    cells = [
        (
            what(row),
            _named(row.role),
            f"{row.count}" if row.count > 1 else "",
            megabytes(row.bytes),
        )
        for row in rows
    ]
    return table(caption, ("buffer", "role", "×", "MB"), cells, numbers=2)


def differences_table(caption: str, changes: Sequence[BufferDifference]) -> Markup:
    cells = [
        (
            what(row),
            _named(of.role, row.role),
            megabytes(of.a_bytes),
            megabytes(of.b_bytes),
            change(of.a_bytes, of.b_bytes),
        )
        for of, row in zip(changes, map(difference_row, changes), strict=True)
    ]
    return table(caption, ("buffer", "role", "a, MB", "b, MB", "b − a"), cells, numbers=3)


def account_table(arms: Sequence[LabelledProgram]) -> Markup:
    known = [figures.account_rows(arm.result) if arm.result else None for arm in arms]
    # One program may have a row that the other lacks, in the midst of the same rows.
    *_, total = labels = max((list(rows) for rows in known if rows), key=len)
    rows: list[list[Content]] = []
    for label in labels:
        values = [sizes.get(label, 0) if sizes else None for sizes in known]
        cells = [megabytes(value) for value in values]
        if len(values) == 2:
            cells.append(change(*values, coloured=_is_own(label, known)))
        if label == total:
            rows.append([element("b", part) for part in (label, *cells)])
        elif label.startswith(" "):
            rows.append([element("span", label.strip(), class_="quiet"), *cells])
        else:
            rows.append([label, *cells])
    head = ["device memory, MB", *(arm.key or "MB" for arm in arms)]
    head += ["b − a"] * (len(arms) == 2)
    return table(None, head, rows, numbers=len(head) - 1, narrow=True)


def _is_own(label: str, known: Sequence[Mapping[str, int | None] | None]) -> bool:
    """Whether a row's change is a gain or a loss: not where arguments are donated or no longer,
    which only moves them to another row, nor in memory that is used twice."""
    donated, kept = ROWS["donated_argument_bytes"], ROWS["kept_argument_bytes"]
    if label in (donated, kept):
        arguments = [(rows[kept] or 0) + (rows[donated] or 0) for rows in known if rows]
        return label == kept and len(set(arguments)) > 1
    return not label.startswith(" ")


def figures_table(arms: Sequence[LabelledProgram]) -> Markup:
    results = [arm.result for arm in arms]
    rows: list[list[Content]] = []
    for label, field in figures.OTHER_ROWS.items():
        values = [getattr(r.memory, field) if r else None for r in results]
        rows.append([f"{label}, MB", *map(megabytes, values)])
        if len(values) == 2:
            # The memory of the host is not the memory of a device.
            rows[-1].append(change(*values, coloured=not field.startswith("host")))
    flops = [figures.teraflops(r.flops) if r else DASH for r in results]
    rows.append(["matrix products", *flops])
    if any(result and result.time for result in results):
        rows += _time_rows(results)
    for name in dict.fromkeys(name for r in results if r for name in r.collectives or {}):
        said = [_traffic(r, name) for r in results]
        rows.append([f"{name}, MB of results", *said])
    for phase in dict.fromkeys(phase for r in results if r for phase in r.seconds):
        times = [f"{r.seconds[phase]:.2f}" if r and phase in r.seconds else DASH for r in results]
        rows.append([f"seconds: {phase.replace('_', ' ')}", *times])
    head = ["per device and step", *(arm.key for arm in arms)]
    if len(arms) == 2:
        head.append("b − a")
        rows = [[*row, ""] if len(row) < len(head) else row for row in rows]
    return table(None, head, rows, numbers=len(head) - 1)


def _time_rows(results: Sequence[Measurement | None]) -> list[list[Content]]:
    times = [result.time if result else None for result in results]
    # The words for two arms differ only in what their branches leave open.
    known = dict.fromkeys(figures.basis_of(time) for time in times if time)
    fields = (
        (f"estimated step, ms ({', or '.join(known)})", "step_seconds"),
        ("of this compute, ms", "compute_seconds"),
        ("of this waiting for collectives, ms", "exposed_seconds"),
        ("of this waiting for transfers of the memory, ms", "memory_wait_seconds"),
        ("all collectives, ms", "collective_seconds"),
        ("all transfers to and from the host, ms", "host_seconds"),
    )
    rows: list[list[Content]] = [
        [label, *(figures.estimated(time, field) for time in times)] for label, field in fields
    ]
    rows.append(["useful and launched", *(figures.shares(t) if t else DASH for t in times)])
    return rows


def _traffic(result: Measurement | None, name: str) -> str:
    count = (result.collectives or {}).get(name) if result else None
    return f"{megabytes(count['bytes'])} in {count['executed']}" if count else DASH


def config_table(arms: Sequence[LabelledProgram]) -> Markup | None:
    known = [_fields(arm.result) for arm in arms if arm.result]
    keys = dict.fromkeys(key for fields in known for key in fields)
    rows = []
    for key in keys:
        values = dict.fromkeys(_plain(fields.get(key, DASH)) for fields in known)
        rows.append((element("code", key), element("code", " → ".join(values))))
    return table(None, ("field", "value"), rows, numbers=0) if rows else None


def changed_fields(a: Measurement, b: Measurement) -> list[Markup]:
    one, other = _fields(a), _fields(b)
    changed = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
    shown = [(key, *(_plain(arm.get(key, DASH)) for arm in (one, other))) for key in changed]
    return [
        element("p", element("code", f"{key}: {before} → {after}"), class_="quiet")
        for key, before, after in shown
    ]


def _fields(result: Measurement) -> dict[str, object]:
    return {**flat(result.config), **result.xla}


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, object] = {}
    for key, value in config.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        found.update(inner if inner is not None else {f"{prefix}{key}": value})
    return found


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def floors(arms: Sequence[LabelledProgram]) -> Markup | None:
    known = [_floor(arm.key, arm.result) for arm in arms if arm.result and arm.result.floor]
    return fragment(known) if known else None


def _floor(key: str, measured: Measurement) -> Markup:
    whose = f" of {key}" if key else ""
    lines = [element("p", line, class_="quiet") for line in floor.floor_lines(measured)]
    least = measured.floor
    if least is None or least.peak is None:
        return element("details", element("summary", f"Floor{whose}"), lines)
    gaps = [
        (_named(gap.role), *map(megabytes, sizes), change(*reversed(sizes)))
        for gap in floor.gaps_of(measured)
        for sizes in [(gap.bytes, gap.least_bytes)]
    ]
    caption = "The heap at its peak beside the floor, by role"
    rows = [*floor.term_rows(least.arguments), *floor.rows_at(least.peak)]
    most = least.expected_peak
    return element(
        "details",
        element("summary", f"Floor{whose}: {floor.ABOUT}"),
        lines,
        table(caption, ("role", "MB", "floor, MB", "above"), gaps, numbers=3) if gaps else None,
        _terms(f"Most at: {least.peak.name}", rows),
        _terms(f"Expected, most at: {most.name}", floor.rows_at(most)) if most else None,
    )


def _terms(caption: str, rows: Sequence[floor.TermRow]) -> Markup:
    cells = [(row.name, row.formula, row.size) for row in rows]
    return table(caption, ("what", "formula", "MB"), cells, numbers=1)
