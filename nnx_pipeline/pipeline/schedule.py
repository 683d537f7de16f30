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
        for name in ("stages", "microbatches", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.delay not in (1, 2):
            raise InputError(f"forwarding delay={self.delay} must be 1 or 2")
        divides(
            self.stages,
            self.microbatches,
            rule=f"{self.microbatches} microbatches do not split over {self.stages} stages",
        )
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


SCHEDULES = {"circular": CircularSchedule}
