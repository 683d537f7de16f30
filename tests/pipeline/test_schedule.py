"""The schedule as arithmetic: who does what when, and where microbatches wait meanwhile."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nnx_pipeline import InputError
from nnx_pipeline.pipeline import (
    SCHEDULE_NAMES,
    CircularSchedule,
    OneForwardOneBackward,
    make_schedule,
)
from nnx_pipeline.pipeline._timetable.figure import make_figure, write_picture
from nnx_pipeline.pipeline._timetable.text import Timetable, legend, summary
from nnx_pipeline.pipeline.schedule import Schedule, ScheduledVisit, Visits


@st.composite
def schedules(draw: st.DrawFn) -> CircularSchedule:
    stages, repeats, delay = (draw(st.integers(1, most)) for most in (6, 4, 2))
    return CircularSchedule(stages, stages * draw(st.integers(delay, 5)), repeats, delay)


def rows(visits: Visits) -> list[list[ScheduledVisit | None]]:
    """For each tick the work of every stage."""
    ticks, stages = visits.active.shape
    return [[visits.at(tick, stage) for stage in range(stages)] for tick in range(ticks)]


@given(schedules())
def test_every_work_is_done_once_and_in_order(schedule: CircularSchedule) -> None:
    done: dict[tuple[int, int, int], int] = {}
    for tick, row in enumerate(rows(schedule.visits)):
        assert len(row) == schedule.stages
        for stage, work in enumerate(row):
            if work is not None:
                key = (work.microbatch, work.repeat, stage)
                assert key not in done
                done[key] = tick
    assert set(done) == {
        (m, r, s)
        for m in range(schedule.microbatches)
        for r in range(schedule.repeats)
        for s in range(schedule.stages)
    }
    for (m, r, s), tick in done.items():
        if s:
            assert tick == done[m, r, s - 1] + schedule.delay  # it arrives from the stage before
        elif r:
            assert tick >= done[m, r - 1, schedule.stages - 1] + schedule.delay
        if m:
            assert tick > done[m - 1, r, s]


@given(schedules())
def test_length_and_bubble(schedule: CircularSchedule) -> None:
    table = rows(schedule.visits)
    assert len(table) == schedule.ticks
    bubble = schedule.delay * (schedule.stages - 1)
    assert schedule.ticks == schedule.microbatches * schedule.repeats + bubble
    for stage in range(schedule.stages):
        assert sum(row[stage] is None for row in table) == schedule.bubble_ticks
    idle = sum(work is None for row in table for work in row)
    assert schedule.bubble_share == pytest.approx(idle / (len(table) * schedule.stages))


class Belt:
    """Slots of every stage; a slot moves one stage towards stage 0, the last stage fills up."""

    def __init__(self, slots: list[list[object]]) -> None:
        self.slots = slots  # [stage][slot]

    def take(self, slot: int) -> object:
        return self.slots[0][slot]

    def push(self, slot: int, new: object) -> None:
        column = [stage[slot] for stage in self.slots]
        for stage, item in zip(self.slots, [*column[1:], new], strict=True):
            stage[slot] = item


@given(schedules())
def test_slots_bring_the_right_microbatch_to_stage_0(schedule: CircularSchedule) -> None:
    """The bookkeeping of the loop with names in the place of arrays."""
    stages, slots = schedule.stages, schedule.stream_slots
    stream = Belt([[("in", s * slots + k) for k in range(slots)] for s in range(stages)])
    queue = Belt([["empty"] * schedule.queue_slots for _ in range(stages)])
    given = [["empty"] * stages] * schedule.delay  # the last ticks, the oldest first
    for tick, row in enumerate(rows(schedule.visits)):
        arriving = given.pop(0)
        returning, stream_slot = arriving[-1], tick % slots
        if schedule.queue_slots:
            queue_slot = tick % schedule.queue_slots
            returning = queue.take(queue_slot)
            queue.push(queue_slot, arriving[-1])
        entering = stream.take(stream_slot) if tick < schedule.microbatches else returning
        for stage, (work, found) in enumerate(zip(row, [entering, *arriving[:-1]], strict=True)):
            if work is not None and stage == 0 and work.repeat == 0:
                assert found == ("in", work.microbatch)
            elif work is not None:
                before = (work.repeat, stage - 1) if stage else (work.repeat - 1, stages - 1)
                assert found == ("made", work.microbatch, *before)
        made = [
            ("made", work.microbatch, work.repeat, stage) if work else "bubble"
            for stage, work in enumerate(row)
        ]
        given.append(made)
        stream.push(stream_slot, made[-1])
    for m in range(schedule.microbatches):
        stage, place = divmod(m, slots)
        slot = (schedule.first_output_tick + place) % slots
        assert stream.slots[stage][slot] == ("made", m, schedule.repeats - 1, stages - 1)


@given(schedules())
def test_the_first_output(schedule: CircularSchedule) -> None:
    work = schedule.visits.at(schedule.first_output_tick, schedule.stages - 1)
    assert work is not None
    assert (work.microbatch, work.repeat) == (0, schedule.repeats - 1)


def test_the_queue_is_no_larger_than_needed() -> None:
    assert CircularSchedule(4, 4, 2).queue_slots == 0
    assert CircularSchedule(4, 12, 1).queue_slots == 0
    assert CircularSchedule(4, 12, 2).queue_slots == 2
    assert CircularSchedule(4, 12, 2, 2).queue_slots == 1


def test_what_leaves_the_last_stage_is_taken_at_once() -> None:
    assert CircularSchedule(4, 4, 2).is_ring
    assert CircularSchedule(4, 8, 2, 2).is_ring
    assert not CircularSchedule(4, 8, 2).is_ring
    assert not CircularSchedule(4, 4, 1).is_ring


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 1, 1), "stages=0 is not a whole number of 1 or more"),
        ((1, 0, 1), "microbatches=0 is not a whole number of 1 or more"),
        ((1, 1, -1), "repeats=-1 is not a whole number of 1 or more"),
        ((4, 4, 1, 0), "forwarding delay=0 must be 1 or 2"),
        ((4, 8, 1, 3), "forwarding delay=3 must be 1 or 2"),
        ((4, 4, 1, 2), "too few for 4 stages with a forwarding delay of 2; choose 8 or more"),
        ((4, 6, 1), "6 microbatches do not split over 4 stages; choose a multiple of 4"),
    ],
)
def test_numbers_that_make_no_schedule(numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError) as error:
        CircularSchedule(*numbers)
    assert message in str(error.value)


@st.composite
def one_forward_one_backward(draw: st.DrawFn) -> OneForwardOneBackward:
    stages = draw(st.integers(1, 7))
    return OneForwardOneBackward(stages, stages * draw(st.integers(1, 5)), draw(st.integers(1, 3)))


# ---- by name -----------------------------------------------------------------------------------


def test_schedules_by_name() -> None:
    circular = make_schedule("circular", stages=2, microbatches=8, repeats=3, delay=2)
    assert circular == CircularSchedule(2, 8, 3, 2)
    assert make_schedule("1f1b", stages=2, microbatches=8) == OneForwardOneBackward(2, 8)
    assert make_schedule("1f1b", stages=2, microbatches=8, repeats=3) == OneForwardOneBackward(
        2, 8, 3
    )
    assert set(SCHEDULE_NAMES) == {"circular", "1f1b"}


@pytest.mark.parametrize(
    ("name", "numbers", "parts"),
    [
        (
            "1f1b",
            {"delay": 2},
            (
                "does not support",
                "delay=2: the next stage uses an output at the next tick",
                "choose delay=1 or schedule=circular",
            ),
        ),
        ("1f1c", {}, ("schedule='1f1c'", "did you mean '1f1b'?")),
        ("zigzag", {}, ("schedule='zigzag'", "choose one of: circular, 1f1b")),
    ],
)
def test_a_name_or_numbers_that_make_no_schedule(
    name: str, numbers: dict[str, int], parts: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as error:
        make_schedule(name, stages=2, microbatches=4, **numbers)
    assert all(part in str(error.value) for part in parts)


@given(st.one_of(schedules(), one_forward_one_backward()))
def test_json_of_a_schedule(schedule: Schedule) -> None:
    """It says all that is needed to make the schedule again, and its timetable."""
    result = schedule.to_json()
    numbers = {key: result[key] for key in ("stages", "microbatches", "repeats", "delay")}
    assert make_schedule(result["schedule"], **numbers) == schedule
    tables = [result["timetable"]]
    if isinstance(schedule, OneForwardOneBackward):
        tables.append(result["backward_timetable"])
        starts, stops = zip(*result["phases"].values(), strict=True)
        assert (starts[0], *stops) == (0, *starts[1:], schedule.ticks)
        assert result["ring_slots"] == schedule.ring_slots
    for table in tables:
        assert len(table) == result["ticks"]
        done = [tuple(cell) for row in table for cell in row if cell is not None]
        assert len(done) == result["stages"] * result["microbatches"] * result["repeats"]


# ---- text --------------------------------------------------------------------------------------


def lines(schedule: Schedule, *, width: int = 400, **options: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(Timetable(schedule, **options))
    return capture.get().splitlines()


def drawn(schedule: Schedule, **options: int) -> list[list[str]]:
    return [line.split() for line in lines(schedule, **options)]


def test_drawing() -> None:
    assert drawn(CircularSchedule(2, 2, 2)) == [
        ["stage", "0", "1", "2", "3", "4"],
        ["0", "0a", "1a", "0b", "1b", "·"],
        ["1", "·", "0a", "1a", "0b", "1b"],
    ]
    assert drawn(CircularSchedule(3, 3))[1:] == [
        ["0", "0", "1", "2", "·", "·"],
        ["1", "·", "0", "1", "2", "·"],
        ["2", "·", "·", "0", "1", "2"],
    ]


def test_drawing_leaves_out_the_middle() -> None:
    rows = drawn(CircularSchedule(2, 100), most=6)
    assert rows[0] == ["stage", "0", "1", "2", "…", "98", "99", "100"]
    assert rows[1] == ["0", "0", "1", "2", "…", "98", "99", "·"]


def test_letters_after_z() -> None:
    assert drawn(CircularSchedule(1, 1, 28))[1][-3:] == ["0z", "0aa", "0ab"]


def test_summary_in_one_line() -> None:
    text = summary(CircularSchedule(stages=4, microbatches=8, repeats=2))
    assert text == (
        "4 stages, 8 microbatches, 2 repeats: 19 ticks, 3 of them idle on each stage (bubble 15.8%)"
    )


def test_drawing_one_forward_one_backward() -> None:
    shown = lines(OneForwardOneBackward(3, 3))
    assert [line.rstrip() for line in shown] == [
        "stage  0  1 │  2  3  4 │  5  6",
        "phase  F  F │ FB FB FB │  B  B",
        "0     F0 F1 │ F2  ·  · │",
        "            │  ·  · B0 │ B1 B2",
        "1      · F0 │ F1 F2  · │",
        "            │  · B0 B1 │ B2  ·",
        "2      ·  · │ F0 F1 F2 │",
        "            │ B0 B1 B2 │  ·  ·",
    ]


def test_a_single_stage_has_one_phase() -> None:
    assert drawn(OneForwardOneBackward(1, 2)) == [
        ["stage", "0", "1"],
        ["phase", "FB", "FB"],
        ["0", "F0", "F1"],
        ["B0", "B1"],
    ]


@given(st.one_of(schedules(), one_forward_one_backward()), st.integers(40, 120))
def test_a_narrow_console_shows_fewer_ticks_in_full(schedule: Schedule, width: int) -> None:
    """The middle is left out, rather than the ends of all the numbers."""
    header, *rows = lines(schedule, width=width)
    assert max(map(len, (header, *rows))) <= width
    ticks = [int(word) for word in header.split() if word.isdigit()]
    assert (ticks[0], ticks[-1]) == (0, schedule.ticks - 1)
    assert (len(ticks) == schedule.ticks) != ("…" in header)
    if "…" in header:
        assert all(line.count("…") == 1 for line in rows)
        assert len(header) > width / 2  # and no more of it than must be


def test_summary_of_one_forward_one_backward() -> None:
    text = summary(OneForwardOneBackward(4, 8))
    assert text == (
        "4 stages, 8 microbatches, one forward one backward: 14 ticks = 8 + 2 · 3 "
        "(bubble 27.3%), ring slots per stage: 7 (microbatches kept at most)"
    )


def test_drawing_interleaved_one_forward_one_backward() -> None:
    """Two stages, two microbatches, two repeats: 2 · 2 + 2 · 3 - 2 ticks."""
    shown = lines(OneForwardOneBackward(2, 2, 2))
    assert [line.rstrip() for line in shown] == [
        "stage   0   1   2 │   3   4 │   5   6   7",
        "phase   F   F   F │  FB  FB │   B   B   B",
        "0     F0a F1a F0b │ F1b   · │",
        "                  │   · B0b │ B1b B0a B1a",
        "1       · F0a F1a │ F0b F1b │",
        "                  │ B0b B1b │ B0a B1a   ·",
    ]
    text = summary(OneForwardOneBackward(4, 8, 2))
    assert text == (
        "4 stages, 8 microbatches, 2 repeats, interleaved one forward one backward: "
        "26 ticks = 8 · 2 + 4 · 3 - 2 (bubble 15.8%), ring slots per stage: 11 "
        "(visits kept at most)"
    )
    assert "F3b: microbatch 3 forward in its second repeat" in legend(
        OneForwardOneBackward(4, 8, 2)
    )


def test_legend_in_one_line() -> None:
    assert legend(CircularSchedule(4, 8)) == "3: microbatch 3; ·: bubble"
    assert legend(CircularSchedule(1, 1)) == "0: microbatch 0; ·: bubble"
    assert "3b: microbatch 3 in its second repeat" in legend(CircularSchedule(4, 8, 2))
    text = legend(OneForwardOneBackward(4, 8))
    assert "F3: microbatch 3 forward; B1: microbatch 1 backward; ·: bubble" in text
    assert text.endswith("F forward only (0–2), FB both (3–10), B backward only (11–13)")


# ---- picture -----------------------------------------------------------------------------------


def words(path: Path) -> list[str]:
    """What is written in an SVG."""
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_picture_of_the_circular_schedule(tmp_path: Path) -> None:
    path = tmp_path / "circular.svg"
    write_picture(CircularSchedule(4, 8, 2), str(path))
    found = words(path)
    assert {"stage", "repeat 0", "repeat 1", "bubble"} <= set(found)
    assert any(word.startswith("tick") for word in found)
    assert " ".join(found).count("19 ticks, 3 of them idle on each stage (bubble 15.8%)") == 1
    # Once in each repeat on each stage, as a number of a tick, and up to 3 of a stage.
    assert (found.count("7"), found.count("3")) == (4 * 2 + 1, 4 * 2 + 2)


def test_picture_of_one_forward_one_backward(tmp_path: Path) -> None:
    path = tmp_path / "1f1b.svg"
    write_picture(OneForwardOneBackward(4, 8), str(path))
    found = words(path)
    assert {"forward only", "both", "backward only", "bubble", "stage"} <= set(found)
    assert {"forward (upper half)", "backward (lower half)"} <= set(found)
    assert any("14 ticks = 8 + 2 · 3" in word for word in found)
    assert found.count("7") == 4 * 2 + 1


def test_png(tmp_path: Path) -> None:
    path = tmp_path / "schedule.PNG"
    write_picture(CircularSchedule(16, 64, 16), str(path))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert 500 <= height <= width <= 4000
    assert list(tmp_path.iterdir()) == [path]


def test_a_large_picture_names_the_first_and_the_last(tmp_path: Path) -> None:
    """Single ticks cannot be read any more, what each stage does in a repeat can."""
    path = tmp_path / "large.svg"
    write_picture(CircularSchedule(16, 64, 16), str(path))
    assert words(path).count("0–63") == 16 * 16


def test_the_same_timetable_gives_the_same_picture(tmp_path: Path) -> None:
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in (one, two):
        write_picture(OneForwardOneBackward(2, 4), str(path))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    "schedule",
    [
        CircularSchedule(1, 1),
        CircularSchedule(2, 4, 100, 2),
        OneForwardOneBackward(1, 1),
        OneForwardOneBackward(2, 300),
        OneForwardOneBackward(80, 80),
    ],
    ids=str,
)
def test_every_word_of_a_picture_lies_inside(schedule: Schedule) -> None:
    figure = make_figure(schedule)
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.texts] == [figure.get_suptitle()]
    around = [*figure.texts, *figure.axes[0].texts, *figure.legends[0].texts]
    for text in around:
        box = text.get_window_extent()
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1


def test_a_picture_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither half a file nor a change to the one that was there."""
    from matplotlib.figure import Figure

    def fail(self: object, file: object, **options: object) -> None:
        file.write(b"half a picture")
        raise OSError("the disk is full")

    path = tmp_path / "schedule.png"
    path.write_bytes(b"an older picture")
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_picture(CircularSchedule(2, 2), str(path))
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"an older picture"


@pytest.mark.parametrize("name", ["schedule.pdf", "schedule", "-", ".png"])
def test_a_name_that_is_no_picture(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        InputError, match=re.escape("the name of a picture must end in .png or .svg")
    ):
        write_picture(CircularSchedule(2, 2), str(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=re.escape("pip install 'nnx-pipeline[report]'")):
        write_picture(CircularSchedule(2, 2), str(tmp_path / "x.png"))
    assert not list(tmp_path.iterdir())
