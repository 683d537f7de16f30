"""Describes how the memory, work and time of programs grow with one swept value."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import InputError, nearest

FIGURES = (
    "temp_bytes",
    "heap_bytes",
    "peak_bytes",
    "account_bytes",
    "flops",
    "step_seconds",
    "collective_seconds",
)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A straight line fitted by least squares: figure = slope · value + intercept.

    `r_squared` is the share of the figure's variance that the line explains. It is None for two
    values, through which a line always goes, and for a figure that does not vary.
    """

    slope: float
    intercept: float
    r_squared: float | None


@dataclass(frozen=True, kw_only=True)
class Point:
    """One program of a sweep: its value of the field, and a measurement or why that failed."""

    value: Any
    result: Measurement | None
    error: str = ""

    def figure(self, name: str) -> float | None:
        """One of FIGURES, with bytes and FLOPs per device; None where it is not known.

        `step_seconds` and `collective_seconds` are estimated. The time to compile is no figure,
        because several programs are compiled at the same time.
        """
        if self.result is None:
            return None
        if name in ("step_seconds", "collective_seconds"):
            return getattr(self.result.time, name) if self.result.time else None
        return self.result.flops if name == "flops" else getattr(self.result.memory, name)

    def to_json(self) -> dict[str, Any]:
        """The value, the error, and the figures of the measurement."""
        figures = {"measured": self.result.measured, **self.result.to_json()} if self.result else {}
        return {"value": self.value, "error": self.error or None, **figures}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Measurements of programs that differ in one field of the config.

    - `field`: the field, dotted as `pipeline.num_microbatches`.
    - `arms`: the label of each arm, and its points in the order of the values. Without an
      experiment there is one arm, `step`.
    - `platform`: what the programs were compiled for.
    - `along`: further fields that changed with it, each with its values in the same order.
    """

    field: str
    arms: tuple[tuple[str, tuple[Point, ...]], ...]
    platform: str
    along: tuple[tuple[str, tuple[object, ...]], ...] = ()

    def names(self) -> list[str]:
        """What each program is called: the values of all swept fields."""
        columns = [values for _, values in self.along]
        firsts = [point.value for point in self.arms[0][1]]
        return ["; ".join(map(str, row)) for row in zip(firsts, *columns, strict=True)]

    def heading(self) -> str:
        """All swept fields, in the order of `names`."""
        return "; ".join([self.field, *(field for field, _ in self.along)])

    @property
    def errors(self) -> list[str]:
        """One line for each point that has no measurement."""
        return [
            f"{label}, {self.field}={point.value}: {point.error}"
            for label, points in self.arms
            for point in points
            if point.result is None
        ]

    def fit(self, figure: str, arm: str | None = None) -> Fit | None:
        """The line through a figure against the value of the field.

        - `figure`: one of FIGURES.
        - `arm`: the label of the arm to take; without it, the last one.

        Points whose value is not a number or whose figure is not known are left out. Returns None
        where fewer than two different values remain. Raises InputError for an unknown figure or
        arm.
        """
        if figure not in FIGURES:
            raise InputError(f"figure {figure!r} is not known; {nearest(figure, FIGURES)}")
        by_label = dict(self.arms)
        if arm is not None and arm not in by_label:
            raise InputError(f"arm {arm!r} is not in this sweep; {nearest(arm, by_label)}")
        points = by_label[arm] if arm is not None else self.arms[-1][1]
        pairs = [(point.value, point.figure(figure)) for point in points]
        return line_through([(x, y) for x, y in pairs if y is not None and is_number(x)])

    def slope(self, figure: str, arm: str | None = None) -> float:
        """How much the figure grows per unit of the value, for assertions in tests; see `fit`.

        Raises InputError where a point of any arm failed or there is no line, so that no test
        passes because figures are missing.
        """
        line = self.fit(figure, arm)
        if line is None or self.errors:
            why = "; ".join(self.errors) or "it needs two different numbers with a figure for each"
            raise InputError(f"{figure} against {self.field} has no slope: {why}")
        return line.slope

    def to_json(self) -> dict[str, Any]:
        """What `compare --sweep --json` writes."""
        arms = []
        for label, points in self.arms:
            fits = {name: self.fit(name, label) for name in FIGURES}
            arms.append(
                {
                    "label": label,
                    "points": [point.to_json() for point in points],
                    "fits": {n: dataclasses.asdict(f) if f else None for n, f in fits.items()},
                }
            )
        along = {field: list(values) for field, values in self.along}
        head = {"schema": 1, "platform": self.platform, "field": self.field}
        return {**head, "along": along, "arms": arms}


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def line_through(pairs: list[tuple[float, float]]) -> Fit | None:
    """Fits a line by ordinary least squares; None for fewer than two different values."""
    if len({x for x, _ in pairs}) < 2:
        return None
    x, y = np.array(pairs, np.float64).T
    deviation = x - x.mean()
    if not np.ptp(y):
        return Fit(slope=0.0, intercept=float(y[0]), r_squared=None)
    slope = float(deviation @ y / (deviation @ deviation))
    intercept = float(y.mean() - slope * x.mean())
    spread = float(np.sum((y - y.mean()) ** 2))
    left = float(np.sum((y - slope * x - intercept) ** 2))
    is_known = len({x for x, _ in pairs}) > 2 and spread > 0  # any two points lie on a line
    return Fit(slope=slope, intercept=intercept, r_squared=1 - left / spread if is_known else None)
