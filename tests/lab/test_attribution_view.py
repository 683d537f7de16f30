"""The tables of `nnx-pipeline memory` and of what differs in an A/B."""

from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from nnx_pipeline.lab._report.program_tables import difference_view, memory_view
from nnx_pipeline.lab._report.view.buffers import short_operation, short_source
from nnx_pipeline.lab.attribution._result import Attribution, Buffer, BufferDifference


def text(view: RenderableType) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def row(name: str, size: int, role: str, source: str | None = "/a/b/c/m.py:3") -> Buffer:
    shape = "" if source is None else "f32[8]"
    operation = "" if source is None else "jit(f)/jvp()/while/body/sin"
    return Buffer(
        name=name, bytes=size, shape=shape, operation=operation, source=source, role=role,
        first=0, last=4,
    )  # fmt: skip


HELD = Attribution(
    heap_bytes=10_000_000,
    temp_bytes=12_000_000,
    peak_position=3,
    buffers=(
        row("x", 4_000_000, "saved residual"),
        row("y", 3_000_000, "saved residual"),
        row("holes", 2_000_000, "fragmentation", None),
        row("z", 1_000_000, "activation"),
    ),
    other=(row("chip", 2_000_000, "other memory space", None),),
    timeline=((0, 1), (3, 8_000_000)),
    peak_operation="jit(f)/transpose(jvp())/mul",
    peak_source="/a/b/c/m.py:9",
    positions=5,
)


def cells(view: str, start: str) -> list[str]:
    """The cells of the first line that has this text."""
    line = next(line for line in view.splitlines() if start in line)
    return [cell.strip() for cell in line.strip("│ ").split("│")]


def test_equal_rows_are_one_with_their_number() -> None:
    view = text(memory_view("a program", HELD, top=9))
    expected = ["7.0", "70.0%", "2", "saved residual", "f32[8]", "forward: sin", "b/c/m.py:3"]
    assert cells(view, "70.0%") == expected
    assert cells(view, "20.0%")[3:] == ["fragmentation", "", "holes", "–"]
    assert "all others" not in view
    assert "peak at position 3 of 5 in the schedule: backward: mul, b/c/m.py:9" in view
    assert "80.0% of the heap has a line of source; without one: fragmentation 20.0%" in view


def test_the_rows_that_are_not_shown_are_summed() -> None:
    view = text(memory_view("a program", HELD, top=1))
    assert cells(view, "all others")[:4] == ["3.0", "30.0%", "2", "all others"]


def test_from_the_heap_to_temp() -> None:
    view = text(memory_view("a program", HELD, top=1))
    lines = view[view.index("heap to temp") :]
    assert cells(lines, "chip") == ["chip", "+2.0"]
    assert cells(lines, "│ temp") == ["temp", "12.0"]


def test_a_program_without_a_heap() -> None:
    empty = Attribution(
        heap_bytes=0, temp_bytes=0, peak_position=0, buffers=(), other=(), timeline=()
    )
    assert "– of the heap has a line of source" in text(memory_view("nothing", empty, top=3))


def change(a: int, b: int) -> BufferDifference:
    return BufferDifference(
        a_bytes=a, b_bytes=b, shape="f32[8]", operation="w", source=None, role="logits"
    )


def test_changes_have_their_sign() -> None:
    rows = [change(0, 5_000_000), change(5_000, 1_000), change(3, 1), change(2, 1)]
    view = text(difference_view("what differs", rows, top=2))
    assert cells(view, "+5.0")[:3] == ["0.0", "5.0", "+5.0"]
    assert cells(view, "0.005")[:3] == ["0.005", "0.001", "−0.004"]
    assert cells(view, "2 more")[:2] == ["−0.000", "2 more"]


@pytest.mark.parametrize(
    ("operation", "short"),
    [
        ("jit(f)/jvp()/(shard_map/all_gather:reshard:reshard)", "forward: all_gather"),
        (
            "jit(f)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/exp",
            "backward, recomputed: exp",
        ),
        ("jit(f)/jvp()/while", "forward: loop"),
        ("jit(f)/jit(_where)/select_n", "select_n"),
        ("jit(f)/bqgrd,bkgd->bgrqk/dot_general", "dot_general"),
        ("state.model.w", "state.model.w"),
        ("", ""),
    ],
)
def test_short_operations(operation: str, short: str) -> None:
    assert short_operation(operation) == short


def test_short_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_source(f"{tmp_path}/model.py:7") == "model.py:7"
    assert short_source(f"{tmp_path}/a/b/c/model.py:7") == "b/c/model.py:7"
    assert short_source("/venv/lib/package/part/model.py:7") == "package/part/model.py:7"
    assert short_source(None) == "–"
