"""The tables of the terminal: whole names in 80 columns, and no verdict without its figure."""

import dataclasses
import re
from typing import Any

import pytest
from page_examples import TIME, attribution, measurement, outcome
from rich.console import Console, RenderableType

from nnx_pipeline.lab._hlo.cost import Unread
from nnx_pipeline.lab._report import tables as report
from nnx_pipeline.lab._report.program_tables import (
    difference_view,
    lines_table,
    memory_view,
    time_table,
    times_view,
)
from nnx_pipeline.lab._report.sweep import COLUMNS, sweep_view
from nnx_pipeline.lab._report.view.figures import COLUMNS as ARM_COLUMNS
from nnx_pipeline.lab._report.view.figures import TOTAL, milliseconds
from nnx_pipeline.lab._report.view.remarks import unread_lines
from nnx_pipeline.lab._timing.result import TimeRow
from nnx_pipeline.lab.attribution._result import Buffer
from nnx_pipeline.lab.attribution.account import Assigned
from nnx_pipeline.lab.comparison.outcome import Outcome, Question, compare_measurements
from nnx_pipeline.lab.comparison.sweep import Point, Sweep
from nnx_pipeline.lab.compile.measure import Measurement

LONG = "tests.programs_of_somebody:gradients_of_every_microbatch_side_by_side"


def text(view: RenderableType, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def letters(shown: str) -> str:
    """What is said before the figures, however it is broken into lines."""
    words = (re.sub(r"(\s+[\d.,–]+)+\s*$", "", line) for line in shown.splitlines())
    return re.sub(r"\s", "", "".join(words))


def of_two(a: Measurement, b: Measurement, **changes: Any) -> Outcome:
    """As `compare` makes it."""
    question = Question(
        name="compare",
        claim="",
        difference="two functions",
        labels=(LONG, "lean"),
        judged_by="account",
    )
    return compare_measurements(question, a, dataclasses.replace(b, hlo="ENTRY %b", **changes))


def donated(made: Measurement) -> Measurement:
    """Twice the heap, and none of the state in two places."""
    memory = dataclasses.replace(made.memory, argument_bytes=500_000_000, alias_bytes=210_000_000)
    return dataclasses.replace(made, memory=memory)


@pytest.mark.parametrize("width", [80, 140])
def test_arms_and_experiments_have_their_whole_names(width: int) -> None:
    found = [outcome("stage-shift-pad"), of_two(*[measurement(attribution())] * 2)]
    shown = text(report.outcomes_view("an A/B", found), width)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for name in ("stage-shift-pad", "a:ppermute", "b:pad", LONG, "b:lean"):
        assert name in letters(shown), name
    (heads,) = (line for line in shown.splitlines() if "temp MB" in line)
    assert heads.split() == ["temp", "MB", "heap", "MB", "peak", "MB", "account", "MB"]
    (figures,) = (line for line in shown.splitlines() if re.match(" +b: +pad ", line))
    sizes = [outcome().b.memory.to_json()[f"{name}_bytes"] for name in ARM_COLUMNS]
    assert figures.split()[2:] == [report.megabytes(size) for size in sizes]
    assert figures.index(".") > heads.index("temp")


def test_time_is_a_column_where_any_arm_has_one() -> None:
    one, other = measurement(attribution()), measurement(attribution())
    found = of_two(dataclasses.replace(one, time=TIME), other)
    shown = text(report.outcomes_view("an A/B", [found]))
    assert max(map(len, shown.splitlines())) <= 80
    assert LONG in letters(shown)
    (heads,) = (line for line in shown.splitlines() if "temp MB" in line)
    assert heads.split()[-2:] == ["step", "ms"]
    assert any(line.endswith("46.25") for line in map(str.rstrip, shown.splitlines()))
    (lean,) = (line for line in shown.splitlines() if "lean" in line and "b:" in line)
    assert lean.split()[-1] == "–"


def test_the_time_of_a_program() -> None:
    made = dataclasses.replace(measurement(attribution()), time=TIME)
    shown = text(report.measurement_view("a step", made))
    figures = dict(re.findall(r"│ (.+?) +│ +([\d.,–]+) │", shown))
    assert figures["compute"] == "35.31"
    assert figures["+ collectives that the compute waits for"] == "10.89"
    assert figures["+ transfers that the compute waits for"] == "0.050"
    assert figures["= step"] == "46.25"
    assert figures["step if none of them were"] == "46.71"
    assert "MFU 3.0%, HFU 12.4%, bubble 27.3%, 8,557 launches" in shown
    assert "estimated time: –" in text(
        report.measurement_view("a step", measurement(attribution()))
    )


def test_where_the_time_goes() -> None:
    """One row per line, its passes side by side; the lines that are left out are one more row."""
    given = [
        ("a.py:1", "m/n.py:7", "products", "forward", 3e-3),
        ("a.py:1", "m/n.py:7", "products", "backward", 4e-3),
        ("a.py:1", "m/n.py:8", "products", "forward", 2.5e-3),
        (None, None, "other", "recomputed", 2e-3),
        ("b.py:2", None, "moves", "forward", 1e-3),
        ("c.py:3", None, "kernels", "forward", 5e-4),
    ]
    rows = [
        TimeRow(
            source=source, caller=caller, kind=kind, pass_name=name, seconds=seconds, launches=2
        )
        for source, caller, kind, name, seconds in given
    ]
    shown = text(lines_table(dataclasses.replace(TIME, rows=tuple(rows)), top=3))
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in shown.splitlines()
        if line.startswith("│")
    ]
    assert cells == [
        ["7.00", "3.00", "–", "4.00", "4", "a.py:1 from n.py:7"],
        ["2.50", "2.50", "–", "–", "2", "a.py:1 from n.py:8"],
        ["2.00", "–", "2.00", "–", "2", "–"],
        ["1.50", "1.50", "–", "–", "4", "all others"],
    ]


def test_time_that_is_partly_unknown() -> None:
    unknown = dict.fromkeys(("compute_seconds", "step_seconds", "range_seconds", "hfu", "mfu"))
    time = dataclasses.replace(TIME, **unknown, exposed_seconds=None, launches=None)
    shown = text(time_table(time))
    figures = dict(re.findall(r"│ +(.+?) +│ +([\d.,–]+) │", shown))
    assert (figures["compute"], figures["of this, known"]) == ("–", "35.31")
    assert figures["= step"] == figures["step if all of them were hidden"] == "–"
    assert "MFU" not in shown
    assert "– launches" in shown


@pytest.mark.parametrize(("field", "signs"), [("is_lower_bound", "≥≤"), ("is_partial", "≳≲")])
def test_a_lower_bound_is_shown_as_one(field: str, signs: str) -> None:
    least, most = signs
    shown = text(time_table(dataclasses.replace(TIME, **{field: True})))
    figures = dict(re.findall(r"│ +(.+?) +│ +([≥≳ \d.,–]+?) │", shown))
    assert (figures["compute"], figures["= step"]) == (f"{least} 35.31", f"{least} 46.25")
    assert figures["step if all of them were hidden"] == f"{least} 35.31"
    assert figures["all collectives"] == "11.40"
    assert f"MFU {most} 3.0%, HFU {most} 12.4%, bubble 27.3%" in shown
    sort = Unread(name="s", what="sort", figures=("time_bound",), executed=2, reason="unknown")
    found = dataclasses.replace(measurement(attribution()), unread=(sort,))
    line = (
        "only with the least that it takes in the estimated time: sort s (2 times per step): "
        "unknown"
    )
    assert unread_lines([found]) == [line]
    for view in (report.measurement_view("a step", found), times_view(found, top=3)):
        assert line in " ".join(text(view).split())
    part = dataclasses.replace(TIME, **{field: True})
    assert f"compute goes, {least} ms" in text(lines_table(part, top=3))
    timed = text(times_view(dataclasses.replace(found, time=TIME), top=3), 120).splitlines()
    assert "launches" in timed[-3]
    assert timed[-1] == line


def test_a_verdict_names_its_figure() -> None:
    heading = report.heading(outcome())
    assert heading.startswith("stage-shift (S1.1): holds by temp, b/a 0.7")
    assert heading.endswith("; same numbers: to 3.0e-08")
    one = measurement(attribution())
    other = report.heading(of_two(one, donated(one)))
    assert other.startswith("compare: more memory by the account, b/a ")
    missing = compare_measurements(outcome().question, one, "it broke")
    assert report.heading(missing) == "stage-shift (S1.1): not applicable, failed"


@pytest.mark.parametrize("width", [80, 140])
def test_rows_of_the_account_add_up(width: int) -> None:
    made = dataclasses.replace(measurement(attribution()), assigned=ASSIGNED)
    sizes_of = {"constant_bytes": 67_100_000, "output_bytes": 250_000_000}
    memory = dataclasses.replace(made.memory, **sizes_of, peak_bytes=400_000_000)
    made = dataclasses.replace(made, memory=memory)
    shown = text(report.measurement_view("a step", made), width)
    assert "…" not in shown
    sizes = {}
    for line in shown.splitlines():
        if found := re.match(r"│ +(.*?) +│ +([\d.,]+) │$", line):
            sizes.setdefault(found[1], float(found[2].replace(",", "")))
    assert sizes["constants"] == 67.1
    assert sizes["of these, used by temporaries first"] == 12.0
    assert sizes["temp"] > 0
    total = sum(sizes[label] for label in made.account.rows())
    assert total == pytest.approx(sizes[TOTAL], abs=0.3)
    assert sizes[TOTAL] == pytest.approx(memory.account_bytes / 1e6, abs=0.06)
    told = " ".join(shown.split())
    assert "peak includes the on-chip memory of a TPU, here up to 33.6 MB" in told
    assert "arguments: 210,000,001 bytes in the buffer assignment, 210,000,000 by the" in told
    without_peak = dataclasses.replace(memory, peak_bytes=None)
    shown = text(
        report.measurement_view("a step", dataclasses.replace(made, memory=without_peak)), width
    )
    assert "peak includes" not in shown


ASSIGNED = Assigned(
    argument_bytes=210_000_001,
    output_bytes=250_000_000,
    alias_bytes=210_000_000,
    constant_bytes=67_100_000,
    scratch_bytes=12_000_000,
    on_chip_bytes=33_600_000,
)


def constant(size: int) -> Buffer:
    return dataclasses.replace(
        attribution().buffers[0], name="constant.1", bytes=size, role="constant", shape="f32[77]"
    )


def test_constants_and_temporaries_in_outputs_have_rows() -> None:
    there = dataclasses.replace(
        attribution(),
        constants=(constant(67_108_864), constant(4)),
        in_outputs=(dataclasses.replace(constant(8_400_000), role="activation"),),
    )
    shown = text(memory_view("a program", there, top=3), 140)
    assert "Constants, outside the heap" in shown
    assert re.search(r"67\.1 .*constant .*f32\[77\]", shown)
    assert "Temporaries in the memory of outputs, outside the heap" in shown
    assert re.search(r"8\.4 .*activation .*f32\[77\]", shown)
    assert "outside the heap" not in text(memory_view("a program", attribution(), top=3), 140)


def test_buffers_have_their_whole_names() -> None:
    made = attribution()
    views = [memory_view("a program", made, top=9), difference_view("d", outcome().buffers)]
    for view in views:
        shown = text(view)
        assert "…" not in shown
        assert max(map(len, shown.splitlines())) <= 80
        for column in ("role", "shape", "operation", "source"):
            assert column in shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *((None, "–"), (0.0, "0.00"), (6.8e-7, "0.00068"), (3e-8, "3.0e-05"), (9.96e-5, "0.10")),
        *((4.5e-5, "0.045"), (5e-5, "0.050"), (1e-4, "0.10"), (9.99e-8, "0.00010"), (2, "2,000")),
    ],
)
def test_a_time_keeps_two_digits(seconds: float | None, shown: str) -> None:
    assert milliseconds(seconds) == shown


def test_a_sweep_has_its_whole_names() -> None:
    def point(factor: int) -> Point:
        result = measurement(attribution(factor))
        memory = dataclasses.replace(result.memory, peak_bytes=10**6 * factor)
        whole = dataclasses.replace(result, memory=memory, time=TIME, flops=10**9)
        return Point(value=4 * factor, result=whole)

    points = (point(1), point(2))
    found = Sweep(
        field="pipeline.num_microbatches",
        arms=((LONG, points), ("lean", points)),
        platform="cuda:h100:8",
    )
    for width in (60, 80, 120):
        shown = text(sweep_view("a sweep", found), width)
        assert "…" not in shown
        assert max(map(len, shown.splitlines())) <= width
        assert letters(f"{LONG}, by pipeline.num_microbatches") in letters(shown)
        gone = re.findall(rf"left out at {width} columns: (.*)", shown)
        assert len(gone) == (0 if width == 120 else 2), "one line for each arm"
        missing = gone[0].strip().split(", ") if gone else []
        assert [head for head in COLUMNS if head in shown.split("left out")[0]] == [
            head for head in COLUMNS if head not in missing
        ]
        assert all(COLUMNS[head] for head in missing)
    growth = points[1].result.memory.account_bytes - points[0].result.memory.account_bytes
    assert f"{growth / 4e6:+,.3f}" in shown


def test_a_sweep_has_the_estimated_step() -> None:
    def point(value: int, milliseconds: int) -> Point:
        time = dataclasses.replace(TIME, step_seconds=milliseconds * 1e-3)
        result = dataclasses.replace(measurement(attribution()), time=time)
        return Point(value=value, result=result)

    points = [point(4, 4), point(8, 8)]
    found = Sweep(field="train.global_batch", arms=(("step", tuple(points)),), platform="cpu")
    assert found.slope("step_seconds") == pytest.approx(1e-3)
    shown = text(sweep_view("a sweep", found), 120)
    assert [head for head in COLUMNS if head not in shown] == ["peak MB"], "known of no point"
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert (lines["4"][-2], lines["8"][-2]) == ("4.00", "8.00")
    assert lines["slope"][-2] == "+1.000"
    meshes = dataclasses.replace(found, along=(("mesh", ("data=4", "data=8")),))
    shown = text(sweep_view("a sweep", meshes), 120)
    assert "step, by train.global_batch; mesh" in shown
    assert [f"{n}; data={n}" in shown for n in (4, 8)] == [True, True]
    assert "slope per global_batch" in shown
    assert meshes.to_json()["along"] == {"mesh": ["data=4", "data=8"]}
    falling = dataclasses.replace(found, arms=(("step", (point(4, 8), point(8, 4))),))
    assert "−1.000" in text(sweep_view("a sweep", falling), 120)
