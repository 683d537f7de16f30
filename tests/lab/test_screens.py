"""What a user sees at 60, 80 and 120 columns: whole names, words that are explained, progress."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from helpers import Run, commands_of, in_a_process
from page_examples import TIME, attribution, measurement, outcome
from rich.console import Console, RenderableType

from linen_compat._cli.main import commands as linen_compat
from nnx_pipeline.config.presets import PRESETS
from nnx_pipeline.experiments._advice import ADVICE
from nnx_pipeline.experiments._registry import EXPERIMENTS
from nnx_pipeline.lab._cli import completion
from nnx_pipeline.lab._cli.main import cli as nnx_pipeline
from nnx_pipeline.lab._page import outcomes_page
from nnx_pipeline.lab._report import tables
from nnx_pipeline.lab._report.columns import Column, Columns
from nnx_pipeline.lab._report.view import remarks, words
from nnx_pipeline.lab._report.view.figures import COLUMNS
from nnx_pipeline.lab._report.view.sentences import closing_sentences
from nnx_pipeline.lab.attribution._result import ADVICE as ROLE_ADVICE
from nnx_pipeline.lab.attribution._result import ROLES
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.pipeline._timetable.actions import actions_of
from nnx_pipeline.pipeline._timetable.figure import live
from nnx_pipeline.pipeline.schedule import make_schedule

WIDTHS = (60, 80, 120)


def text(view: RenderableType, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def example() -> Columns:
    heads = [Column("name"), Column("b", 2), Column("c", 1, shorter=lambda cell: cell[-10:])]
    table = Columns([*heads, Column("why", is_prose=True)], title="a table")
    table.add_row("n" * 12, "b" * 20, "c" * 30, "a reason that may take several lines")
    table.add_section()
    table.add_row("short")
    return table


def test_whole_columns_are_left_out_after_cells_are_shortened() -> None:
    shown = {width: text(example(), width) for width in (120, 80, 66, 60, 50)}
    for width, lines in shown.items():
        assert max(map(len, lines.splitlines())) <= width
        assert "n" * 12 in lines
        assert "several" in lines
    assert "c" * 30 in shown[120]
    assert "b" * 20 in shown[120]
    assert "left out" not in shown[120]
    assert "left out at 80 columns: b\n" in shown[80]
    assert "c" * 30 in shown[80]
    assert "left out at 66 columns: b\n" in shown[66]
    assert "c" * 10 in shown[66]
    assert "c" * 11 not in shown[66]
    assert "left out at 50 columns: b, c\n" in shown[50]


def test_what_may_not_be_left_out_is_folded_and_not_cut() -> None:
    table = Columns([Column("name")])
    table.add_row("x" * 100)
    shown = text(table, 60)
    assert "…" not in shown
    assert shown.count("x") == 100


@pytest.mark.parametrize("width", WIDTHS)
def test_names_of_presets_and_experiments_are_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """COLUMNS counts where the output is no terminal, too."""
    monkeypatch.setenv("COLUMNS", str(width))
    for command, names in ((("models",), PRESETS), (("ab", "--list"), EXPERIMENTS)):
        shown = run(*command).out
        assert max(map(len, shown.splitlines())) <= width
        for name in names:
            assert re.search(rf"│ {name} ", shown), name


@pytest.mark.parametrize("width", WIDTHS)
def test_figures_of_arms_are_left_out_for_their_names(width: int) -> None:
    found = [outcome("stage-shift-pad")]
    shown = text(tables.outcomes_view("an A/B", found), width)
    assert max(map(len, shown.splitlines())) <= width
    assert ("peak MB" in shown.splitlines()[1]) == (width > 60)
    assert ("left out at 60 columns: peak MB" in shown) == (width == 60)
    assert "temp MB" in shown
    assert "account MB" in shown
    assert all(label in shown for label, _ in found[0].arms)


@pytest.mark.parametrize(
    "group", [nnx_pipeline, linen_compat], ids=["nnx-pipeline", "linen-compat"]
)
def test_summaries_of_commands_fit(group: Any) -> None:
    longest = max(map(len, commands_of(group)))
    for name, command in commands_of(group).items():
        assert command.short_help, name
        assert len(command.short_help) <= 60 - longest - 6, name


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "group", [nnx_pipeline, linen_compat], ids=["nnx-pipeline", "linen-compat"]
)
def test_helps_of_commands_fit(
    monkeypatch: pytest.MonkeyPatch, group: click.Group, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for name, command in commands_of(group).items():
        parent = click.Context(group, info_name="program", **group.context_settings)
        shown = command.get_help(click.Context(command, parent, name))
        assert [line for line in shown.splitlines() if len(line) > width] == [], name


def test_words_are_explained_where_they_are_printed(run: Run) -> None:
    asked = ("measure", "jax.numpy:tanh", "--arg", "float32[8,128]")
    assert words.HINT in run(*asked).out
    shown = " ".join(run(*asked, "--explain").out.split())
    assert words.HINT not in shown
    for word, sentence in (*words.MEMORY.items(), *words.TIME.items()):
        assert f"{word} {sentence}" in shown
    assert words.HINT not in run(*asked, "--json", "-").out
    heads = set(COLUMNS) | {"step"}
    assert heads <= {*words.MEMORY, *words.TIME}, "each column of a table of arms"


def of(size: int | None, **buffers: str) -> Measurement:
    made = measurement(attribution())
    assert made.attribution is not None
    changed = [dataclasses.replace(one, **buffers) for one in made.attribution.buffers]
    found = dataclasses.replace(made.attribution, buffers=changed)
    return dataclasses.replace(made, attribution=found, device_memory_bytes=size)


def test_the_last_line_adds_up_what_must_fit() -> None:
    held = measurement(attribution()).needed_bytes
    (line,) = remarks.fit_remarks(of(10 * held))
    parts, _, total = line.text.partition(" = ")
    numbers = [float(one) for one in re.findall(r"[\d.]+", parts)]
    found, size = re.findall(r"([\d,.]+) of ([\d,.]+) GB: fits$", total)[0]
    assert sum(numbers) == pytest.approx(float(found), abs=0.02)
    assert float(found) == pytest.approx(held / 1e9, abs=0.005)
    assert float(size) == pytest.approx(held / 1e8, abs=0.005)
    assert remarks.fit_remarks(of(None))[0].text.endswith("whose memory is not known here")


@pytest.mark.parametrize("role", sorted({*ROLE_ADVICE} & {*ROLES}))
def test_what_does_not_fit_is_named_with_what_to_try(role: str) -> None:
    """For a config its options, and for any other function the means of JAX."""
    for advice in (ADVICE, ROLE_ADVICE):
        line, *more = (one.text for one in remarks.fit_remarks(of(1000, role=role), advice))
        assert line.endswith("does not fit ✗")
        assert more[0].startswith("  ")
        assert f" MB: {role}, " in more[0]
        assert f"  to try: {advice[role]}" in more


def test_advice_names_options_that_exist() -> None:
    from nnx_pipeline.config._overrides import apply_overrides, parse_overrides
    from nnx_pipeline.config.presets import preset

    assert set(ADVICE) == set(ROLE_ADVICE) <= {*ROLES, "arguments"}
    for told in ADVICE.values():
        for setting in re.findall(r"--set (\S+?)[,:]?(?:\s|$)", told):
            apply_overrides(preset("tiny"), parse_overrides([setting.replace("=N", "=4")]))


def closing_of_small() -> str:
    """Of two programs whose sizes and times would read the same if they were rounded."""
    found = outcome("norm-scale")

    def arm(size: int, seconds: float) -> Any:
        assert found.a
        sizes = {**dict.fromkeys(vars(found.a.memory), 0), "heap_bytes": size}
        time = dataclasses.replace(TIME, step_seconds=seconds)
        return dataclasses.replace(
            found.a, memory=dataclasses.replace(found.a.memory, **sizes), time=time
        )

    small = dataclasses.replace(found, a=arm(41_000, 2.04e-5), b=arm(38_000, 2.01e-5))
    return closing_sentences([small])[0].text


BOUNDS = {
    # Which of both steps are lower bounds, and their milliseconds: what follows of both.
    (True, True, 10, 5): "the lower bound of the step falls from 10.00 ms to 5.00 ms (−50.0%).",
    (True, False, 10, 5): "the estimated step falls from ≥ 10.00 ms to 5.00 ms (−50.0% or more).",
    (False, True, 5, 10): "the estimated step rises from 5.00 ms to ≥ 10.00 ms (+100.0% or more).",
    (True, False, 5, 10): "the estimated step is ≥ 5.00 ms and 10.00 ms, which leaves open which "
    "is shorter.",
    (False, True, 10, 5): "the estimated step is 10.00 ms and ≥ 5.00 ms, which leaves open which "
    "is shorter.",
}


@pytest.mark.parametrize(("field", "sign"), [("is_lower_bound", "≥"), ("is_partial", "≳")])
@pytest.mark.parametrize("case", BOUNDS)
def test_no_more_is_said_than_follows_from_bounds(
    case: tuple[bool, bool, int, int], field: str, sign: str
) -> None:
    """A step that is longer than it says may be the longer one after all."""
    found = outcome("norm-scale")
    assert found.a
    times = (
        dataclasses.replace(TIME, step_seconds=1e-3 * ms, **{field: least})
        for least, ms in zip(case[:2], case[2:], strict=True)
    )
    one, other = (dataclasses.replace(found.a, time=time) for time in times)
    told = dataclasses.replace(found, a=one, b=other)
    first, *rest = (line.text for line in closing_sentences([told, told]))
    wanted = BOUNDS[case].replace("≥", sign)
    if sign == "≳":
        wanted = wanted.replace("the lower bound of the step", "the estimated step (≳)")
    assert first.endswith(f" and {wanted}")
    alike = case[0] == case[1]
    by = "lower bounds" if sign == "≥" else "figures with ≳"
    assert [line for line in rest if "saves" in line] == (
        [f"Of these 2 changes norm-scale saves most time, 5.00 ms per step by {by}."]
        if alike
        else []
    )
    page = outcomes_page("bounds", [told])
    css, percent = ("less", "−50.0%") if case[2] > case[3] else ("more", "+100.0%")
    assert (f'<small> ms (<span class="{css}">{percent}</span>)</small>' in page) == alike
    assert ("<small> ms</small>" in page) != alike


def test_nothing_follows_from_the_longest_branch() -> None:
    """Neither of the two is shorter for certain where one may take more and less than it says."""
    found = outcome("norm-scale")
    assert found.a
    times = (
        dataclasses.replace(TIME, step_seconds=1e-2, is_lower_bound=True),
        dataclasses.replace(TIME, step_seconds=5e-3, is_open=True),
    )
    one, other = (dataclasses.replace(found.a, time=time) for time in times)
    (said,) = closing_sentences([dataclasses.replace(found, a=one, b=other)])
    assert said.text.endswith("≥ 10.00 ms and 5.00 ms, which leaves open which is shorter.")
    part = dataclasses.replace(found.a, time=dataclasses.replace(TIME, is_partial=True))
    (said,) = closing_sentences([dataclasses.replace(found, a=one, b=part)])
    assert said.text.endswith("≥ 10.00 ms and ≳ 46.25 ms, which leaves open which is shorter.")


def test_sentences_say_what_a_comparison_has_shown() -> None:
    def made(name: str, factor: float, seconds: float) -> Any:
        found = outcome(name)
        assert found.a
        before = dataclasses.replace(found.a, time=dataclasses.replace(TIME, step_seconds=1e-2))
        assert before.memory.heap_bytes
        heap = int(before.memory.heap_bytes * factor)
        after = dataclasses.replace(
            before,
            memory=dataclasses.replace(before.memory, heap_bytes=heap),
            time=dataclasses.replace(TIME, step_seconds=seconds),
        )
        return dataclasses.replace(found, a=before, b=after)

    found = [made("stage-shift", 0.5, 0.02), made("norm-scale", 1.0, 0.005)]
    first, second, last = (line.text for line in closing_sentences(found))
    before, after = (one.memory.account_bytes / 1e6 for one in (found[0].a, found[0].b))
    assert f"the account falls from {before:.1f} MB to {after:.1f} MB (−" in first
    assert "the estimated step rises from 10.00 ms to 20.00 ms (+100.0%)" in first
    assert f"the account stays at {before:.1f} MB" in second
    assert f"stage-shift saves most memory, {before - after:.1f} MB per device" in last
    assert "norm-scale saves most time, 5.00 ms per step" in last
    hardly = made("norm-scale", 1.0, 0.00999)
    assert "hardly changes" in closing_sentences([hardly])[0].text
    assert "the account falls from 41,000 bytes to 38,000 bytes (−7.3%)" in closing_of_small()
    assert "the estimated step falls from 20.400 µs to 20.100 µs (−1.5%)" in closing_of_small()
    assert len(closing_sentences([hardly])) == 1
    assert closing_sentences([dataclasses.replace(hardly, a=None)]) == []


def test_progress_is_timed_in_lines() -> None:
    ended = in_a_process("measure", "jax.numpy:tanh", "--arg", "float32[8,128]")
    assert re.search(r"^0:\d\d compiling for cpu$", ended.err, re.MULTILINE), ended.err


def test_a_shell_completes_names() -> None:
    def names(complete: completion.Complete, word: str) -> list[str]:
        return [item.value for item in complete(None, None, word)]  # type: ignore[arg-type]

    assert names(completion.presets, "mixtral-8") == ["mixtral-8x7b", "mixtral-8x22b"]
    assert names(completion.fields, "pipeline.num_r") == ["pipeline.num_repeats="]
    assert names(completion.axes, "stage=4,") == [
        f"stage=4,{axis}=" for axis in ("data", "fsdp", "tensor", "expert", "context")
    ]
    assert names(completion.platforms, "cuda:h") == ["cuda:h100:8", "cuda:h200:8"]
    assert names(completion.platforms, "rocm:mi35") == ["rocm:mi350x:8", "rocm:mi355x:8"]
    assert names(completion.platforms, "tpu:v5p") == ["tpu:v5p:2x2x2", "tpu:v5p:2x2x2*2"]
    for platform in completion.PLATFORMS:
        Platform.parse(platform)
    parameters = {
        parameter.name: parameter
        for command in commands_of(nnx_pipeline).values()
        for parameter in command.params
    }
    for name in ("model", "assignments", "mesh", "dcn", "platform", "names"):
        assert parameters[name]._custom_shell_complete, name
    assert "loss-chunks" in names(parameters["names"]._custom_shell_complete, "loss")


def test_both_schedules_in_one_picture(run: Run, tmp_path: Path) -> None:
    """Live are M · R microbatches with circular, and 2 S − 1 at most with 1F1B."""
    sizes = {"stages": 4, "microbatches": 16}
    circular, other = (
        live(actions_of(make_schedule(name, **sizes))) for name in ("circular", "1f1b")
    )
    assert np.all(circular.max(axis=1) == 16)
    assert other.max(axis=1).tolist() == [7, 5, 3, 1]
    assert np.all(circular[:, -1] == 0)
    assert np.all(other[:, -1] == 0)
    path = tmp_path / "both.svg"
    asked = ("schedule", "--stages", 4, "--microbatches", 16, "--both", path)
    assert run(*asked).code == 0
    drawn = path.read_text()
    for told in ("at most 16 live microbatches", "at most 7 live microbatches"):
        assert told in drawn
    assert "leave out --delay 2" in run(*asked, "--delay", 2).err
    assert run(*asked[:-1], tmp_path / "both.txt").code == 2


@pytest.mark.slow
def test_a_plugin_without_a_device_is_one_line() -> None:
    """The logger of JAX that is made brief is named in `platform.py`, and is JAX's own."""
    ended = in_a_process("memory", "--model", "tiny", "--platform", "local")
    assert ended.code == 0, ended.err
    assert "local (device " in ended.out
    assert ("CPU figures mislead" in ended.out) == ("device cpu" in ended.out)
    assert "Traceback" not in ended.err
    before = re.split(r"^\d+:\d\d ", ended.err, flags=re.MULTILINE)[0]
    assert len(before.splitlines()) <= 4, ended.err
