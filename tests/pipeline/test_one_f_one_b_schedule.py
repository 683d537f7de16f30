"""The timetable of 1F1B, plain and interleaved, by what any pipeline must keep to."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.pipeline import CircularSchedule, OneForwardOneBackward
from nnx_pipeline.pipeline.schedule import Visits

Visit = tuple[int, int, int]  # microbatch, repeat, stage


@st.composite
def schedules(draw: st.DrawFn, most_repeats: int = 4) -> OneForwardOneBackward:
    stages = draw(st.integers(1, 6))
    microbatches = stages * draw(st.integers(1, 5))
    return OneForwardOneBackward(stages, microbatches, draw(st.integers(1, most_repeats)))


def when(schedule: OneForwardOneBackward, direction: str) -> dict[Visit, int]:
    """The tick of each visit; each is made only once."""
    done: dict[Visit, int] = {}
    visits: Visits = getattr(schedule, direction)
    assert visits.active.shape == (schedule.ticks, schedule.stages)
    for tick, stage in itertools.product(range(schedule.ticks), range(schedule.stages)):
        work = visits.at(tick, stage)
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
    """The bookkeeping of the loop with names in the place of arrays.

    In a bubble something else is written, and something that was written is read.
    """
    written, read = schedule.written, schedule.read
    filling, both, _ = schedule.phases
    for stage in range(schedule.stages):
        ring: dict[int, object] = {}
        for tick in range(schedule.ticks):
            if tick < both.stop:
                ring[written[tick, stage]] = schedule.forward.at(tick, stage) or "bubble"
            back = schedule.backward.at(tick, stage)
            if tick >= filling.stop:
                assert ring[read[tick, stage]] == back if back else read[tick, stage] in ring


@given(schedules())
def test_the_ring_has_as_many_slots_as_the_first_stage_needs(
    schedule: OneForwardOneBackward,
) -> None:
    forward, backward = when(schedule, "forward"), when(schedule, "backward")
    spans = [(forward[visit], backward[visit]) for visit in forward if visit[2] == 0]
    kept = [sum(a <= tick <= b for a, b in spans) for tick in range(schedule.ticks)]
    # After its last visit a stage writes what bubbles give, until the last stage has made its own.
    last = schedule.visits + schedule.stages - 1
    kept[schedule.visits : last] = [number + 1 for number in kept[schedule.visits : last]]
    assert schedule.ring_slots == max(kept)
    assert schedule.ring_slots <= schedule.stages * (schedule.repeats + 1) - 1


@given(schedules())
def test_phases(schedule: OneForwardOneBackward) -> None:
    """They follow each other without a gap, and hold all the work there is."""
    filling, both, draining = schedule.phases
    assert [*filling, *both, *draining] == list(range(schedule.ticks))
    stages, repeats = schedule.stages, schedule.repeats
    assert schedule.ticks == schedule.microbatches * repeats + stages * (repeats + 1) - 2
    assert set(when(schedule, "forward").values()) == {*filling, *both}
    assert set(when(schedule, "backward").values()) == {*both, *draining}


@given(schedules())
def test_the_bubble_is_that_of_the_circular_schedule(schedule: OneForwardOneBackward) -> None:
    """Idle is a stage without work of a kind that others do in that phase."""
    filling, both, draining = schedule.phases
    forward = schedule.forward.active[filling.start : both.stop]
    backward = schedule.backward.active[both.start : draining.stop]
    for cells in (forward, backward):
        assert np.sum(~cells) == schedule.stages * schedule.bubble_ticks
        assert schedule.bubble_share == pytest.approx(np.mean(~cells))
    circular = CircularSchedule(schedule.stages, schedule.microbatches, schedule.repeats)
    assert schedule.bubble_share == circular.bubble_share


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 1), "stages=0 is not a whole number of 1 or more"),
        ((2, 0), "microbatches=0 is not a whole number of 1 or more"),
        ((2, 2, 0), "repeats=0 is not a whole number of 1 or more"),
        ((4, 6), "6 microbatches do not split over 4 stages; choose a multiple of 4"),
    ],
)
def test_numbers_that_make_no_schedule(numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError) as error:
        OneForwardOneBackward(*numbers)
    assert message in str(error.value)
