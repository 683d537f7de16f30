"""The estimated time of a program, and its form in JSON and in the cache."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from nnx_pipeline.lab._timing.band import Band, Program, band_of

Basis = Literal["cycles", "xla-model", "roofline"]
Pass = Literal["forward", "recomputed", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "recomputed", "backward")

# What `--json` writes under `time`, in this order.
KEYS = (
    *("compute_seconds", "collective_seconds", "exposed_seconds", "bubble_share"),
    *("step_seconds", "mfu", "hfu", "launches"),
)


@dataclass(frozen=True)
class TimeRow:
    """The compute of one source line in one pass, per device and step."""

    source: str | None  # as `file.py:12`
    caller: str | None  # the line that called that function; None unless several do
    kind: str  # what the instructions mostly do, a `cost.Kind`
    pass_name: Pass
    seconds: float
    launches: int


@dataclass(frozen=True, kw_only=True)
class Time:
    """How long one step of a program takes on each device; None for what the program does not say.

    - `basis`: `cycles` by the TPU compiler's estimates, `xla-model` by XLA's own model of a GPU, or
      `roofline`, a lower bound.
    - `known_seconds`: the sum over the instructions whose time is known, but collectives;
      `compute_seconds`: the same where that is all of them.
    - `collective_seconds`: the sum over all collectives, from their bytes and the links, or by
      XLA's model.
    - `exposed_seconds`, `memory_wait_seconds`: how long the compute waits for collectives, and for
      transfers between memory and chip, or memory and host.
    - `host_seconds`: how long transfers to and from the host go on, waited for or not.
    - `step_seconds`: compute and both waits.
    - `range_seconds`: the step if every collective ran beside the compute, and if none did.
    - `hfu`, `mfu`: the part of a step that all matrix products would take at the peak rate of their
      dtype; the same of those that the model needs, of `peak_flops` in bfloat16.
    - `bubble_share`: the part of the compute of a pipeline's ticks that is discarded.
    - `launches`: how many instructions with a time run, collectives left out.
    - `is_lower_bound`: a step takes at least that long, as of every roofline; `is_partial`: an
      estimate of which a part counts with the least that it takes; `is_open`: either would be, but
      the longest branch of a conditional counts, and another may run.
    - `program`: what is trained, "" where that is not known.
    """

    basis: Basis
    known_seconds: float
    compute_seconds: float | None
    collective_seconds: float | None
    exposed_seconds: float | None
    memory_wait_seconds: float | None
    host_seconds: float | None
    step_seconds: float | None
    range_seconds: tuple[float, float] | None
    hfu: float | None
    mfu: float | None = None
    bubble_share: float | None = None
    launches: int | None
    peak_flops: float
    is_lower_bound: bool = False
    is_partial: bool = False
    is_open: bool = False
    program: Program = ""
    rows: tuple[TimeRow, ...] = ()

    def of_model(self, useful_flops: float, bubble_share: float, program: Program) -> "Time":
        """The same with the operations per device and step that the model needs, counted once."""
        mfu = useful_flops / (self.step_seconds * self.peak_flops) if self.step_seconds else None
        return dataclasses.replace(self, mfu=mfu, bubble_share=bubble_share, program=program)

    @property
    def counts_least(self) -> bool:
        """Whether all or a part of it counts with the least that it takes."""
        return self.is_lower_bound or self.is_partial

    @property
    def band(self) -> Band | None:
        """How far measured steps of this kind lay from their estimates; None for too few."""
        return band_of(self.basis, self.program) if self.step_seconds else None

    def to_json(self) -> dict[str, Any]:
        """The figures as `--json` writes them, without the rows."""
        more = ("basis", "is_lower_bound", "is_partial", "is_open", "known_seconds")
        names = (
            *KEYS,
            *more,
            "range_seconds",
            "memory_wait_seconds",
            "host_seconds",
            "peak_flops",
            "program",
        )
        around = self.range_seconds and list(self.range_seconds)
        band = self.band and dataclasses.asdict(self.band)
        found = {name: getattr(self, name) for name in names}
        return {**found, "range_seconds": around, "band": band}
