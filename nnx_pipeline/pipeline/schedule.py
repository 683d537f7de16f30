"""Who does what at each tick, as plain integers: no arrays, no JAX."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnx_pipeline.errors import InputError, divides


@dataclass(frozen=True)
class Work:
    """A stage applies its layers of `repeat` to `microbatch`."""

    microbatch: int
    repeat: int


@dataclass(frozen=True)
class CircularSchedule:
    """Every microbatch passes all stages, `repeats` times; one repeat is the plain pipeline.

    At tick t stage s is at its own time t - s. At time k it works on microbatch k mod M in repeat
    k // M, so that all M microbatches of a repeat follow each other without a gap and the pipeline
    fills and drains once: M · R + S - 1 ticks, of which S - 1 are a bubble on every stage.

    Raises InputError unless the microbatches are a multiple of the stages.
    """

    stages: int
    microbatches: int
    repeats: int = 1

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be 1 or more")
        divides(
            self.stages,
            self.microbatches,
            rule=f"{self.microbatches} microbatches do not split over {self.stages} stages",
        )

    @property
    def ticks(self) -> int:
        """Length of the loop."""
        return self.microbatches * self.repeats + self.stages - 1

    @property
    def bubble_ticks(self) -> int:
        """Ticks that each stage is idle."""
        return self.ticks - self.microbatches * self.repeats

    @property
    def bubble_share(self) -> float:
        """The idle part of all stage-ticks, between 0 and 1."""
        return self.bubble_ticks / self.ticks

    def work(self, tick: int, stage: int) -> Work | None:
        """What `stage` does at `tick`; None in a bubble."""
        time = tick - stage
        if not 0 <= time < self.microbatches * self.repeats:
            return None
        return Work(time % self.microbatches, time // self.microbatches)

    def rows(self) -> Iterator[list[Work | None]]:
        """The timetable, one list over the stages for each tick."""
        for tick in range(self.ticks):
            yield [self.work(tick, stage) for stage in range(self.stages)]

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
        """Slots per stage for microbatches between two repeats: M / S - 1, or 0 for one repeat.

        A microbatch leaves the last stage S ticks after it entered the first and enters again M
        ticks after: it waits M - S ticks, S · (M / S - 1). With M = S it goes straight round.
        """
        return self.stream_slots - 1 if self.repeats > 1 else 0

    @property
    def first_output_tick(self) -> int:
        """The tick at whose end the last stage has finished microbatch 0."""
        return self.microbatches * (self.repeats - 1) + self.stages - 1


SCHEDULES = {"circular": CircularSchedule}
