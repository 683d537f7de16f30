"""What a step must hold and how long it must take, compared with what its program holds and takes.
A floor knows nothing of models: who makes one says the formula and the role of each term."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from nnx_pipeline.lab.attribution._result import Attribution

LOST = ("padding", "fragmentation")  # roles of bytes that hold no array


@dataclass(frozen=True, kw_only=True)
class Term:
    """One thing that a device holds."""

    name: str
    bytes: int  # per device; below 0 for what is elsewhere although other terms count it
    formula: str  # how the bytes follow from sizes and dtypes
    role: str  # one of `ROLES`, or `argument` for what is no part of the heap


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What the heap holds at one moment of the step, such as `backward pass of attention`."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> int:
        return sum(term.bytes for term in self.terms)


@dataclass(frozen=True, kw_only=True)
class LeastTime:
    """The shortest time of a step: its useful operations at the device's peak, and the bubble."""

    useful_flops: float  # that the model needs, per device and step
    outside_flops: float  # of them outside the layers, where no bubble delays them
    peak_flops: float  # per second
    bubble_share: float  # of the time of the layers, in which a stage has nothing to do

    @property
    def compute_seconds(self) -> float:
        return self.useful_flops / self.peak_flops

    @property
    def bubble_seconds(self) -> float:
        layers = (self.useful_flops - self.outside_flops) / self.peak_flops
        return layers * self.bubble_share / (1 - self.bubble_share)

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.bubble_seconds


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The bytes that any program for a step must hold at its peak, and the time it must take."""

    arguments: tuple[Term, ...]  # held from the first operation to the last, outside the heap
    moments: tuple[Moment, ...]  # what the heap must hold at each; () where that is not known
    expected: tuple[Moment, ...]  # the same of compilers, which hold more than they must
    time: LeastTime | None  # None where nothing is known of the device
    knows: tuple[str, ...]  # what the terms cover, one phrase each
    unknown: tuple[str, ...]  # why the heap is not known, one sentence each

    @property
    def peak(self) -> Moment | None:
        """The moment at which the heap must hold most; None where that is not known."""
        return max(self.moments, key=lambda moment: moment.bytes, default=None)

    @property
    def expected_peak(self) -> Moment | None:
        return max(self.expected, key=lambda moment: moment.bytes, default=None)

    @property
    def argument_bytes(self) -> int:
        return sum(term.bytes for term in self.arguments)

    @property
    def heap_bytes(self) -> int | None:
        return self.peak.bytes if self.peak else None

    @property
    def expected_bytes(self) -> int | None:
        return self.expected_peak.bytes if self.expected_peak else None

    @property
    def account_bytes(self) -> int | None:
        """Arguments and heap together; None where the heap is not known."""
        return None if self.heap_bytes is None else self.argument_bytes + self.heap_bytes

    def to_json(self) -> dict[str, Any]:
        time = self.time
        seconds = ("compute_seconds", "bubble_seconds", "step_seconds")
        times = {name: getattr(time, name) for name in seconds} if time else {}
        totals = ("argument_bytes", "heap_bytes", "account_bytes", "expected_bytes")
        return {
            **{name: getattr(self, name) for name in totals},
            "peak": self.peak.name if self.peak else None,
            **dataclasses.asdict(self),
            "time": {**dataclasses.asdict(time), **times} if time else None,
        }


@dataclass(frozen=True, kw_only=True)
class Gap:
    """What a program holds in one role at its peak, and what it must hold there."""

    role: str
    terms: tuple[str, ...]  # names of the floor's terms of this role at its own peak
    bytes: int
    least_bytes: int

    @property
    def excess(self) -> int:
        """What the program holds more; negative where the two hold it at different moments."""
        return self.bytes - self.least_bytes


def between(floor: Floor, attribution: Attribution) -> tuple[Gap, ...]:
    """The rows between a floor and a program's heap, role by role, the largest excess first. The
    excesses sum to what the heap is larger than the floor. A program may hold the same values in
    another role than the floor expects; two rows then differ by the same bytes."""
    if floor.peak is None:
        return ()
    sizes = attribution.by_role()
    least = Counter[str]()
    for term in floor.peak.terms:
        least[term.role] += term.bytes
    gaps = [
        Gap(
            role=role,
            terms=tuple(term.name for term in floor.peak.terms if term.role == role),
            bytes=sizes.get(role, 0),
            least_bytes=least[role],
        )
        for role in {**sizes, **least}
    ]
    return tuple(sorted(gaps, key=lambda gap: (-gap.excess, gap.role)))


def live_bytes(attribution: Attribution) -> int:
    """The bytes of arrays in a heap at its peak: without padding and without fragmentation."""
    return attribution.heap_bytes - sum(attribution.by_role().get(role, 0) for role in LOST)
