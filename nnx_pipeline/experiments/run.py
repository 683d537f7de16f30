"""Run an experiment: compile both arms, check that they compute the same, give the verdict."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab.arms import Arm, Experiment, Program, Quantity
from nnx_pipeline.lab.attribution import BufferDifference, difference
from nnx_pipeline.lab.cache import Cache
from nnx_pipeline.lab.cache_key import key_of
from nnx_pipeline.lab.compile import Measurement, Progress
from nnx_pipeline.lab.numerics import VIRTUAL_CPUS, Numerics, compare_numerics
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.lab.programs import measure
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.overrides import value_of

NOT_APPLICABLE = "not applicable"
NO_CACHE = Cache(None)
NO_EFFECT = 0.01  # a relative difference below this is no effect
NAMES: dict[Quantity, str] = {
    "temp": "temp",
    "heap": "the heap",
    "account": "the account",
    "trace_host": "what the host holds while it traces",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An experiment on one platform. An arm that did not compile is None, its error in `note`.

    failed: an arm or the comparison of numbers is missing, or the arms compute different things.
    """

    experiment: Experiment
    verdict: str
    note: str
    failed: bool = False
    a: Measurement | None = None
    b: Measurement | None = None
    numerics: Numerics | None = None

    @property
    def arms(self) -> tuple[tuple[Arm, Measurement | None], tuple[Arm, Measurement | None]]:
        """Each arm with its measurement."""
        return (self.experiment.a, self.a), (self.experiment.b, self.b)

    @property
    def same_program(self) -> bool | None:
        """Whether both arms compile to one program; None where one of them did not compile."""
        return self.a.fingerprint == self.b.fingerprint if self.a and self.b else None

    @property
    def buffers(self) -> tuple[BufferDifference, ...] | None:
        """What the heap of b holds more or less than that of a; None where that is not known."""
        one, other = (result.attribution if result else None for result in (self.a, self.b))
        return difference(one, other) if one and other else None

    def bytes_of(self, quantity: Quantity) -> tuple[int | None, int | None]:
        """That figure of both arms; None where it is not known."""
        before, after = (
            result.bytes_of(quantity) if result else None for result in (self.a, self.b)
        )
        return before, after

    def ratio(self, quantity: Quantity) -> float | None:
        """b / a; None where one of them is not known, or a has none."""
        before, after = self.bytes_of(quantity)
        return after / before if before and after is not None else None

    def verdict_by(self, quantity: Quantity) -> str:
        """Whether arm b holds less of it; not applicable where it is not known of both arms."""
        before, after = self.bytes_of(quantity)
        if before is None or after is None:
            return NOT_APPLICABLE
        if abs(after - before) < NO_EFFECT * before or after == before:
            return "no effect"
        return "holds" if after < before else "opposite"

    def to_json(self) -> dict[str, Any]:
        """One entry of `ab --json`."""
        buffers = self.buffers
        return {
            "name": self.experiment.name,
            "claim": self.experiment.claim,
            "difference": self.experiment.difference,
            "kind": self.experiment.kind,
            "same_program": self.same_program,
            "arms": {
                key: {
                    "label": arm.label,
                    **({"measured": result.measured, **result.to_json()} if result else {}),
                }
                for key, (arm, result) in zip("ab", self.arms, strict=True)
            },
            **self._changes("temp"),
            **self._changes("account"),
            "judged_by": self.experiment.judged_by,
            "numerics": dataclasses.asdict(self.numerics) if self.numerics else None,
            "verdict": self.verdict,
            "note": self.note,
            "buffers": None if buffers is None else [dataclasses.asdict(row) for row in buffers],
        }

    def _changes(self, quantity: Quantity) -> dict[str, float | None]:
        before, after = self.bytes_of(quantity)
        delta = None if before is None or after is None else after - before
        return {f"delta_{quantity}_bytes": delta, f"ratio_{quantity}": self.ratio(quantity)}


def run_experiments(
    experiments: Sequence[Experiment],
    config: Config,
    mesh: MeshConfig,
    platform: Platform,
    *,
    given: Collection[str] = (),
    cache: Cache = NO_CACHE,
    progress: Progress = lambda text: None,
    finished: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Compiles the arms for `platform` and compares their numbers on the CPU.

    given: dotted keys of the config that somebody chose; an outcome says where an arm has another
    value all the same. cache: where figures are kept and looked for. finished: called with each
    outcome as soon as it is known.
    Arms that are the same program are compiled once. Input errors of the shared config are raised;
    an experiment that says nothing on this config and mesh is not applicable, and what goes wrong
    inside one arm stands in the outcome beside the other arm.
    """
    config.check_mesh(mesh)
    results: dict[Program, Measurement | str] = {}
    # Whichever of the two comes first starts JAX, with the devices of both.
    virtual_cpus = max(VIRTUAL_CPUS, mesh.num_devices if platform.kind == "cpu" else 1)
    numbers = functools.partial(
        compare_numerics, config=config, cache=cache, virtual_cpus=virtual_cpus
    )
    outcomes = []
    for experiment in experiments:
        try:
            programs = experiment.programs(config, mesh)
        except InputError as error:
            outcomes.append(Outcome(experiment=experiment, verdict=NOT_APPLICABLE, note=str(error)))
            finished(outcomes[-1])
            continue
        for arm, program in zip((experiment.a, experiment.b), programs, strict=True):
            if program not in results:
                named = _named(progress, f"{experiment.name}, {arm.label}")
                results[program] = measure_program(program, mesh, platform, cache, named)
        measured = (results[programs[0]], results[programs[1]])
        outcome = _outcome(experiment, measured, platform, numbers, progress)
        notes = [outcome.note, *_overruled(experiment, config, programs, given)]
        outcomes.append(dataclasses.replace(outcome, note="; ".join(filter(None, notes))))
        finished(outcomes[-1])
        # Machine code for the CPU of some sixty programs is more than a process can map.
        jax.clear_caches()
    return outcomes


def _overruled(
    experiment: Experiment, config: Config, programs: Sequence[Program], given: Collection[str]
) -> list[str]:
    """Which of the chosen values an experiment replaces, and by what in which arm."""
    notes = []
    for key in given:
        chosen = value_of(config, key)
        values = {
            f"{arm.label} has {value_of(program.config, key)}"
            for arm, program in zip((experiment.a, experiment.b), programs, strict=True)
            if value_of(program.config, key) != chosen
        }
        if values:
            notes.append(f"{key}={chosen} does not count: {', '.join(sorted(values))}")
    return notes


def _named(progress: Progress, name: str) -> Progress:
    return lambda text: progress(f"{name}: {text}")


def measure_program(
    program: Program, mesh: MeshConfig, platform: Platform, cache: Cache, progress: Progress
) -> Measurement | str:
    """The measurement, or the first line of what the compiler said against it."""
    key = key_of(platform, "measurement", mesh, program)
    if (known := cache.get(key)) is not None:
        try:
            return Measurement.from_cache(*known)
        except (KeyError, TypeError, ValueError):
            pass  # written by something else
    try:
        result = measure(program, mesh, platform, virtual_cpus=VIRTUAL_CPUS, progress=progress)
    except InputError:
        raise
    except Exception as error:  # an arm may break any compiler in any way: the report says how
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0][:200]
    cache.put(key, result.to_cache())
    return result


def compare_measurements(
    experiment: Experiment, a: Measurement | str, b: Measurement | str
) -> Outcome:
    """The outcome of two arms by their figures alone; a text is why there are none."""
    notes = []
    for arm, result in ((experiment.a, a), (experiment.b, b)):
        if isinstance(result, str):
            notes.append(f"{arm.label} did not compile: {result}")
    one, other = (None if isinstance(result, str) else result for result in (a, b))
    outcome = Outcome(
        experiment=experiment,
        a=one,
        b=other,
        verdict=NOT_APPLICABLE,
        note="",
        failed=one is None or other is None,
    )
    judged_by = experiment.judged_by
    verdict = outcome.verdict_by(judged_by)
    if one and other:
        notes += _why_no_effect(experiment, verdict, one, other)
        if verdict == NOT_APPLICABLE:
            notes.append(f"{NAMES[judged_by]} is not known")
        if judged_by == "trace_host":
            notes.append(_held_while_tracing(outcome))
        else:
            notes += _other_verdicts(outcome, verdict)
    return dataclasses.replace(outcome, verdict=verdict, note="; ".join(notes))


def _held_while_tracing(outcome: Outcome) -> str:
    held = outcome.bytes_of("trace_host")
    shown = " and ".join("–" if size is None else f"{size / 1e6:.1f} MB" for size in held)
    return f"the verdict is about {NAMES['trace_host']}: {shown}"


def _other_verdicts(outcome: Outcome, verdict: str) -> list[str]:
    """What temp and heap say where that is something else."""
    others: tuple[Quantity, ...] = ("temp", "heap")
    said: dict[str, list[str]] = {}
    for quantity in others:
        said.setdefault(outcome.verdict_by(quantity), []).append(NAMES[quantity])
    return [
        f"by {' and '.join(names)}: {other}"
        for other, names in said.items()
        if other not in (verdict, NOT_APPLICABLE)
    ]


def _why_no_effect(
    experiment: Experiment, verdict: str, one: Measurement, other: Measurement
) -> list[str]:
    """What today's compiler makes of a difference that has no effect on memory."""
    if one.fingerprint == other.fingerprint:
        why = f", as {experiment.same_program}" if experiment.same_program else ""
        return [f"both arms compile to the same program{why}"]
    if verdict != "no effect" or experiment.kind == "trace":
        return []
    judged_by = experiment.judged_by
    if one.bytes_of(judged_by) == other.bytes_of(judged_by):
        return [f"two programs with the same {judged_by}"]
    return [f"two programs whose {judged_by} is less than 1 % apart"]


def _outcome(
    experiment: Experiment,
    results: tuple[Measurement | str, Measurement | str],
    platform: Platform,
    numbers: Callable[[Experiment], Numerics],
    progress: Progress,
) -> Outcome:
    outcome = compare_measurements(experiment, *results)
    notes, failed, numerics = [outcome.note] if outcome.note else [], outcome.failed, None
    if platform.kind == "local":
        notes.append("numbers were not compared: that needs virtual CPU devices")
    else:
        progress(f"{experiment.name}: comparing losses and gradients at tiny on the CPU")
        try:
            numerics = numbers(experiment)
        except Exception as error:  # an arm that does not compile need not run either
            failed = True
            notes.append(f"numbers were not compared: {str(error).strip().splitlines()[0][:200]}")
    if numerics and not numerics.within_tolerance:
        failed = True
        notes.append(
            f"the arms differ in {numerics.worst}, by {numerics.worst_relative:.3g} of its largest "
            "value"
        )
    if numerics and numerics.all_zero:
        notes.append(f"zero in both arms, so nothing is compared: {', '.join(numerics.all_zero)}")
    return dataclasses.replace(outcome, numerics=numerics, note="; ".join(notes), failed=failed)
