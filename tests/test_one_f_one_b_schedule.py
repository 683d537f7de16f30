"""The timetable of 1F1B, plain and interleaved, by what any pipeline must keep to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline import CircularSchedule, OneForwardOneBackward

Visit = tuple[int, int, int]  # microbatch, repeat, stage


@st.composite
def schedules(draw: st.DrawFn, most_repeats: int = 4) -> OneForwardOneBackward:
    stages = draw(st.integers(1, 6))
    microbatches = stages * draw(st.integers(1, 5))
    return OneForwardOneBackward(stages, microbatches, draw(st.integers(1, most_repeats)))


def when(schedule: OneForwardOneBackward, direction: str) -> dict[Visit, int]:
    """The tick of each visit; each is made only once."""
    done: dict[Visit, int] = {}
    for tick, row in enumerate(getattr(schedule, f"{direction}_rows")()):
        assert len(row) == schedule.stages
        for stage, work in enumerate(row):
            if work is not None:
                visit = (work.microbatch, work.repeat, stage)
                assert visit not in done
                done[visit] = tick
    return done


def before(schedule: OneForwardOneBackward, visit: Visit) -> Visit | None:
    """The visit that a microbatch comes from."""
    microbatch, repeat, stage = visit
    if stage:
        return microbatch, repeat, stage - 1
    return (microbatch, repeat - 1, schedule.stages - 1) if repeat else None


@given(schedules())
def test_every_visit_is_made_once_forward_and_once_back(schedule: OneForwardOneBackward) -> None:
    """A microbatch travels one stage per tick without a rest, and back on the way it came."""
    forward, backward = when(schedule, "forward"), when(schedule, "backward")
    visits = {
        (m, r, s)
        for m in range(schedule.microbatches)
        for r in range(schedule.repeats)
        for s in range(schedule.stages)
    }
    assert set(forward) == set(backward) == visits
    for visit in visits:
        previous = before(schedule, visit)
        if previous is not None:
            assert forward[visit] == forward[previous] + 1
            assert backward[previous] == backward[visit] + 1
        _, repeat, stage = visit
        kept = 2 * (schedule.stages * (schedule.repeats - repeat) - stage) - 1
        assert backward[visit] - forward[visit] == kept - 1
        assert kept <= schedule.ring_slots


@given(schedules(most_repeats=1))
def test_with_one_repeat_it_is_the_textbook(schedule: OneForwardOneBackward) -> None:
    stages = schedule.stages
    for (microbatch, _, stage), tick in when(schedule, "forward").items():
        assert tick == microbatch + stage
    for (microbatch, _, stage), tick in when(schedule, "backward").items():
        assert tick == microbatch + 2 * (stages - 1) - stage
    assert schedule.ticks == schedule.microbatches + 2 * (stages - 1)


@given(schedules())
def test_no_slot_of_the_ring_is_overwritten_while_in_use(schedule: OneForwardOneBackward) -> None:
    """The bookkeeping of the loop with names in the place of arrays."""
    most = 0
    for stage in range(schedule.stages):
        ring: dict[int, tuple[int, int]] = {}
        for tick in range(schedule.ticks):
            work, back = schedule.forward(tick, stage), schedule.backward(tick, stage)
            if work is not None:
                slot = tick % schedule.ring_slots
                assert slot not in ring
                ring[slot] = (work.microbatch, work.repeat)
            most = max(most, len(ring))
            if back is not None:
                slot = schedule.forwarded_at(back, stage) % schedule.ring_slots
                assert ring.pop(slot) == (back.microbatch, back.repeat)
        assert not ring
    if schedule.repeats == 1:  # enough, and with microbatches enough not one too many
        assert most == min(schedule.ring_slots, schedule.microbatches)


@given(schedules())
def test_phases(schedule: OneForwardOneBackward) -> None:
    """They follow each other without a gap, and hold all the work there is."""
    filling, both, draining = schedule.phases
    assert [*filling, *both, *draining] == list(range(schedule.ticks))
    stages, repeats = schedule.stages, schedule.repeats
    assert schedule.ticks == schedule.microbatches * repeats + stages * (repeats + 1) - 2
    assert set(when(schedule, "forward").values()) == {*filling, *both}
    assert set(when(schedule, "backward").values()) == {*both, *draining}
    for stage in range(stages):
        for tick in (-1, schedule.ticks):
            assert schedule.forward(tick, stage) is schedule.backward(tick, stage) is None


@given(schedules())
def test_the_bubble_is_that_of_the_circular_schedule(schedule: OneForwardOneBackward) -> None:
    """Idle is a stage without work of a kind that others do in that phase."""
    filling, both, draining = schedule.phases
    forward = [schedule.forward(t, s) for t in (*filling, *both) for s in range(schedule.stages)]
    backward = [schedule.backward(t, s) for t in (*both, *draining) for s in range(schedule.stages)]
    for cells in (forward, backward):
        assert cells.count(None) == schedule.stages * schedule.bubble_ticks
        assert schedule.bubble_share == pytest.approx(cells.count(None) / len(cells))
    circular = CircularSchedule(schedule.stages, schedule.microbatches, schedule.repeats)
    assert schedule.bubble_share == circular.bubble_share


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 1), "stages=0 must be 1 or more"),
        ((2, 0), "microbatches=0 must be 1 or more"),
        ((2, 2, 0), "repeats=0 must be 1 or more"),
        ((4, 6), "6 microbatches do not split over 4 stages; choose a multiple of 4"),
    ],
)
def test_numbers_that_make_no_schedule(numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError) as error:
        OneForwardOneBackward(*numbers)
    assert message in str(error.value)
