"""Run an experiment: compile both arms, check that they compute the same, give the verdict."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab.arms import Experiment, Program
from nnx_pipeline.lab.attribution import BufferDifference, difference
from nnx_pipeline.lab.compile import Measurement, Progress, measure_step
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.mesh import MeshConfig, make_mesh
from nnx_pipeline.presets import preset
from nnx_pipeline.train import loss_and_gradients, make_state
from nnx_pipeline.train.data import learnable_batches

NOT_APPLICABLE = "not applicable"
NO_EFFECT = 0.01  # a relative difference of temp bytes below this is no effect
VIRTUAL_CPUS = 8


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Loss and gradients of the arms at `tiny` on CPU devices.

    max_abs_diff: the largest difference of any value. within_tolerance: whether it is at most the
    experiment's tolerance times the largest gradient or loss.
    """

    max_abs_diff: float
    bitwise_equal: bool
    within_tolerance: bool
    mesh: str


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
    def buffers(self) -> tuple[BufferDifference, ...] | None:
        """What the heap of b holds more or less than that of a; None where that is not known."""
        one, other = (result.attribution if result else None for result in (self.a, self.b))
        return difference(one, other) if one and other else None

    def to_json(self) -> dict[str, Any]:
        """One entry of `ab --json`."""
        arms = ((self.experiment.a, self.a), (self.experiment.b, self.b))
        delta, ratio = _difference(self.a, self.b)
        buffers = self.buffers
        return {
            "name": self.experiment.name,
            "claim": self.experiment.claim,
            "difference": self.experiment.difference,
            "arms": {
                key: {"label": arm.label, **result.to_json()} if result else {"label": arm.label}
                for key, (arm, result) in zip("ab", arms, strict=True)
            },
            "delta_temp_bytes": delta,
            "ratio_temp": ratio,
            "numerics": dataclasses.asdict(self.numerics) if self.numerics else None,
            "verdict": self.verdict,
            "note": self.note,
            "buffers": None if buffers is None else [dataclasses.asdict(row) for row in buffers],
        }


def run_experiments(
    experiments: Sequence[Experiment],
    config: Config,
    mesh: MeshConfig,
    platform: Platform,
    *,
    progress: Progress = lambda text: None,
    finished: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Compiles the arms for `platform` and compares their numbers on the CPU.

    finished: called with each outcome as soon as it is known.
    Arms that are the same program are compiled once. Input errors of the shared config are raised;
    an experiment that says nothing on this config and mesh is not applicable, and what goes wrong
    inside one arm stands in the outcome beside the other arm.
    """
    config.check_mesh(mesh)
    results: dict[Program, Measurement | str] = {}
    outcomes = []
    for experiment in experiments:
        try:
            programs = experiment.programs(config, mesh)
        except InputError as error:
            outcomes.append(Outcome(experiment=experiment, verdict=NOT_APPLICABLE, note=str(error)))
            continue
        for arm, program in zip((experiment.a, experiment.b), programs, strict=True):
            if program not in results:
                named = _named(progress, f"{experiment.name}, {arm.label}")
                results[program] = _measure(program, mesh, platform, named)
        measured = (results[programs[0]], results[programs[1]])
        outcomes.append(_outcome(experiment, config, measured, platform, progress))
        finished(outcomes[-1])
        # Machine code for the CPU of some sixty programs is more than a process can map.
        jax.clear_caches()
    return outcomes


def _named(progress: Progress, name: str) -> Progress:
    return lambda text: progress(f"{name}: {text}")


def _measure(
    program: Program, mesh: MeshConfig, platform: Platform, progress: Progress
) -> Measurement | str:
    """The measurement, or the first line of what the compiler said against it."""
    try:
        return measure_step(
            program.config,
            mesh,
            platform,
            parts=program.parts,
            layout=program.layout,
            virtual_cpus=VIRTUAL_CPUS,
            progress=progress,
        )
    except InputError:
        raise
    except Exception as error:  # an arm may break any compiler in any way: the report says how
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0][:200]


def compare_measurements(
    experiment: Experiment, a: Measurement | str, b: Measurement | str
) -> Outcome:
    """The outcome of two arms by their figures alone; a text is why there are none."""
    notes = []
    for arm, result in ((experiment.a, a), (experiment.b, b)):
        if isinstance(result, str):
            notes.append(f"{arm.label} did not compile: {result}")
    one, other = (None if isinstance(result, str) else result for result in (a, b))
    if one and other and one.fingerprint == other.fingerprint:
        notes.append("both arms compile to the same program")
    elif one and other and one.memory.heap_bytes and other.memory.heap_bytes:
        by_heap = _verdict_of(one.memory.heap_bytes, other.memory.heap_bytes)
        if by_heap != _verdict(one, other):
            notes.append(f"by the heap: {by_heap}")
    return Outcome(
        experiment=experiment,
        a=one,
        b=other,
        verdict=_verdict(one, other),
        note="; ".join(notes),
        failed=one is None or other is None,
    )


def _outcome(
    experiment: Experiment,
    config: Config,
    results: tuple[Measurement | str, Measurement | str],
    platform: Platform,
    progress: Progress,
) -> Outcome:
    outcome = compare_measurements(experiment, *results)
    notes, failed, numerics = [outcome.note] if outcome.note else [], outcome.failed, None
    if platform.kind == "local":
        notes.append("numbers were not compared: that needs virtual CPU devices")
    else:
        progress(f"{experiment.name}: comparing losses and gradients at tiny on the CPU")
        try:
            numerics = compare_numerics(experiment, config)
        except Exception as error:  # an arm that does not compile need not run either
            failed = True
            notes.append(f"numbers were not compared: {str(error).strip().splitlines()[0][:200]}")
    if numerics and not numerics.within_tolerance:
        failed = True
        notes.append(f"the arms differ by {numerics.max_abs_diff:.3g}")
    return dataclasses.replace(outcome, numerics=numerics, note="; ".join(notes), failed=failed)


def compare_numerics(experiment: Experiment, config: Config) -> Numerics:
    """Loss and gradients of both arms, from the same weights and batch, in float32.

    They run at `tiny` with the pipeline of `config`, where that fits the eight devices.
    """
    mesh = _mesh_of_numbers(experiment)
    values = [_loss_and_gradients(program, mesh) for program in _at_tiny(experiment, config, mesh)]
    pairs = list(zip(*values, strict=True))
    largest = max(float(np.max(np.abs(a))) for a, _ in pairs)
    difference = max(float(np.max(np.abs(a - b))) for a, b in pairs)
    return Numerics(
        max_abs_diff=difference,
        bitwise_equal=all(a.tobytes() == b.tobytes() for a, b in pairs),
        within_tolerance=difference <= experiment.tolerance * largest,
        mesh=str(mesh),
    )


@functools.lru_cache(maxsize=64)
def _loss_and_gradients(program: Program, numbers: MeshConfig) -> list[np.ndarray]:
    config, parts, layout = program
    mesh = make_mesh(numbers, jax.devices("cpu"), sharding=config.pipeline.sharding)
    with jax.set_mesh(mesh):
        model = make_state(config, mesh, parts=parts, layout=layout).model
        batch = next(learnable_batches(config, mesh, layout=layout))
        (loss, _), gradients = jax.jit(loss_and_gradients)(model, batch)
    return [np.asarray(leaf) for leaf in (loss, *jax.tree.leaves(gradients))]


def _mesh_of_numbers(experiment: Experiment) -> MeshConfig:
    """Eight devices with the axes that the experiment needs."""
    if "data" in experiment.needs:
        return MeshConfig(data=2, stage=VIRTUAL_CPUS // 2)
    return MeshConfig(stage=VIRTUAL_CPUS // 2, fsdp=2)


def _at_tiny(experiment: Experiment, config: Config, mesh: MeshConfig) -> tuple[Program, Program]:
    """Both arms at `tiny`, with the pipeline of `config` or one that fits the eight devices."""
    tiny = preset("tiny")
    fitting = dataclasses.replace(config.pipeline, num_microbatches=8, num_repeats=2)
    try:
        like = dataclasses.replace(tiny, pipeline=config.pipeline)
        like.check_mesh(mesh)
        return experiment.programs(like, mesh)
    except InputError:
        return experiment.programs(dataclasses.replace(tiny, pipeline=fitting), mesh)


def _difference(a: Measurement | None, b: Measurement | None) -> tuple[int | None, float | None]:
    if a is None or b is None:
        return None, None
    before, after = a.memory.temp_bytes, b.memory.temp_bytes
    return after - before, after / before if before else None


def _verdict(a: Measurement | None, b: Measurement | None) -> str:
    """Whether arm b holds fewer temp bytes, as every claim here says."""
    if a is None or b is None:
        return NOT_APPLICABLE
    return _verdict_of(a.memory.temp_bytes, b.memory.temp_bytes)


def _verdict_of(before: int | None, after: int | None) -> str:
    if not before or after is None:
        return NOT_APPLICABLE
    ratio = after / before
    if abs(ratio - 1) < NO_EFFECT:
        return "no effect"
    return "holds" if ratio < 1 else "opposite"
