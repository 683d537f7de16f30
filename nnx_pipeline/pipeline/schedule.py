"""Schedules: what each stage does at each tick, in plain integers without arrays or JAX."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from nnx_pipeline.errors import InputError, divides, one_of


@dataclass(frozen=True)
class Work:
    """One visit: a stage applies its layers of `repeat` to `microbatch`."""

    microbatch: int
    repeat: int


@dataclass(frozen=True)
class CircularSchedule:
    """The circular schedule: every microbatch passes all S stages, R times over.

    - `stages`: their number S.
    - `microbatches`: their number M.
    - `repeats`: how often a microbatch passes all stages, R; with 1 it is the plain pipeline.
    - `delay`: ticks until the output of a stage reaches the next one, 1 or 2. With 2 the transfer
      of one tick overlaps with the work of the next.

    At tick t stage s is at its own time t - delay · s. At time k it works on microbatch k mod M in
    repeat k // M: all M microbatches of a repeat follow each other without a gap, and the pipeline
    fills and drains once. That takes M · R + delay · (S - 1) ticks, of which the second term is a
    bubble on every stage.

    Raises InputError unless the microbatches are a multiple of the stages, and delay · S or more.
    """

    stages: int
    microbatches: int
    repeats: int = 1
    delay: int = 1

    def __post_init__(self) -> None:
        _check_counts(self, "stages", "microbatches", "repeats")
        if self.delay not in (1, 2):
            raise InputError(f"forwarding delay={self.delay} must be 1 or 2")
        if self.microbatches < self.delay * self.stages:
            raise InputError(
                f"{self.microbatches} microbatches are too few for {self.stages} stages with a "
                f"forwarding delay of {self.delay}; choose {self.delay * self.stages} or more"
            )

    @property
    def ticks(self) -> int:
        """The number of ticks of the loop."""
        return self.microbatches * self.repeats + self.bubble_ticks

    @property
    def bubble_ticks(self) -> int:
        """The number of ticks in which a stage is idle, the same for every stage."""
        return self.delay * (self.stages - 1)

    @property
    def bubble_share(self) -> float:
        """The fraction of ticks in which a stage is idle, between 0 and 1."""
        return self.bubble_ticks / self.ticks

    def work(self, tick: int, stage: int) -> Work | None:
        """What `stage` does at `tick`; None in a bubble."""
        time = tick - self.delay * stage
        if not 0 <= time < self.microbatches * self.repeats:
            return None
        return Work(time % self.microbatches, time // self.microbatches)

    def rows(self) -> Iterator[list[Work | None]]:
        """The timetable: for each tick a list with the work of every stage."""
        for tick in range(self.ticks):
            yield [self.work(tick, stage) for stage in range(self.stages)]

    def to_json(self) -> dict[str, Any]:
        """The numbers and the timetable as JSON: [microbatch, repeat] by tick and stage."""
        return {
            "schedule": "circular",
            "stages": self.stages,
            "microbatches": self.microbatches,
            "repeats": self.repeats,
            "delay": self.delay,
            "ticks": self.ticks,
            "bubble_ticks": self.bubble_ticks,
            "bubble_share": self.bubble_share,
            "timetable": _pairs(self.rows()),
        }

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
        """Slots per stage for microbatches between two repeats: M / S - delay; 0 for one repeat.

        A microbatch is back at stage 0 delay · S ticks after it entered there, and enters again M
        ticks after: it waits for S · (M / S - delay) ticks. With M = delay · S it does not wait.
        """
        return self.stream_slots - self.delay if self.repeats > 1 else 0

    @property
    def is_ring(self) -> bool:
        """Whether the first stage takes the output of the last stage as soon as it arrives."""
        return self.repeats > 1 and self.queue_slots == 0

    @property
    def first_output_tick(self) -> int:
        """The tick in which the last stage applies its layers to microbatch 0 for the last time."""
        return self.microbatches * (self.repeats - 1) + self.bubble_ticks


@dataclass(frozen=True)
class OneForwardOneBackward:
    """The 1F1B schedule: each stage makes one forward and one backward visit at each tick.

    - `stages`: their number S.
    - `microbatches`: their number M.
    - `repeats`: how often a microbatch passes all stages, R; with 2 or more it is interleaved 1F1B.

    A group of S microbatches goes through all repeats before the next group enters, so that the
    first stage takes the output of the last one as soon as it arrives. At tick t stage s makes its
    forward visit t - s and its backward visit t - (S · R - 1) - (S - 1 - s), counted from 0. So the
    last stage makes the first backward visit of a microbatch in the same tick as its last forward
    visit, and outputs and cotangents travel one stage per tick. Backward visits go through the
    repeats from the last to the first.

    A stage keeps what the backward visit needs of the forward visit for
    2 · (S · (R - repeat) - s) - 1 ticks, counting those of both visits. So it never keeps more than
    2 · S · R - 1 visits, however many microbatches there are.

    The loop takes M · R + S · (R + 1) - 2 ticks. The first S · R - 1 have no backward visits, and
    the last S · R - 1 no forward visits. So in each direction a stage spends the time of
    M · R + S - 1 visits, of which S - 1 are a bubble, as with the circular schedule.

    Raises InputError unless the microbatches are a multiple of the stages.
    """

    stages: int
    microbatches: int
    repeats: int = 1
    delay: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_counts(self, "stages", "microbatches", "repeats")

    @property
    def visits(self) -> int:
        """The number of forward visits of each stage, which makes as many backward visits."""
        return self.microbatches * self.repeats

    @property
    def ticks(self) -> int:
        """The number of ticks of the loop: its three phases together."""
        return self.visits + self.turn + self.stages - 1

    @property
    def turn(self) -> int:
        """Ticks from the first forward visit of all to the first backward visit: S · R - 1."""
        return self.stages * self.repeats - 1

    @property
    def bubble_ticks(self) -> int:
        """Visits per direction in which a stage idles, or computes and discards the result."""
        return self.stages - 1

    @property
    def bubble_share(self) -> float:
        """The fraction of the time in which a stage is idle, between 0 and 1.

        It does not depend on what a backward visit costs, as each direction has the same fraction.
        """
        return self.bubble_ticks / (self.visits + self.bubble_ticks)

    @property
    def ring_slots(self) -> int:
        """The most visits of which a stage keeps something at the same time."""
        return 2 * self.stages * self.repeats - 1

    @property
    def phases(self) -> tuple[range, range, range]:
        """The ticks with forward visits only, with both kinds, and with backward visits only."""
        first, last = self.turn, self.visits + self.stages - 1
        return range(first), range(first, last), range(last, self.ticks)

    def forward(self, tick: int, stage: int) -> Work | None:
        """The forward visit of `stage` at `tick`; None in a bubble."""
        return self._work(tick - stage)

    def backward(self, tick: int, stage: int) -> Work | None:
        """The backward visit of `stage` at `tick`; None in a bubble."""
        # Backward visits have the order of forward visits, but count the repeats from the last.
        work = self._work(tick - self.turn - (self.stages - 1 - stage))
        return work and Work(work.microbatch, self.repeats - 1 - work.repeat)

    def forwarded_at(self, work: Work, stage: int) -> int:
        """The tick of the forward visit of `stage` that belongs to the backward visit `work`."""
        group, place = divmod(work.microbatch, self.stages)
        return stage + (group * self.repeats + work.repeat) * self.stages + place

    def forward_rows(self) -> Iterator[list[Work | None]]:
        """The forward timetable: for each tick a list with the visit of every stage."""
        for tick in range(self.ticks):
            yield [self.forward(tick, stage) for stage in range(self.stages)]

    def backward_rows(self) -> Iterator[list[Work | None]]:
        """The backward timetable: for each tick a list with the visit of every stage."""
        for tick in range(self.ticks):
            yield [self.backward(tick, stage) for stage in range(self.stages)]

    def to_json(self) -> dict[str, Any]:
        """The same as for the circular schedule, with backward timetable, phases and ring slots.

        A phase is written as its first tick and the tick after its last.
        """
        names = ("forward_only", "both", "backward_only")
        return {
            "schedule": "1f1b",
            "stages": self.stages,
            "microbatches": self.microbatches,
            "repeats": self.repeats,
            "delay": self.delay,
            "ticks": self.ticks,
            "bubble_ticks": self.bubble_ticks,
            "bubble_share": self.bubble_share,
            "ring_slots": self.ring_slots,
            "phases": {
                name: [ticks.start, ticks.stop]
                for name, ticks in zip(names, self.phases, strict=True)
            },
            "timetable": _pairs(self.forward_rows()),
            "backward_timetable": _pairs(self.backward_rows()),
        }

    def _work(self, visit: int) -> Work | None:
        """Visit number `visit`: S microbatches go through all repeats, and then the next S."""
        if not 0 <= visit < self.visits:
            return None
        rounds, place = divmod(visit, self.stages)
        group, repeat = divmod(rounds, self.repeats)
        return Work(group * self.stages + place, repeat)


def _pairs(rows: Iterable[list[Work | None]]) -> list[list[list[int] | None]]:
    return [[[work.microbatch, work.repeat] if work else None for work in row] for row in rows]


def _check_counts(schedule: object, *names: str) -> None:
    for name in names:
        if getattr(schedule, name) < 1:
            raise InputError(f"{name}={getattr(schedule, name)} must be 1 or more")
    stages, microbatches = (getattr(schedule, name) for name in ("stages", "microbatches"))
    divides(
        stages,
        microbatches,
        rule=f"{microbatches} microbatches do not split over {stages} stages",
    )


Schedule = CircularSchedule | OneForwardOneBackward
SCHEDULE_NAMES = ("circular", "1f1b")


def make_schedule(
    name: str, *, stages: int, microbatches: int, repeats: int = 1, delay: int = 1
) -> Schedule:
    """Makes the schedule called `name`.

    - `name`: one of `SCHEDULE_NAMES`.
    - `stages`, `microbatches`, `repeats`, `delay`: as for `CircularSchedule`; 1F1B needs a delay
      of 1.

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
