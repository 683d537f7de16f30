"""The page and the picture of a report: whole, escaped, and of one piece in a real browser."""

import dataclasses
import html
import html.parser
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from page_examples import TIME, attribution, measurement, outcome

from nnx_pipeline.experiments._registry import EXPERIMENTS
from nnx_pipeline.lab import _files as files
from nnx_pipeline.lab._files import save_figure
from nnx_pipeline.lab._page import charts, measurement_page, outcomes_page, sweep_page
from nnx_pipeline.lab._page.flame import flame
from nnx_pipeline.lab._page.script import SCRIPT
from nnx_pipeline.lab._page.style import STYLE
from nnx_pipeline.lab._page.tables import LabelledProgram, account_table
from nnx_pipeline.lab._page.timeline import timeline
from nnx_pipeline.lab._report.chart import outcomes_chart, program_chart
from nnx_pipeline.lab._report.view.figures import ROLE_COLOURS, in_place_of_report
from nnx_pipeline.lab.attribution._result import ROLES
from nnx_pipeline.lab.attribution.account import Assigned
from nnx_pipeline.lab.comparison.outcome import Outcome, compare_measurements
from nnx_pipeline.lab.comparison.sweep import Point, Sweep

TITLE = "tiny <on> stage=4"
GEMM_FACTORS = (("triton", 1.0), ("cublas", 2.0))
VOID = {"meta", "link", "input", "rect", "path", "line"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--enable-logging=stderr",
]
# Widths that a page in a phone must not exceed, written where `--dump-dom` shows it.
PROBE = """<script>addEventListener("load", () => {
  const frame = document.querySelector("iframe").contentDocument.documentElement;
  document.title = `${frame.scrollWidth} of ${frame.clientWidth}`;
});</script>"""


class Reader(html.parser.HTMLParser):
    """Checks that elements are closed in order; collects the text and the attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text += f" {data}"


def examples() -> list[Outcome]:
    """With and without a buffer assignment, and with an arm that failed."""
    experiment = EXPERIMENTS["stage-shift"]
    bare = compare_measurements(
        experiment.question, measurement(None), measurement(None, platform="cpu")
    )
    failed = compare_measurements(
        experiment.question, measurement(attribution()), "the <compiler> gave up"
    )
    return [outcome(note="a <script>alert(1)</script> in a note"), bare, failed]


def test_every_figure_is_there_and_every_text_escaped() -> None:
    page = outcomes_page(TITLE, examples(), command="nnx-pipeline ab 'a<b'")
    reader = Reader(page)
    assert "<script>alert" not in page
    assert "<compiler>" not in page
    assert "a <script>alert(1)</script> in a note" in reader.text
    for text in (TITLE, "the <compiler> gave up", "not applicable, failed", "holds", "MB", "–"):
        assert text in reader.text, text
    shown = attribution()
    for buffer in shown.buffers[:3]:
        assert f"{buffer.bytes / 1e6:,.1f}" in reader.text
        assert buffer.shape in reader.text
    assert (
        f"{shown.heap_bytes / 1e6:,.1f} → {attribution(0.6).heap_bytes / 1e6:,.1f}" in reader.text
    )
    assert "pipeline.shift: ppermute → slice" in reader.text
    assert "gave no buffer assignment" in reader.text
    assert "CPU figures mislead" not in reader.text  # it is said of the first compiler
    assert "2,346" in reader.text or "2.346" in reader.text


def test_a_page_of_one_program() -> None:
    text = Reader(measurement_page(TITLE, measurement(attribution(), platform="cpu"))).text
    assert "Largest buffers of the heap, 6 of 6 rows" in text
    assert "CPU figures mislead" in text


def by_cublas(**figures: Any) -> Outcome:
    """The outcome of the examples with figures of its own."""
    made = outcome()
    assert made.a
    memory = dataclasses.replace(made.a.memory, **figures)
    return dataclasses.replace(made, a=dataclasses.replace(made.a, memory=memory, gemm="cublas"))


def texts_of(figure: Any) -> list[str]:
    axes = figure.axes[0]
    return [axes.get_xlabel(), *(text.get_text() for text in axes.texts)]


def test_a_heading_never_contradicts_its_bars() -> None:
    """It names the figure of the verdict, and where the bars show another one, what that says."""
    made = by_cublas(temp_bytes=1_000_000)  # the heap shrinks, temp grows
    made = dataclasses.replace(made, verdict=made.verdict_by("temp"))
    label, first, *_ = texts_of(outcomes_chart(TITLE, [made]))
    assert label.startswith("heap of device memory at its peak")
    told = next(text for text in (first, *_) if text.startswith("stage-shift"))
    after = made.b.memory.temp_bytes / 1e6
    assert told == (
        f"stage-shift: opposite by temp, 1.0 → {after:,.1f} MB; the bars are the heap: holds"
    )
    page = " ".join(Reader(outcomes_page(TITLE, [made])).text.split())
    assert "stage-shift opposite by temp" in page
    assert "The heap of device memory at its peak, by role" in page


def of_own_functions() -> Outcome:
    """Arm b gives up the state that arm a keeps, and holds more in its heap."""
    one, other = measurement(attribution()), measurement(attribution(1.2))
    memory = dataclasses.replace(one.memory, alias_bytes=0, constant_bytes=67_108_864)
    kept = dataclasses.replace(one, memory=memory)
    experiment = dataclasses.replace(EXPERIMENTS["stage-shift"], judged_by="account")
    return compare_measurements(
        experiment.question, kept, dataclasses.replace(other, hlo="ENTRY %b")
    )


def test_the_account_is_drawn_where_the_verdict_is_about_it() -> None:
    made = of_own_functions()
    figure = outcomes_chart(TITLE, [made])
    label, *texts = texts_of(figure)
    assert label.startswith("device memory of the account")
    before, after = (f"{size / 1e6:,.1f}" for size in made.bytes_of("account"))
    told = f"stage-shift: holds by the account, {before} → {after} MB"
    assert told in texts
    assert {f" {before}", f" {after}"} <= set(texts), "the lengths of the bars"
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"kept argument", "donated argument", "output", "constant"} <= set(words)


def test_the_page_has_the_account() -> None:
    made = of_own_functions()
    page = outcomes_page(TITLE, [made])
    text = " ".join(Reader(page).text.split())
    assert "<span>+210.0</span>" in page, "a donation is no loss, and has no colour"
    assert "<span>−210.0</span>" in page, "and what is not kept any more is no gain beside it"
    assert '<span class="less">−67.1</span>' in page
    assert "Same numbers" not in text, "nobody compared them"
    assert "holds by the account" in text
    assert "arguments that are kept 210.0 0.0 −210.0" in text
    assert "arguments that are donated to outputs 0.0 210.0 +210.0" in text
    assert "constants 67.1 0.0 −67.1" in text
    before, after = made.bytes_of("account")
    sizes = f"{before / 1e6:,.1f} {after / 1e6:,.1f} −{(before - after) / 1e6:,.1f}"
    assert f"the account: what must fit {sizes}" in text
    assert f"account {before / 1e6:,.1f} → {after / 1e6:,.1f} MB" in text, "in the headline"


def test_both_kinds_of_products() -> None:
    other = dataclasses.replace(by_cublas(temp_bytes=987_600_000), note="its own note")
    text = " ".join(Reader(outcomes_page(TITLE, [outcome()], [other])).text.split())
    assert "cuBLASLt: its own note" in text
    row = r"cuBLASLt holds by temp [\d.]+ 987\.6 → [\d.]+ "
    assert len(re.findall(row, text)) == 1
    assert "Triton holds by temp" in text
    text = " ".join(Reader(outcomes_page(TITLE, [outcome()] * 2, [other] * 2)).text.split())
    assert len(re.findall(row, text)) == 4, "in the summary too"
    text = Reader(outcomes_page(TITLE, [outcome()], [by_cublas()])).text
    assert "With cuBLASLt’s matrix products instead of Triton’s: the same memory." in text


@pytest.mark.parametrize(("more", "is_alike"), [(0, True), (1_000, True), (9_000_000, False)])
def test_a_program_that_needs_about_the_same_is_one_line(more: int, is_alike: bool) -> None:
    one = measurement(attribution())
    memory = dataclasses.replace(one.memory, heap_bytes=one.memory.heap_bytes + more)
    time = dataclasses.replace(TIME, step_seconds=0.04)
    other = dataclasses.replace(one, memory=memory, gemm="cublas", time=time)
    line = in_place_of_report(one, other)
    if not is_alike:
        assert line is None
    elif more:
        size = f"{memory.account_bytes / 1e6:,.1f}"
        assert f"cuBLASLt: the account is {size} MB (+0.0%), the estimated" in line.plain
    else:
        assert line.plain.endswith("cuBLASLt: the same memory, the estimated step 40.00 ms")


def test_one_program_by_both_kinds() -> None:
    kinds = [dataclasses.replace(measurement(attribution(f)), gemm=g) for g, f in GEMM_FACTORS]
    text = " ".join(Reader(measurement_page(TITLE, *kinds)).text.split())
    assert "a Triton" in text
    assert "b cuBLASLt" in text
    before, after = (attribution(factor).heap_bytes for _, factor in GEMM_FACTORS)
    assert f"heap {before / 1e6:,.1f} → {after / 1e6:,.1f} MB" in text
    figure = program_chart(TITLE, *kinds)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["Triton", "cuBLASLt"]


def test_a_chart_has_bars_where_the_kinds_differ() -> None:
    found = [outcome(), outcome("norm-scale")]
    figure = outcomes_chart(TITLE, found, [by_cublas(), by_cublas(temp_bytes=1)])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [label.endswith(", cuBLASLt") for label in labels] == [False] * 4 + [True] * 2


def test_bars_and_line_are_to_scale() -> None:
    one = charts.DrawnArm("a", "whole", attribution())
    other = charts.DrawnArm("b", "less", attribution(0.6))
    sizes = {arm.key: arm.attribution.heap_bytes for arm in (one, other)}
    bars = charts.role_bars([one, other]).split('class="bar"')[1:]
    for key, bar in zip("ab", bars, strict=True):
        widths = [float(text) for text in re.findall(r'<rect [^>]*width="([\d.]+)"', bar)]
        assert sum(widths) == pytest.approx(1000 * sizes[key] / sizes["a"], abs=0.05)
        first = max(attribution(1.0 if key == "a" else 0.6).by_role().values())
        assert max(widths) == pytest.approx(1000 * first / sizes["a"], abs=0.05)


def test_roles_that_round_to_nothing_are_not_listed() -> None:
    sizes = attribution().by_role()
    small = {role for role, size in sizes.items() if size < 50_000}
    page = measurement_page(TITLE, measurement(attribution()))
    (bar,) = re.findall(r'aria-label="this program: ([^"]*)"', page)
    assert {part.rpartition(" ")[0].rpartition(" ")[0] for part in bar.split(", ")} == (
        {*sizes} - small
    )
    legend = re.search(r'<div class="x-ends">.*?<p class="roles">(.*?)</p>', page)
    assert legend
    assert small
    assert not [role for role in small if f"</span>{role}</span>" in legend[1]]
    assert max(sizes, key=lambda role: sizes[role]) in legend[1]


def steps_of(path: str) -> list[tuple[int, int]]:
    """The corners of a path of steps: how far along the schedule, and how far above zero."""
    at, up, found = 0, 0, []
    for command, text in re.findall(r"([hv])(-?\d+)", path):
        at, up = (at + int(text), up) if command == "h" else (at, up - int(text))
        found.append((at, up))
    return found


def test_areas_of_a_timeline_are_to_scale() -> None:
    """Each role is as high as it and those below it, and the highest one ends at the peak."""
    whole = attribution()
    assert whole.history
    drawing = str(timeline([charts.DrawnArm("a", "whole", whole)]))
    paths = re.findall(r"<title>([^<]+)</title><path d=\"([^\"]+)\"", drawing)
    peak = whole.history.positions.index(whole.peak_position)
    sizes = dict(zip(whole.history.roles, whole.history.bytes[peak], strict=True))
    assert {role for role, _ in paths} == set(sizes)
    top = charts.axis_from_zero(whole.heap_bytes / 1e6).high
    below = 0
    for role, path in paths[::-1]:
        below += sizes[role]
        highest = max(up for _, up in steps_of(path))
        assert highest == pytest.approx(1000 * below / 1e6 / top, abs=0.51), role
    assert sum(sizes.values()) == pytest.approx(whole.heap_bytes, abs=len(sizes))


def test_a_timeline_is_over_the_whole_schedule() -> None:
    """The position of the peak is the one that `memory` prints, wherever the first value begins."""
    late = dataclasses.replace(attribution(), positions=1200)
    drawing = str(timeline([charts.DrawnArm("a", "late", late)]))
    assert "position 300 of 1200 in the schedule" in drawing
    assert "left:25.00%" in drawing
    path = re.findall(r' d="([^"]+)"', drawing)[0]
    assert path.startswith("M0 1000")
    assert path.endswith("H1000V1000z")
    assert max(at for at, _ in steps_of(path)) == pytest.approx(500, abs=1)


@pytest.mark.parametrize(("room", "words", "drawn"), [
    (100_000_000, "The device leaves 100.0 MB for the heap (the line)", True),
    (90_000_000_000, "90,000.0 MB for the heap (above this chart)", False),
    (-1, "alone are more than the device has", False),
    (None, "", False),
])  # fmt: skip
def test_the_capacity_is_a_line_where_the_chart_reaches_it(
    room: int | None, words: str, drawn: bool
) -> None:
    drawing = str(timeline([charts.DrawnArm("a", "one", attribution(), room=room)]))
    assert words in drawing
    assert ('class="limit"' in drawing) == drawn
    assert ("The device" in drawing) == (room is not None and room > 0)


def test_the_page_knows_what_a_device_leaves_for_the_heap() -> None:
    small = dataclasses.replace(measurement(attribution()), device_memory_bytes=400_000_000)
    arguments = small.memory.argument_bytes + 4
    text = Reader(measurement_page(TITLE, small)).text
    assert f"{(400_000_000 - arguments) / 1e6:,.1f} MB for the heap" in text


def data_of(page: str) -> list[Any]:
    (text,) = re.findall(r'<script type="application/json">(.*?)</script>', page)
    found: list[Any] = json.loads(text)
    return found


def test_the_data_of_a_timeline_are_those_of_the_measurement() -> None:
    one, other = attribution(), attribution(0.6)
    page = outcomes_page(TITLE, [outcome()])
    for data, heap in zip(data_of(page), (one, other), strict=True):
        assert heap.history
        assert data["bytes"] == [list(row) for row in heap.history.bytes]
        assert data["positions"] == list(heap.history.positions)
        assert data["positions"][data["peak"]] == heap.peak_position
        assert [row[1] for row in data["buffers"]] == [
            buffer.shape or buffer.name for buffer in heap.history.buffers
        ]
    assert "<b>" not in str(re.findall(r"<script.*?</script>", page, re.DOTALL))


def frames_of(page: str) -> list[tuple[float, float, int, str]]:
    """The left edge, width and level of each call of a flame graph, and what is said of it."""
    found = re.findall(
        r'--x:([\d.]+);--w:([\d.]+);--y:(\d+)[^"]*" title="([^"]*)" role="treeitem"', page
    )
    return [(float(x), float(w), int(y), html.unescape(said)) for x, w, y, said in found]


def test_a_flame_graph_has_the_callers_with_their_bytes() -> None:
    heap = attribution()
    frames = frames_of(str(flame([charts.DrawnArm("b", "this program", heap)])))
    told = {said.partition(":")[0]: (level, said) for _, _, level, said in frames}
    by_call: dict[int, int] = {}
    for buffer in heap.buffers:
        for call in (buffer.call, 0) if buffer.call else ():
            by_call[call] = by_call.get(call, 0) + buffer.bytes
    for number, (name, level) in enumerate(
        [("train_step", 1), ("Layer.call", 2), ("Layer.call", 2)]
    ):
        call = heap.calls[number]
        (said,) = [s for *_, s in frames if s.startswith(f"{name} {call.file}:{call.line}:")]
        assert f"{by_call[number] / 1e6:,.1f} MB, {by_call[number] / heap.heap_bytes:.1%}" in said
        assert [y for _, _, y, s in frames if s == said] == [level]
    assert told["the heap at its peak"][1].endswith(f"{heap.heap_bytes / 1e6:,.1f} MB, 100.0%")
    for x, w, level, _ in frames[1:]:
        around = [(left, wide) for left, wide, above, _ in frames if above == level - 1]
        assert any(left <= x + 0.01 and x + w <= left + wide + 0.01 for left, wide in around)


def test_a_flame_graph_of_two_programs_says_what_differs() -> None:
    """In words, not by colour alone, and less memory is the good colour."""
    arms = [
        charts.DrawnArm("a", "one", attribution()),
        charts.DrawnArm("b", "other", attribution(0.6)),
    ]
    page = str(flame(arms))
    before, after = (arm.attribution.heap_bytes for arm in arms)
    change = f"{(after - before) / 1e6:,.1f}".replace("-", "−")
    assert f'{before / 1e6:,.1f} → {after / 1e6:,.1f} MB, {change} MB, less"' in page
    assert "grows" not in page
    assert f">{change} the heap at its peak" in page
    swapped = str(flame(arms[::-1]))
    assert "shrinks" not in swapped
    assert f">{change.replace('−', '+')} the heap at its peak" in swapped


def test_first_functions_of_two_programs_are_one_call() -> None:
    one = attribution()
    calls = (dataclasses.replace(one.calls[0], function="other_step", line=70), *one.calls[1:])
    other = dataclasses.replace(one, calls=calls)
    arms = [charts.DrawnArm("a", "one", one), charts.DrawnArm("b", "other", other)]
    frames = frames_of(str(flame(arms)))
    joined = [said for *_, said in frames if said.startswith("train_step → other_step")]
    assert len(joined) == 1
    assert all("the same" in said for *_, said in frames), "nothing but names and lines differs"


def swept(*factors: float) -> Sweep:
    points = [
        Point(value=4 * (at + 1), result=measurement(attribution(factor)))
        for at, factor in enumerate(factors)
    ]
    return Sweep(field="train.global_batch", arms=(("step", tuple(points)),), platform="cpu")


def test_a_page_of_a_sweep() -> None:
    found = swept(1.0, 2.0, 4.0)
    page = sweep_page("a <sweep>", found, command="nnx-pipeline compare")
    text = " ".join(Reader(page).text.split())
    assert "<sweep>" not in page
    for point, name in zip(found.arms[0][1], found.names(), strict=True):
        temp, heap = (point.figure(of) / 1e6 for of in ("temp_bytes", "heap_bytes"))
        assert f"{name} {temp:,.1f} {heap:,.1f}" in text
    fit = found.fit("heap_bytes")
    assert fit
    assert f"slope per unit {found.slope('temp_bytes') / 1e6:+,.3f}" in text
    assert f"{fit.r_squared:.3f}" in text
    assert text.count("heap, MB") == 1
    assert "peak, MB" not in text, "known of no point"
    assert "<script" not in page, "nothing moves"
    chart = page[page.index("heap, MB") :]
    top = charts.axis_from_zero(attribution(4.0).heap_bytes / 1e6).high * 1e6
    for factor, up in zip(
        (1.0, 2.0, 4.0), re.findall(r"top:([\d.]+)%\" title", chart)[:3], strict=True
    ):
        assert float(up) == pytest.approx(
            100 * (1 - attribution(factor).heap_bytes / top), abs=0.01
        )
    ends, *_ = re.findall(r'y1="([\d.-]+)" y2="([\d.-]+)" class="fitted a"', chart)
    for value, up in zip((4, 12), ends, strict=True):
        height = (fit.intercept + fit.slope * value) / top
        assert float(up) == pytest.approx(1000 * (1 - height), abs=0.1)


def test_a_sweep_with_a_point_that_failed() -> None:
    good = swept(1.0, 2.0)
    failed = Point(value=12, result=None, error="too <large>")
    made = dataclasses.replace(good, arms=(("step", (*good.arms[0][1], failed)),))
    text = " ".join(Reader(sweep_page("a sweep", made)).text.split())
    assert "step, train.global_batch=12: too <large>" in text
    assert "12 – –" in text


def test_a_program_without_call_stacks_has_no_flame_graph() -> None:
    bare = dataclasses.replace(attribution(), calls=(), history=None)
    page = measurement_page(TITLE, measurement(bare))
    assert 'class="flame"' not in page
    assert 'class="timeline"' not in page


def test_everything_that_moves_can_be_reached_by_keys() -> None:
    page = measurement_page(TITLE, measurement(attribution()))
    assert '<input type="range"' in page
    assert page.count('tabindex="0"') == 1, "one stop of the Tab key for the whole graph"
    items = page.count('role="treeitem"')
    assert items > 5
    assert page.count('tabindex="-1"') == items - 1
    assert page.count("aria-level=") == items
    for key in ("ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Enter", "Escape"):
        assert key in SCRIPT


def test_the_change_has_its_sign() -> None:
    page = outcomes_page(TITLE, [outcome()])
    before, after = (attribution(factor).heap_bytes for factor in (1.0, 0.6))
    share = f"{after / before - 1:+.1%}".replace("-", "−")
    assert f'(<span class="less">{share}</span>)' in page


def test_a_program_on_its_own_has_no_letter() -> None:
    page = measurement_page(TITLE, measurement(attribution()))
    text = Reader(page).text
    assert "this program peaks at" in text
    assert "b (this program)" not in text
    assert "letter b" not in page.partition("</style>")[2]


def test_a_program_that_holds_nothing() -> None:
    nothing = dataclasses.replace(attribution(), heap_bytes=0, buffers=(), timeline=())
    text = Reader(measurement_page(TITLE, measurement(nothing))).text
    assert "Largest buffers of the heap, 0 of 0 rows" in text


def test_a_figure_that_is_not_given_is_a_dash() -> None:
    text = " ".join(Reader(measurement_page(TITLE, measurement(None))).text.split())
    assert "heap – MB" in text
    assert "peak – MB" in text
    assert "program code, MB –" in text


def test_nothing_is_fetched() -> None:
    page = outcomes_page(TITLE, examples())
    assert not re.findall(r"(?:https?:)?//[\w.]", page.replace("<!DOCTYPE html>", ""))
    links = [value for name, value in Reader(page).attributes if name in ("href", "src")]
    assert links
    assert all(re.match(r"#|data:,$", value or "") for value in links)
    assert "@import" not in STYLE
    assert "url(" not in STYLE


def test_every_role_has_a_colour_of_its_own() -> None:
    colours = [ROLE_COLOURS[role] for role in ROLES]
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("name", ["chart.png", "chart.svg"])
def test_a_chart(tmp_path: Path, name: str) -> None:
    save_figure(outcomes_chart(TITLE, examples()), str(tmp_path / name))
    start = (tmp_path / name).read_bytes()[:300]
    assert start.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in start


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--html", "-"), "--html -: only JSON and Markdown go to standard output; name a file"),
        (
            ("--html", "no/such/folder/x.html"),
            "--html no/such/folder/x.html cannot be written; choose a file in a writable folder",
        ),
        (("--chart", "x.gif"), "--chart x.gif"),
        (("--html", "x.html", "--json", "./x.html"), "--html and --json both write x.html"),
        (("--list",), "--list cannot be combined with names"),
    ],
)
def test_files_that_cannot_be_made(run: Any, arguments: tuple[str, ...], message: str) -> None:
    ended = run("ab", "norm-scale", *arguments)
    assert ended.code == 2
    assert message in ended.err


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_page(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text("the old one")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    command = ("memory", "--model", "tiny", "--set", "model.num_layers=1", "--html", str(page))
    ended = run(*command)
    assert ended.code == 1
    assert "No space left on device" in ended.err
    assert "Traceback" not in ended.err
    assert page.read_text() == "the old one"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_one_file_under_two_names(run: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    names = tmp_path / "x.svg", tmp_path / "folder" / ".." / "x.svg"
    ended = run("ab", "norm-scale", "--html", names[0], "--chart", names[1])
    assert ended.code == 2
    assert f"--html and --chart both write {names[0]}; name two files" in ended.err


def test_an_error_names_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "page.html"
    with pytest.raises(OSError, match=re.escape(f"'{folder / 'below'}'")):
        files.write_whole(str(folder / "below"), b"x")
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            files.write_whole("/dev/full", b"x")


def test_a_name_of_any_length_that_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    files.write_whole(str(path), b"x")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_rights_stay_as_they_were(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.touch()
    old.chmod(0o600)
    before = os.umask(0o027)
    try:
        for path in (old, new):
            files.write_whole(str(path), b"x")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (old, new)] == [0o600, 0o640]


def chromium(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a headless Chromium with a profile of its own; it must end within a minute."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (Debian: chromium)")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def test_a_browser_has_nothing_to_complain_of(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(outcomes_page(TITLE, examples()))
    ended = chromium(tmp_path, f"--screenshot={picture}", "--window-size=1000,2000", page.as_uri())
    assert "CONSOLE" not in ended.stderr
    assert picture.stat().st_size > 20_000


# Uses the page by keys and by a finger, and writes what it then shows into the title.
USE = """<script>addEventListener("load", () => {
  const key = (item, name) =>
    item.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
  const text = (of) => document.querySelector(of).textContent;
  const found = [];
  const slider = document.querySelector(".cursor input");
  slider.value = 10;
  slider.dispatchEvent(new Event("input"));
  found.push(text(".readout"), slider.getAttribute("aria-valuetext"));
  const area = document.querySelector(".area").getBoundingClientRect();
  const at = { clientX: area.left + area.width / 4, bubbles: true };
  document.querySelector(".area").dispatchEvent(new PointerEvent("pointerdown", at));
  found.push(text(".readout b"));
  document.querySelector(".frames div").focus();
  for (const name of ["ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowDown", "Enter"]) {
    key(document.activeElement, name);
    found.push(document.activeElement.title);
  }
  const items = [...document.querySelectorAll(".frames div")];
  found.push(items.filter((item) => item.hidden).length, text(".said"));
  key(document.activeElement, "Escape");
  found.push(items.filter((item) => item.hidden).length);
  document.title = JSON.stringify(found);
});</script>"""


def test_it_can_be_used_by_keys_and_by_touch(tmp_path: Path) -> None:
    heap = attribution()
    assert heap.history
    page = tmp_path / "page.html"
    page.write_text(
        measurement_page("a page", measurement(heap)).replace("</body>", f"{USE}</body>")
    )
    dumped = chromium(tmp_path, "--dump-dom", page.as_uri()).stdout
    found = json.loads(html.unescape(re.findall("<title>(.*?)</title>", dumped)[0]))
    readout, said, touched, first, second, beside, back, again, zoomed, hidden, told, shown = found
    at, quarter = heap.history.positions[10], heap.history.positions.index(152)
    total = heap.history.totals()
    assert said == f"{total[10] / 1e6:,.1f} MB at position {at}"
    largest, size = heap.history.largest[10][0]
    assert f"{size / 1e6:,.1f} MB{heap.history.buffers[largest].role}" in readout
    assert touched in {f"{total[quarter + step] / 1e6:,.1f} MB" for step in (-1, 0, 1)}
    assert first.startswith("train_step model/step.py:9: ")
    assert second.startswith("Layer.call model/layer.py:")
    assert beside.startswith("Layer.call model/layer.py:")
    assert beside != second
    assert back == first
    assert again == zoomed == told == second
    frames = frames_of(measurement_page("a page", measurement(heap)))
    ((left, width),) = [(x, w) for x, w, _, title in frames if title == second]
    outside = [x for x, w, *_ in frames if x + w <= left + 0.01 or x >= left + width - 0.01]
    assert hidden == len(outside) > 0
    assert shown == 0


def test_it_is_no_wider_than_a_phone(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(outcomes_page(TITLE, examples()))
    frame = '<iframe src="page.html" style="width:360px;height:800px;border:0"></iframe>'
    (tmp_path / "phone.html").write_text(f"<!DOCTYPE html><title>none</title>{frame}{PROBE}")
    address = (tmp_path / "phone.html").as_uri()
    found = chromium(tmp_path, "--allow-file-access-from-files", "--dump-dom", address).stdout
    (title,) = re.findall("<title>(.*?)</title>", found)
    wide, screen = map(int, title.split(" of "))
    assert 300 < wide <= screen <= 360


def test_it_prints(tmp_path: Path) -> None:
    page, paper = tmp_path / "page.html", tmp_path / "page.pdf"
    page.write_text(outcomes_page(TITLE, examples()))
    chromium(tmp_path, f"--print-to-pdf={paper}", "--no-pdf-header-footer", page.as_uri())
    assert paper.read_bytes().startswith(b"%PDF")
    assert paper.stat().st_size > 20_000


@pytest.mark.parametrize("which", [0, 1])
def test_the_sum_is_last_where_one_program_has_a_row_more(which: int) -> None:
    plain = measurement(attribution())
    beside = Assigned(
        argument_bytes=plain.memory.argument_bytes,
        output_bytes=plain.memory.output_bytes,
        alias_bytes=plain.memory.alias_bytes,
        constant_bytes=0,
        scratch_bytes=3_000_000,
        on_chip_bytes=None,
    )
    results = [plain, plain]
    results[which] = dataclasses.replace(plain, assigned=beside)
    shown = str(account_table(list(map(LabelledProgram, "ab", ("one", "other"), results))))
    order = ("outputs with", "used by temporaries", "heap", "<b>the account")
    places = [shown.index(words) for words in order]
    assert places == sorted(places)
    assert shown.count("<b>the account") == 1
