"""The schedule as arithmetic: who does what when, and where microbatches wait meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nnx_pipeline import InputError
from nnx_pipeline.pipeline import SCHEDULES, CircularSchedule
from nnx_pipeline.pipeline.draw import summary, timetable


@st.composite
def schedules(draw: st.DrawFn) -> CircularSchedule:
    stages, repeats, delay = (draw(st.integers(1, most)) for most in (6, 4, 2))
    return CircularSchedule(stages, stages * draw(st.integers(delay, 5)), repeats, delay)


@given(schedules())
def test_every_work_is_done_once_and_in_order(schedule: CircularSchedule) -> None:
    done: dict[tuple[int, int, int], int] = {}
    for tick, row in enumerate(schedule.rows()):
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
    rows = list(schedule.rows())
    assert len(rows) == schedule.ticks
    bubble = schedule.delay * (schedule.stages - 1)
    assert schedule.ticks == schedule.microbatches * schedule.repeats + bubble
    for stage in range(schedule.stages):
        assert sum(row[stage] is None for row in rows) == schedule.bubble_ticks
    idle = sum(work is None for row in rows for work in row)
    assert schedule.bubble_share == pytest.approx(idle / (len(rows) * schedule.stages))


@given(schedules())
def test_nothing_outside_the_timetable(schedule: CircularSchedule) -> None:
    for stage in range(schedule.stages):
        assert schedule.work(-1, stage) is None
        assert schedule.work(schedule.ticks, stage) is None


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
    for tick, row in enumerate(schedule.rows()):
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
    work = schedule.work(schedule.first_output_tick, schedule.stages - 1)
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
        ((0, 1, 1), "stages=0 must be 1 or more"),
        ((1, 0, 1), "microbatches=0 must be 1 or more"),
        ((1, 1, -1), "repeats=-1 must be 1 or more"),
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


def drawn(schedule: CircularSchedule, **options: int) -> list[list[str]]:
    console = Console(width=400, color_system=None)
    with console.capture() as capture:
        console.print(timetable(schedule, **options))
    return [line.split() for line in capture.get().splitlines()]


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
    text = summary(SCHEDULES["circular"](stages=4, microbatches=8, repeats=2))
    assert text == (
        "4 stages, 8 microbatches, 2 repeats: 19 ticks, 3 of them idle on each stage (bubble 15.8%)"
    )
