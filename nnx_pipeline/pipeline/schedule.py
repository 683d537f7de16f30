"""Schedules: what each stage does at each tick, in integers and numpy arrays, without JAX."""

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from nnx_pipeline.lab.errors import InputError, counted, divides, do_not_split, one_of, whole


class ScheduledVisit(NamedTuple):
    """One visit: a stage applies its layers of `repeat` to `microbatch`."""

    microbatch: int
    repeat: int


class Visits(NamedTuple):
    """The visits of all stages as arrays `[ticks, stages]`; in a bubble the numbers are 0."""

    microbatch: np.ndarray  # int32
    repeat: np.ndarray  # int32
    active: np.ndarray  # bool, False in a bubble

    def at(self, tick: int, stage: int) -> ScheduledVisit | None:
        """What a stage does at a tick; None in a bubble."""
        if not self.active[tick, stage]:
            return None
        return ScheduledVisit(int(self.microbatch[tick, stage]), int(self.repeat[tick, stage]))

    def to_json(self) -> list[list[list[int] | None]]:
        """`[microbatch, repeat]` by tick and stage, null in a bubble."""
        pairs = np.stack([self.microbatch, self.repeat], axis=-1).tolist()
        return [
            [pair if there else None for pair, there in zip(*row, strict=True)]
            for row in zip(pairs, self.active.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class CircularSchedule:
    """The circular schedule: every microbatch passes all S stages, R times over.

    - `stages`, `microbatches`: their numbers S and M.
    - `repeats`: how often a microbatch passes all stages, R; with 1 it is the plain pipeline.
    - `delay`: ticks until the output of a stage reaches the next one, 1 or 2. With 2 the transfer
      of one tick overlaps with the work of the next.

    At tick t stage s is at its own time t - delay · s. At time k it works on microbatch k mod M in
    repeat k // M: the M microbatches of a repeat follow each other without a gap, and the pipeline
    fills and drains once. That takes M · R + delay · (S - 1) ticks, of which the second term is a
    bubble on every stage.

    Raises InputError unless the microbatches are a multiple of the stages, and delay · S or more.
    """

    stages: int
    microbatches: int
    repeats: int = 1
    delay: int = 1

    def __post_init__(self) -> None:
        _check_counts(self)
        if self.delay not in (1, 2):
            raise InputError(f"forwarding delay={self.delay} must be 1 or 2")
        if self.microbatches < self.delay * self.stages:
            raise InputError(
                f"microbatches={self.microbatches} is too few for {counted(self.stages, 'stage')} "
                f"with a forwarding delay of {self.delay}; choose "
                f"{self.delay * self.stages} or more"
            )

    @property
    def ticks(self) -> int:
        return self.microbatches * self.repeats + self.bubble_ticks

    @property
    def bubble_ticks(self) -> int:
        """Ticks in which a stage is idle, the same for every stage."""
        return self.delay * (self.stages - 1)

    @property
    def bubble_share(self) -> float:
        """The fraction of ticks in which a stage is idle, between 0 and 1."""
        return self.bubble_ticks / self.ticks

    @functools.cached_property
    def visits(self) -> Visits:
        time = np.arange(self.ticks)[:, None] - self.delay * np.arange(self.stages)
        repeat, microbatch = np.divmod(time, self.microbatches)
        return _visits(microbatch, repeat, _within(time, self.microbatches * self.repeats))

    def depth_at_ticks(self, depths: Sequence[int]) -> np.ndarray:
        """The largest of `depths`, one for each repeat, of the visits of each tick: int32."""
        of_visits = np.asarray(depths, np.int32)[self.visits.repeat]
        most: np.ndarray = np.where(self.visits.active, of_visits, np.int32(0)).max(axis=1)
        return most

    def to_json(self) -> dict[str, object]:
        """The numbers and the timetable: [microbatch, repeat] by tick and stage."""
        return {**_numbers(self, "circular"), "timetable": self.visits.to_json()}

    # A microbatch that waits is stored by one stage, in a buffer [stages, slots]: microbatch m of
    # the input at [m // slots, m mod slots]. At each tick one slot is due, the same on all stages:
    # stage 0 takes what it has there, every other stage sends what it has there one stage towards
    # stage 0, and the last stage puts something new into its place, which is then free. What is
    # put in comes out stages · slots ticks later.

    @property
    def stream_slots(self) -> int:
        """Slots per stage for inputs that stage 0 has not taken yet, and for outputs: M / S."""
        return self.microbatches // self.stages

    @property
    def queue_slots(self) -> int:
        """Slots per stage for microbatches between two repeats: M / S - delay; 0 for one repeat."""
        # A microbatch is back at stage 0 delay · S ticks after it entered there, and enters again M
        # ticks after: it waits for S · (M / S - delay) ticks. With M = delay · S it does not wait.
        return self.stream_slots - self.delay if self.repeats > 1 else 0

    @property
    def is_ring(self) -> bool:
        """Whether the first stage takes the output of the last stage as soon as it arrives."""
        return self.repeats > 1 and self.queue_slots == 0

    @property
    def first_output_tick(self) -> int:
        """The tick in which the last stage gives out microbatch 0."""
        return self.microbatches * (self.repeats - 1) + self.bubble_ticks


@dataclass(frozen=True)
class OneForwardOneBackward:
    """The 1F1B schedule: each stage makes one forward and one backward visit at each tick.

    - `stages`, `microbatches`: their numbers S and M.
    - `repeats`: how often a microbatch passes all stages, R; with 2 or more it is interleaved 1F1B.

    A group of S microbatches goes through all repeats before the next group enters. At tick t stage
    s makes its forward visit t - s and its backward visit t - (S · R - 1) - (S - 1 - s), counted
    from 0. So the last stage makes both visits of a microbatch in one tick, and outputs and
    cotangents travel one stage per tick. Backward visits go through the repeats from the last to
    the first.

    A stage stores the residuals of a forward visit for 2 · (S · (R - repeat) - s) - 1 ticks,
    counting the ticks of both visits. So the first stage stores the most, those of S · (R + 1) - 1
    visits, however many microbatches there are; see `slots`.

    The loop takes M · R + S · (R + 1) - 2 ticks, the first S · R - 1 without backward visits, and
    as many at the end without forward visits. So in each direction a stage spends the time of M · R
    + S - 1 visits, of which S - 1 are a bubble.

    Raises InputError unless the microbatches are a multiple of the stages.
    """

    stages: int
    microbatches: int
    repeats: int = 1
    delay: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_counts(self)

    @property
    def visits(self) -> int:
        """The number of forward visits of each stage, and of backward visits."""
        return self.microbatches * self.repeats

    @property
    def ticks(self) -> int:
        return self.visits + self.warmup + self.stages - 1

    @property
    def warmup(self) -> int:
        """Ticks before the first backward visit: S · R - 1."""
        return self.stages * self.repeats - 1

    @property
    def bubble_ticks(self) -> int:
        """Visits per direction in which a stage idles, or computes and discards the result."""
        return self.stages - 1

    @property
    def bubble_share(self) -> float:
        """The share of the time in which a stage is idle, whatever a backward visit costs."""
        return self.bubble_ticks / (self.visits + self.bubble_ticks)

    @property
    def ring_slots(self) -> int:
        """The most visits whose residuals a stage stores at the same time."""
        return int(self.slots.max()) + 1

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """The slot of its stage's ring that stores each forward visit: int32 `[visits, …]`."""
        # A slot is free again in the tick after the backward visit that reads it. All stages take
        # the slots of the first one, which stores a visit longest. The S - 1 entries after the last
        # visit are for the bubbles that follow it, whose values are stored for a tick.
        number = np.arange(self.visits + self.stages - 1)
        repeat = number // self.stages % self.repeats
        lasting = np.where(number < self.visits, 2 * self.stages * (self.repeats - repeat) - 1, 1)
        slots: list[int] = []
        free: list[int] = []
        taken: list[tuple[int, int]] = []  # the tick from which it is free again, and the slot
        for visit, ticks in zip(number.tolist(), lasting.tolist(), strict=True):
            while taken and taken[0][0] <= visit:
                heapq.heappush(free, heapq.heappop(taken)[1])
            slots.append(heapq.heappop(free) if free else len(taken))
            heapq.heappush(taken, (visit + ticks, slots[-1]))
        return np.asarray(slots, np.int32)

    @property
    def phases(self) -> tuple[range, range, range]:
        """The ticks with forward visits only, with both kinds, and with backward visits only."""
        first, last = self.warmup, self.visits + self.stages - 1
        return range(first), range(first, last), range(last, self.ticks)

    @functools.cached_property
    def forward(self) -> Visits:
        return self._visits(self._ticks - np.arange(self.stages))

    @functools.cached_property
    def backward(self) -> Visits:
        # They have the order of forward visits, but count the repeats from the last.
        done = self._visits(self._ticks - self.warmup - np.arange(self.stages)[::-1])
        return done._replace(repeat=np.where(done.active, self.repeats - 1 - done.repeat, 0))

    @property
    def written(self) -> np.ndarray:
        """The slot that each stage writes at each tick: int32 `[ticks, stages]`."""
        last = len(self.slots) - 1
        return self.slots[np.clip(self._ticks - np.arange(self.stages), 0, last)]

    @property
    def read(self) -> np.ndarray:
        """The slot that each backward visit reads: int32 `[ticks, stages]`."""
        # In a bubble a stage reads the slot of its first visit, which has valid values by then.
        group, position = np.divmod(self.backward.microbatch, self.stages)
        forwarded = (group * self.repeats + self.backward.repeat) * self.stages + position
        slots: np.ndarray = self.slots[forwarded]
        return slots

    def to_json(self) -> dict[str, object]:
        """A phase is written as its first tick and the tick after its last."""
        names = ("forward_only", "both", "backward_only")
        return {
            **_numbers(self, "1f1b"),
            "ring_slots": self.ring_slots,
            "phases": {
                name: [ticks.start, ticks.stop]
                for name, ticks in zip(names, self.phases, strict=True)
            },
            "timetable": self.forward.to_json(),
            "backward_timetable": self.backward.to_json(),
        }

    @property
    def _ticks(self) -> np.ndarray:
        return np.arange(self.ticks)[:, None]

    def _visits(self, number: np.ndarray) -> Visits:
        """S microbatches go through all repeats, then the next S."""
        rounds, position = np.divmod(number, self.stages)
        group, repeat = np.divmod(rounds, self.repeats)
        return _visits(group * self.stages + position, repeat, _within(number, self.visits))


def _within(number: np.ndarray, stop: int) -> np.ndarray:
    return (number >= 0) & (number < stop)


def _visits(microbatch: np.ndarray, repeat: np.ndarray, active: np.ndarray) -> Visits:
    def table(numbers: np.ndarray) -> np.ndarray:
        return np.where(active, numbers, 0).astype(np.int32)

    return Visits(table(microbatch), table(repeat), active)


Schedule = CircularSchedule | OneForwardOneBackward


def _check_counts(schedule: Schedule) -> None:
    whole(schedule, "stages", "microbatches", "repeats")
    stages, microbatches = schedule.stages, schedule.microbatches
    rule = f"{do_not_split(microbatches, 'microbatch')} over {stages} stages"
    divides(stages, microbatches, rule=rule)


def _numbers(schedule: Schedule, name: str) -> dict[str, object]:
    sizes = ("stages", "microbatches", "repeats", "delay", "ticks", "bubble_ticks", "bubble_share")
    return {"schedule": name, **{size: getattr(schedule, size) for size in sizes}}


SCHEDULE_NAMES = ("circular", "1f1b")
"""The values of `pipeline.schedule`."""


def make_schedule(
    name: str, *, stages: int, microbatches: int, repeats: int = 1, delay: int = 1
) -> Schedule:
    """Makes the schedule called `name`, one of `SCHEDULE_NAMES`; 1F1B needs a delay of 1.

    Raises InputError for an unknown name and for numbers that do not fit the schedule.
    """
    one_of("schedule", name, SCHEDULE_NAMES)
    if name == "circular":
        return CircularSchedule(stages, microbatches, repeats, delay)
    if delay != 1:
        raise InputError(
            f"schedule=1f1b does not support delay={delay}: the next stage uses an output at the "
            "next tick; choose delay=1 or schedule=circular"
        )
    return OneForwardOneBackward(stages, microbatches, repeats)
