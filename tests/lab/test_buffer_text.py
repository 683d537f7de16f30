"""Reading the compiler's buffer assignment, and what it says of a heap, on short texts."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_pipeline.lab._hlo import module as hlo
from nnx_pipeline.lab._hlo.buffers import read_buffers
from nnx_pipeline.lab._report.view.buffers import difference_row
from nnx_pipeline.lab.attribution._peak import MOST_POINTS, MOST_POSITIONS, attribute
from nnx_pipeline.lab.attribution._result import ROLES, Attribution, Buffer, difference

TEXT = """BufferAssignment:
allocation 0: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <1 p @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 2048, preallocated-temp:
 value: <2 a @0> (size=1024,offset=0): f32[4,32]{1,0:T(8,128)}
 value: <3 pair{} @0> (size=16,offset=2032): (f32[16]{0}, /*index=1*/s32[])
 value: <4 pair{0} @0> (size=64,offset=1024): f32[16]{0}
 value: <5 b (phi) @0> (size=1024,offset=0): f32[4,32]{1,0:T(8,128)}
allocation 2: size 96, color 1, preallocated-temp:
 value: <6 chip{1,2} @1> (size=96,offset=0): bf16[48]{0:T(8)S(1)}

Total bytes used: 2208 (2.2KiB)

HloLiveRange (max 3):
  InstructionSequence:
    0:p
    1:a
    2:pair
    3:b
  BufferLiveRange:
    p{}:0-4
    a{}:1-3
    pair{}:2-2
    pair{0}:2-3
    b{}:3-4
    chip{1,2}:1-2
  Live ranges at 2 (peak):
    a{}: 1024 bytes (cumulative: 1024 bytes)
"""
MODULE = hlo.parse(
    """HloModule f

ENTRY %main (p: f32[16]) -> f32[4,32] {
  %p = f32[16]{0} parameter(0), metadata={op_name="x"}
  %a = f32[4,32]{1,0} broadcast(%p), dimensions={0}, \
metadata={op_name="jit(f)/mul" source_file="/home/me/model.py" source_line=7}
  %pair = (f32[16]{0}, s32[]) custom-call(%p), custom_call_target="other"
  ROOT %b = f32[4,32]{1,0} negate(%a), \
metadata={op_name="jit(f)/neg" source_file="/home/me/model.py" source_line=8}
}
"""
)


def attribute_text(text: str, module: hlo.Module, temp_bytes: int) -> Attribution:
    return attribute(read_buffers(text), module, temp_bytes)


def test_allocations_values_and_ranges() -> None:
    found = read_buffers(TEXT)
    assert [(part.bytes, part.color, part.is_temp) for part in found.allocations] == [
        (64, 0, False),
        (2048, 0, True),
        (96, 1, True),
    ]
    assert [part.number for part in found.heap] == [1]
    assert found.schedule == {0: "p", 1: "a", 2: "pair", 3: "b"}
    a, table, element, b = found.heap[0].values
    assert (a.name, a.index, a.bytes, a.offset, a.first, a.last) == ("a", (), 1024, 0, 1, 3)
    assert (a.shape, a.array_bytes) == ("f32[4,32]", 512)
    assert (table.is_table, table.shape, table.array_bytes) == (True, "tuple of 2", 16)
    assert (element.index, element.last) == ((0,), 3)
    assert (b.name, b.first) == ("b", 3)
    assert found.allocations[2].values[0].index == (1, 2)


def test_a_text_without_allocations() -> None:
    with pytest.raises(ValueError, match="no allocation in a text that begins with 'nothing'"):
        read_buffers("nothing")


def test_a_value_without_a_live_range_never_lives() -> None:
    found = attribute_text(TEXT.replace("    a{}:1-3\n", ""), MODULE, 2144)
    assert found is not None
    assert "a" not in {row.name for row in found.buffers}


def test_the_rows_of_the_peak() -> None:
    """Position 2 holds a, pair and its element; b at 3 lives where a does and adds nothing."""
    found = attribute_text(TEXT, MODULE, 2150)
    assert found is not None
    assert (found.heap_bytes, found.peak_position, found.positions) == (2048, 2, 4)
    rows = {row.name: (row.bytes, row.role) for row in found.buffers}
    assert rows["tables of tuples, above all arrays"] == (2048 - 1088 - 16, "fragmentation")
    assert rows["a"] == (512, "activation")
    assert rows["padding of a"] == (512, "padding")
    assert rows["pair"] == (16, "other")
    assert sum(size for size, _ in rows.values()) == 2048
    assert [(row.name, row.bytes) for row in found.other] == [
        ("memory space 1, on a TPU the on-chip memory", 96),
        ("in temp, in no allocation", 6),
    ]
    assert dict(found.timeline) == {1: 1024, 2: 1104, 3: 1088, 4: 1024, 5: 0}


def test_memory_of_the_host_is_no_part_of_temp() -> None:
    text = TEXT.replace("color 1", "color 5")
    found = attribute_text(text, MODULE, 2048)
    assert found is not None
    assert found.other == ()
    less = attribute_text(TEXT, MODULE, 2048)
    assert less is not None
    assert [(row.name, row.bytes) for row in less.other] == [
        ("in an allocation, not in temp", -96),
        ("memory space 1, on a TPU the on-chip memory", 96),
    ]


def test_bytes_that_two_values_share_count_once() -> None:
    text = TEXT.replace("    pair{}:2-2\n    pair{0}:2-3\n", "")
    found = attribute_text(text, MODULE, 2048)
    assert found is not None
    assert sum(row.bytes for row in found.buffers) == 2048
    held = [row.name for row in found.buffers if row.shape == "f32[4,32]"]
    assert held == ["a"]


def test_source_and_operation() -> None:
    found = attribute_text(TEXT, MODULE, 2048)
    assert found is not None
    rows = {row.name: row for row in found.buffers}
    assert rows["a"].source == rows["padding of a"].source == "/home/me/model.py:7"
    assert rows["a"].operation == "jit(f)/mul"
    assert rows["padding of a"].shape == ""


def test_a_long_timeline_is_thinned_and_keeps_the_peak() -> None:
    count, high = 5000, 3210
    values = "".join(
        f" value: <{n} v{n} @0> (size={64 if n == high else 32},offset=0): f32[8]{{0}}\n"
        for n in range(count)
    )
    order = "".join(f"    {n}:v{n}\n" for n in range(count))
    ranges = "".join(f"    v{n}{{}}:{n}-{n}\n" for n in range(count))
    text = f"allocation 0: size 64, preallocated-temp:\n{values}{order}{ranges}"
    found = attribute_text(text, MODULE, 64)
    assert found is not None
    assert len(found.timeline) <= MOST_POINTS
    assert found.peak_position == high
    assert (high, 64) in found.timeline
    assert list(found.timeline) == sorted(found.timeline)
    history = found.history
    assert history
    assert len(history.positions) <= MOST_POSITIONS
    assert history.totals()[history.positions.index(high)] == 64
    assert list(history.positions) == sorted(history.positions)


def test_a_history_has_what_lives_at_each_position() -> None:
    found = attribute_text(TEXT, MODULE, 2208)
    history = found.history
    assert history
    assert dict(zip(history.positions, history.totals(), strict=True)) == dict(found.timeline)
    peak = history.positions.index(found.peak_position)
    of_roles = dict(zip(history.roles, history.bytes[peak], strict=True))
    fragmentation = {"fragmentation": found.by_role()["fragmentation"]}
    assert {role: size for role, size in of_roles.items() if size} | fragmentation == (
        found.by_role()
    )
    for held, sizes in zip(history.largest, history.bytes, strict=True):
        assert sum(size for _, size in held) == sum(sizes), "there are no more than a few"


def test_a_buffer_has_its_call_stack() -> None:
    tables = (
        'FileNames\n1 "/home/me/model.py"\n\nFunctionNames\n1 "layer"\n2 "step"\n\n'
        "FileLocations\n1 {file_name_id=1 function_name_id=2 line=9}\n"
        "2 {file_name_id=1 function_name_id=1 line=7}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n"
        "2 {file_location_id=2 parent_frame_id=2}\n\n"
    )
    text = (
        f"HloModule f\n\n{tables}"
        "ENTRY %main (p: f32[16]) -> f32[4,32] {\n  %p = f32[16]{0} parameter(0)\n"
        "  %a = f32[4,32]{1,0} broadcast(%p), dimensions={0}, "
        'metadata={op_name="jit(f)/mul" stack_frame_id=2}\n'
        "  ROOT %b = f32[4,32]{1,0} negate(%a), "
        'metadata={op_name="jit(f)/neg" stack_frame_id=1}\n}\n'
    )
    found = attribute_text(TEXT, hlo.parse(text), 2208)
    (made,) = (row for row in found.buffers if row.name == "a")
    called = [(call.file, call.line, call.function) for call in found.stack(made.call)]
    assert called == [("/home/me/model.py", 7, "layer"), ("/home/me/model.py", 9, "step")]
    assert found.stack(None) == []


def buffer(**changes: Any) -> Buffer:
    row = Buffer(
        name="x",
        bytes=8,
        shape="f32[2]",
        operation="jit(f)/while/body/add",
        source="/m.py:3",
        role="activation",
        first=0,
        last=1,
    )
    return dataclasses.replace(row, **changes)


def heap(*rows: Buffer) -> Attribution:
    total = sum(row.bytes for row in rows)
    return Attribution(
        heap_bytes=total, temp_bytes=total, peak_position=0, buffers=rows, other=(), timeline=()
    )


def changes(a: Attribution, b: Attribution) -> list[tuple[int, int, str | None]]:
    return [(row.a_bytes, row.b_bytes, row.source) for row in difference(a, b)]


def test_equal_buffers_are_summed_and_unchanged_ones_left_out() -> None:
    a = heap(buffer(), buffer(), buffer(shape="f32[1]", bytes=4))
    b = heap(buffer(), buffer(), buffer(), buffer(shape="f32[1]", bytes=4, name="other"))
    assert changes(a, b) == [(16, 24, "/m.py:3")]


def test_the_name_of_the_jitted_function_makes_no_difference() -> None:
    assert changes(heap(buffer()), heap(buffer(operation="jit(g)/while/body/add"))) == []


@pytest.mark.parametrize(
    "moved",
    [
        {"operation": "jit(f)/while/body/checkpoint/rematted_computation/add"},
        {"source": "/m.py:30"},
    ],
)
def test_what_only_moved_is_no_change(moved: dict[str, str]) -> None:
    assert changes(heap(buffer()), heap(buffer(**moved))) == []
    grown = heap(buffer(**moved), buffer(**moved))
    assert changes(heap(buffer()), grown) == [(8, 16, moved.get("source", "/m.py:3"))]


def test_a_pair_says_what_it_is_on_each_side() -> None:
    """Whichever is the larger one, and by whatever the two were paired."""
    moved = buffer(source="/m.py:30", bytes=12)
    for a, b in ((buffer(), moved), (moved, buffer())):
        (row,) = difference(heap(a), heap(b))
        assert [side.source for side in row.sides] == [a.source, b.source]
        assert difference_row(row).source == f"{a.source} → {b.source}"
    kept = buffer(role="saved residual", operation="jit(f)/jvp()/while/body/add", bytes=12)
    (row,) = difference(heap(buffer()), heap(kept))
    assert difference_row(row).role == "activation → saved residual"
    assert difference_row(row).source == "/m.py:3"


def test_buffers_of_two_roles_on_one_line_are_two_rows() -> None:
    rows = difference(heap(), heap(buffer(), buffer(role="logits")))
    assert sorted((row.b_bytes, row.role) for row in rows) == [(8, "activation"), (8, "logits")]


def test_the_largest_change_comes_first_whatever_its_sign() -> None:
    a = heap(buffer(bytes=100, shape="f32[25]"), buffer())
    b = heap(buffer(bytes=50, shape="f32[12]", role="logits"))
    assert changes(a, b) == [(100, 0, "/m.py:3"), (0, 50, "/m.py:3"), (8, 0, "/m.py:3")]


BUFFERS = st.lists(
    st.builds(
        buffer,
        bytes=st.integers(1, 1000),
        shape=st.sampled_from(["f32[2]", "f32[3]", ""]),
        operation=st.sampled_from(["jit(f)/add", "jit(g)/add", "jit(f)/jvp()/mul", "w"]),
        source=st.sampled_from(["/m.py:1", "/m.py:2", None]),
        role=st.sampled_from(ROLES),
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(BUFFERS, BUFFERS)
def test_changes_sum_to_the_difference_of_the_heaps(one: list[Buffer], other: list[Buffer]) -> None:
    a, b = heap(*one), heap(*other)
    rows = difference(a, b)
    assert sum(row.change for row in rows) == b.heap_bytes - a.heap_bytes
    sizes = [abs(row.change) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert difference(a, a) == ()


def test_totals_by_role_are_those_of_the_rows() -> None:
    found = heap(buffer(), buffer(role="logits", bytes=20), buffer())
    assert list(found.by_role().items()) == [("logits", 20), ("activation", 16)]
    assert found.to_json()["by_role"] == found.by_role()
    assert found.to_json()["buffers"][0]["source"] == "/m.py:3"
