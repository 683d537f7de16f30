"""How memory, work and compile time grow with a field of the config."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError, nearest
from nnx_pipeline.lab.arms import Experiment, Program
from nnx_pipeline.lab.cache import Cache
from nnx_pipeline.lab.compare import NO_CACHE, measure_program
from nnx_pipeline.lab.compile import Measurement, Progress
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.overrides import apply_overrides, known_keys, value_of

FIGURES = (
    "temp_bytes",
    "heap_bytes",
    "peak_bytes",
    "account_bytes",
    "flops",
    "compile_seconds",
)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The straight line with the least squared distance: figure = slope · value + intercept.

    r_squared: the share of the figure's variance that the line explains; None of two values, which
    always lie on a line, and where the figure does not vary.
    """

    slope: float
    intercept: float
    r_squared: float | None


@dataclass(frozen=True, kw_only=True)
class Point:
    """One program: the value swept, and its measurement or why there is none."""

    value: Any
    result: Measurement | None
    error: str = ""

    def figure(self, name: str) -> float | None:
        """One of FIGURES, bytes and FLOPs per device; None where it is not known."""
        if self.result is None:
            return None
        if name == "compile_seconds":
            return self.result.seconds.get("compile")
        return self.result.flops if name == "flops" else getattr(self.result.memory, name)

    def to_json(self) -> dict[str, Any]:
        """The value, the error, and the figures of the contract."""
        figures = {"measured": self.result.measured, **self.result.to_json()} if self.result else {}
        return {"value": self.value, "error": self.error or None, **figures}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Programs that differ in one field of the config, in the order of its values.

    field: the dotted field. arms: label and points of each arm; one arm, `step`, without an
    experiment.
    """

    field: str
    arms: tuple[tuple[str, tuple[Point, ...]], ...]
    platform: str

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
        """The line through one of FIGURES against the value; without a name, of the last arm.

        None for fewer than two points, values that are not numbers, or figures that the compiler
        does not give. InputError for a figure or an arm that is not there.
        """
        if figure not in FIGURES:
            raise InputError(f"figure {figure!r} is not known; {nearest(figure, FIGURES)}")
        by_label = dict(self.arms)
        if arm is not None and arm not in by_label:
            raise InputError(f"arm {arm!r} is not there; {nearest(arm, by_label)}")
        points = by_label[arm] if arm is not None else self.arms[-1][1]
        pairs = [(point.value, point.figure(figure)) for point in points]
        return _line([(x, y) for x, y in pairs if y is not None and _is_number(x)])

    def slope(self, figure: str, arm: str | None = None) -> float:
        """How much the figure grows per unit of the value, for assertions in tests.

        Raises InputError where a point failed or there is no line, so that no test passes for want
        of figures.
        """
        line = self.fit(figure, arm)
        if line is None or self.errors:
            why = "; ".join(self.errors) or "it needs two numbers with a figure for each"
            raise InputError(f"{figure} against {self.field} has no slope: {why}")
        return line.slope

    def to_json(self) -> dict[str, Any]:
        """What `ab --sweep --json` writes."""
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
        return {"schema": 1, "platform": self.platform, "field": self.field, "arms": arms}


def sweep(
    config: Config,
    mesh: MeshConfig | str,
    field: str,
    values: Sequence[Any],
    *,
    along: Mapping[str, Sequence[Any]] | None = None,
    experiment: Experiment | None = None,
    platform: Platform | str = "cpu",
    cache: Cache = NO_CACHE,
    progress: Progress = lambda text: None,
) -> Sweep:
    """Compiles one training step for each value of a config field.

    field: dotted, as `pipeline.num_microbatches`. along: other fields with as many values, which
    change in step: a batch that grows with its microbatches keeps them of the same size.
    experiment: sweeps both of its arms instead of the plain step.

    Raises InputError, before anything is compiled, for a field that does not exist and for values
    that its config, the mesh or the experiment refuse. A program that does not compile is a point
    with an error.
    """
    if isinstance(mesh, str):
        mesh = MeshConfig.parse(mesh)
    if isinstance(platform, str):
        platform = Platform.parse(platform)
    configs = _configs(config, {field: values, **(along or {})})
    for each in configs:
        each.check_mesh(mesh)
    labels = (experiment.a.label, experiment.b.label) if experiment else ("step",)
    programs = [
        experiment.programs(each, mesh) if experiment else (Program(each),) for each in configs
    ]
    points: dict[str, list[Point]] = {label: [] for label in labels}
    for each, row in zip(configs, programs, strict=True):
        value = value_of(each, field)
        for swept in (field, *(along or ())):
            if any(value_of(program.config, swept) != value_of(each, swept) for program in row):
                raise InputError(
                    f"{experiment.name if experiment else 'step'} sets {swept} itself, so that "
                    f"{value_of(each, swept)} would not count; sweep another field"
                )
    for each, row in zip(configs, programs, strict=True):
        value = value_of(each, field)
        for label, program in zip(labels, row, strict=True):
            named = _named(progress, f"{label}, {field}={value}")
            result = measure_program(program, mesh, platform, cache, named)
            found = (None, result) if isinstance(result, str) else (result, "")
            points[label].append(Point(value=value, result=found[0], error=found[1]))
    arms = tuple((label, tuple(points[label])) for label in labels)
    return Sweep(field=field, arms=arms, platform=str(platform))


def _configs(config: Config, fields: Mapping[str, Sequence[Any]]) -> list[Config]:
    """One config per value; every field takes its values in order."""
    known, (first, values) = known_keys(), next(iter(fields.items()))
    for field, given in fields.items():
        if field not in known:
            raise InputError(f"sweep of {field}: no such config field; {nearest(field, known)}")
        if len(given) != len(values):
            raise InputError(
                f"sweep of {field} has {len(given)} values and that of {first} {len(values)}; "
                "fields that are swept together need as many"
            )
    rows = zip(*fields.values(), strict=True)
    texts = [dict(zip(fields, map(str, row), strict=True)) for row in rows]
    configs = [apply_overrides(config, row) for row in texts]
    if len({repr(value_of(each, first)) for each in configs}) < max(len(values), 2):
        raise InputError(f"sweep of {first} needs two different values or more, none of them twice")
    return configs


def _named(progress: Progress, name: str) -> Progress:
    return lambda text: progress(f"{name}: {text}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line(pairs: list[tuple[float, float]]) -> Fit | None:
    """Ordinary least squares."""
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
    told = len({x for x, _ in pairs}) > 2 and spread > 0  # any two points lie on a line
    return Fit(slope=slope, intercept=intercept, r_squared=1 - left / spread if told else None)
