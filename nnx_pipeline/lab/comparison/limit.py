"""A limit of a figure, as users write it: `5%`, `heap=24MB`, `step=20ms`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nnx_pipeline.lab.errors import BYTES, InputError, nearest

if TYPE_CHECKING:
    from nnx_pipeline.lab.comparison.outcome import Outcome
    from nnx_pipeline.lab.compile.measure import Measurement

FIGURES = ("account", "heap", "temp", "peak", "step")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_VALUE = re.compile(r"\+?(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(%|[a-zA-Zµ]+)")


@dataclass(frozen=True)
class Limit:
    """The most that a figure may be: bytes per device or seconds, or a share above another one.

    - `figure`: one of FIGURES.
    - `share`: by how much it may be above the other program's, such as 0.05; None for a value.
    """

    figure: str
    value: float
    share: float | None = None

    def of(self, measured: Measurement) -> float | None:
        """The figure of a program; None where it is not known."""
        if self.figure == "step":
            return measured.time.step_seconds if measured.time else None
        size: int | None = measured.bytes_of(self.figure)
        return size

    def beside(self, other: Measurement) -> Limit:
        """The same as a value, which a share is of another program's figure; raises InputError
        where that is not known."""
        if self.share is None:
            return self
        base = self.of(other)
        if base is None:
            raise InputError(
                f"{self} has nothing to be a share of: the {self.figure} of the first program is "
                "not known; give a value, or take another platform or figure"
            )
        return Limit(self.figure, base * (1 + self.share))

    def broken_by(self, outcome: Outcome, option: str) -> str:
        """How the second program of an outcome exceeds it, "" if it does not; what is not known
        exceeds it."""
        name, arms = outcome.question.name, (outcome.a, outcome.b)
        what = "the estimated step" if self.figure == "step" else f"the {self.figure}"
        before, after = (self.of(arm) if arm else None for arm in arms)
        if self.share is not None and self.figure == "step" and not _are_alike(arms):
            before = None
        most = self.value if self.share is None else before and before * (1 + self.share)
        if after is None or most is None:
            return f"{name}: {what} is not known, and {option} limits it to {self}"
        if after <= most:
            return ""
        share = f"{after / before - 1:+.2%}" if before else "from nothing"
        first, second = (in_units(self.figure, value) for value in (before, after))
        return f"{name}: {what} rises from {first} to {second} ({share}), more than {option} {self}"

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.figure}={100 * self.share:g}%"
        return f"{self.figure}={in_units(self.figure, self.value)}"


def _are_alike(arms: Sequence[Measurement | None]) -> bool:
    """A lower bound beside an estimate says nothing of which is longer."""
    times = [arm.time if arm else None for arm in arms]
    return len({(time.is_lower_bound, time.is_partial) if time else None for time in times}) == 1


def in_units(figure: str, value: float | None) -> str:
    """A figure in MB (10⁶ bytes) or ms; a dash where it is not known."""
    if value is None:
        return "–"
    return f"{value * 1e3:,.3f} ms" if figure == "step" else f"{value / 1e6:,.1f} MB"


def parse_limit(option: str, text: str) -> Limit:
    """The limit that a text such as `heap=24MB` is; raises InputError."""
    named, equals, written = text.rpartition("=")
    figure = named.strip() if equals else ""
    units = {**BYTES, **_SECONDS}
    match = _VALUE.fullmatch(written.strip())
    unit = match[2] if match else ""
    if match is None or (unit != "%" and unit not in units) or not math.isfinite(float(match[1])):
        raise InputError(f"{option} {text!r} is no limit; write 5%, 24MB, heap=1.5GiB or step=20ms")
    if equals and figure not in FIGURES:
        raise InputError(
            f"{option} {text!r}: there is no figure {figure!r}; {nearest(figure, FIGURES)}"
        )
    is_time = unit in _SECONDS
    figure = figure or ("step" if is_time else "account")
    number = float(match[1])
    if unit == "%":
        return Limit(figure, 0.0, number / 100)
    if is_time != (figure == "step"):
        raise InputError(
            f"{option} {text!r}: {figure} is in {'seconds' if figure == 'step' else 'bytes'}; "
            f"write {figure}={'20ms' if figure == 'step' else '24MB'}"
        )
    return Limit(figure, number * units[unit])
