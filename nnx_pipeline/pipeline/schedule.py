"""Who does what at each tick, as plain integers: no arrays, no JAX."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from nnx_pipeline.errors import InputError, divides, one_of


@dataclass(frozen=True)
class Work:
    """A stage applies its layers of `repeat` to `microbatch`."""

    microbatch: int
    repeat: int


@dataclass(frozen=True)
class CircularSchedule:
    """Every microbatch passes all stages, `repeats` times; one repeat is the plain pipeline.

    What a stage gives at a tick reaches the next one `delay` ticks later, so at tick t stage s is
    at its own time t - delay · s. At time k it works on microbatch k mod M in repeat k // M: all M
    microbatches of a repeat follow each other without a gap, and the pipeline fills and drains
    once. That takes M · R + delay · (S - 1) ticks, of which the latter are a bubble on every stage.
    With a delay of 2 the transfer of one tick runs beside the work of the next.

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
        """Length of the loop."""
        return self.microbatches * self.repeats + self.bubble_ticks

    @property
    def bubble_ticks(self) -> int:
        """Ticks that each stage is idle."""
        return self.delay * (self.stages - 1)

    @property
    def bubble_share(self) -> float:
        """The idle part of all stage-ticks, between 0 and 1."""
        return self.bubble_ticks / self.ticks

    def work(self, tick: int, stage: int) -> Work | None:
        """What `stage` does at `tick`; None in a bubble."""
        time = tick - self.delay * stage
        if not 0 <= time < self.microbatches * self.repeats:
            return None
        return Work(time % self.microbatches, time // self.microbatches)

    def rows(self) -> Iterator[list[Work | None]]:
        """The timetable, one list over the stages for each tick."""
        for tick in range(self.ticks):
            yield [self.work(tick, stage) for stage in range(self.stages)]

    def to_json(self) -> dict[str, Any]:
        """Numbers and timetable, [microbatch, repeat] by tick and stage, for machines to read."""
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

    # A microbatch is stored by one stage while it waits: [stages, slots], microbatch m of the input
    # at [m // slots, m mod slots]. Each tick one slot of all stages moves one stage to stage 0,
    # which takes what it finds there, and the last stage puts something into the free place.
    # What is put in comes out stages · slots ticks later.

    @property
    def stream_slots(self) -> int:
        """Slots per stage that hold inputs not yet taken, then outputs: M / S."""
        return self.microbatches // self.stages

    @property
    def queue_slots(self) -> int:
        """Slots per stage for microbatches between two repeats: M / S - delay; 0 for one repeat.

        A microbatch reaches stage 0 again delay · S ticks after it entered there, and enters M
        ticks after: it waits S · (M / S - delay) ticks. With M = delay · S it goes straight round.
        """
        return self.stream_slots - self.delay if self.repeats > 1 else 0

    @property
    def is_ring(self) -> bool:
        """Whether what leaves the last stage is at once taken by the first."""
        return self.repeats > 1 and self.queue_slots == 0

    @property
    def first_output_tick(self) -> int:
        """The tick at whose end the last stage has finished microbatch 0."""
        return self.microbatches * (self.repeats - 1) + self.bubble_ticks


@dataclass(frozen=True)
class OneForwardOneBackward:
    """Every stage forwards one microbatch and takes another one back at each tick.

    With repeats (interleaved 1F1B) a group of S microbatches goes through all of them before the
    next group enters, so that what leaves the last stage is at once taken by the first. At tick
    t stage s makes its forward visit t - s and its backward visit t - (S · R - 1) - (S - 1 - s),
    counted from 0: the last stage takes a microbatch back in the tick in which it forwarded it for
    the last time, and what a stage gives travels one stage per tick. Backward visits go through
    the repeats from the last to the first. A stage keeps what it needs of a visit between the two,
    2 · (S · (R - repeat) - s) - 1 ticks: never more than 2 · S · R - 1 visits, however many there
    are.

    That takes M · R + S · (R + 1) - 2 ticks. In the first S · R - 1 nothing is taken back yet and
    in the last S · R - 1 nothing is forwarded any more, so that each stage does the work of
    M · R + S - 1 forward and as many backward visits in time, as with the circular schedule, S - 1
    of each a bubble.

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
        """Forward visits of each stage, and as many backward."""
        return self.microbatches * self.repeats

    @property
    def ticks(self) -> int:
        """Length of the loop: its three phases together."""
        return self.visits + self.turn + self.stages - 1

    @property
    def turn(self) -> int:
        """Ticks from the first forward visit to the first backward visit, S · R - 1."""
        return self.stages * self.repeats - 1

    @property
    def bubble_ticks(self) -> int:
        """Forward visits, and as many backward ones, that each stage sits out or does in vain."""
        return self.stages - 1

    @property
    def bubble_share(self) -> float:
        """The idle part of the time, between 0 and 1, whatever a backward visit costs."""
        return self.bubble_ticks / (self.visits + self.bubble_ticks)

    @property
    def ring_slots(self) -> int:
        """Visits of which a stage keeps something at the same time, at most."""
        return 2 * self.stages * self.repeats - 1

    @property
    def phases(self) -> tuple[range, range, range]:
        """Ticks that only forward, that do both, and that only take back."""
        first, last = self.turn, self.visits + self.stages - 1
        return range(first), range(first, last), range(last, self.ticks)

    def forward(self, tick: int, stage: int) -> Work | None:
        """What `stage` forwards at `tick`; None in a bubble."""
        return self._work(tick - stage)

    def backward(self, tick: int, stage: int) -> Work | None:
        """What `stage` takes back at `tick`; None in a bubble."""
        work = self._work(tick - self.turn - (self.stages - 1 - stage))
        return work and Work(work.microbatch, self.repeats - 1 - work.repeat)

    def forwarded_at(self, work: Work, stage: int) -> int:
        """The tick in which `stage` forwards what it is to take back as `work`."""
        group, place = divmod(work.microbatch, self.stages)
        return stage + (group * self.repeats + work.repeat) * self.stages + place

    def forward_rows(self) -> Iterator[list[Work | None]]:
        """The forward timetable, one list over the stages for each tick."""
        for tick in range(self.ticks):
            yield [self.forward(tick, stage) for stage in range(self.stages)]

    def backward_rows(self) -> Iterator[list[Work | None]]:
        """The backward timetable, one list over the stages for each tick."""
        for tick in range(self.ticks):
            yield [self.backward(tick, stage) for stage in range(self.stages)]

    def to_json(self) -> dict[str, Any]:
        """What the circular schedule gives, and the backward timetable, phases and ring slots.

        A phase is its first tick and the one after its last.
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
        """The visit of that number: S microbatches, one repeat after the other, then the next S."""
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
    """The timetable called `name`; raises InputError for numbers that it has no place for."""
    one_of("schedule", name, SCHEDULE_NAMES)
    if name == "circular":
        return CircularSchedule(stages, microbatches, repeats, delay)
    if delay != 1:
        raise InputError(
            f"schedule=1f1b hands on at every tick what a stage gives, so delay={delay} must be 1; "
            "choose delay=1 or schedule=circular"
        )
    return OneForwardOneBackward(stages, microbatches, repeats)
