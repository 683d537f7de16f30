"""Runs experiments: compiles both arms, checks that they compute the same, gives the verdict."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

import jax

from nnx_pipeline.config.config import Config
from nnx_pipeline.config.overrides import value_of
from nnx_pipeline.errors import InputError
from nnx_pipeline.experiments.arms import Experiment, Program
from nnx_pipeline.experiments.numerics import VIRTUAL_CPUS, compare_numerics
from nnx_pipeline.experiments.programs import measure
from nnx_pipeline.lab.comparison.numerics import Numerics
from nnx_pipeline.lab.comparison.outcome import (
    NOT_APPLICABLE,
    Outcome,
    Question,
    compare_measurements,
)
from nnx_pipeline.lab.compile.cache import Cache
from nnx_pipeline.lab.compile.cache_key import key_of
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.mesh import MeshConfig

NO_CACHE = Cache(None)


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
    """Compiles both arms of each experiment and compares their numbers on the CPU.

    - `experiments`: the experiments, run in order.
    - `config`, `mesh`: those that all experiments start from.
    - `platform`: what to compile for.
    - `given`: dotted keys of the config that the user chose; an outcome says where an arm has
      another value nevertheless.
    - `cache`: where figures are kept and looked up.
    - `progress`: called with a text when a phase begins.
    - `finished`: called with each outcome as soon as it is known.

    Arms that are the same program are compiled once. Input errors of the shared config are raised.
    An experiment that says nothing on this config and mesh is not applicable, and what goes wrong
    inside one arm is in the note of the outcome, with the figures of the other arm.
    """
    config.check_mesh(mesh)
    results: dict[Program, Measurement | str] = {}
    # Either compiling or comparing numbers comes first and starts JAX, which fixes the number of
    # devices: it must be enough for both.
    virtual_cpus = max(VIRTUAL_CPUS, mesh.num_devices if platform.kind == "cpu" else 1)
    numbers = functools.partial(
        compare_numerics, config=config, cache=cache, virtual_cpus=virtual_cpus
    )
    outcomes = []
    for experiment in experiments:
        try:
            programs = experiment.programs(config, mesh)
        except InputError as error:
            outcomes.append(
                Outcome(question=experiment.question, verdict=NOT_APPLICABLE, note=str(error))
            )
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
        # The CPU machine code of some sixty programs is more than a process can map.
        jax.clear_caches()
    return outcomes


def compare_settings(
    config: Config,
    mesh: MeshConfig,
    platforms: tuple[Platform, Platform],
    labels: tuple[str, str],
    *,
    cache: Cache = NO_CACHE,
    progress: Progress = lambda text: None,
) -> Outcome:
    """Compiles one training step with two settings of the compiler and compares its memory.

    - `config`, `mesh`: the program of both arms.
    - `platforms`: what to compile each arm for: one platform with two settings.
    - `labels`: what the arms are called.
    - `cache`, `progress`: as for `run_experiments`.

    The verdict is about the account. The numbers that the arms compute are not compared, because
    that takes the devices. Raises InputError as `run_experiments` does, and for a setting that the
    compiler does not take.
    """
    config.check_mesh(mesh)
    one, other = (
        measure_program(Program(config), mesh, platform, cache, _named(progress, label))
        for platform, label in zip(platforms, labels, strict=True)
    )
    question = Question(
        name="step",
        claim="",
        difference="one training step with two settings of the compiler",
        labels=labels,
        judged_by="account",
    )
    return compare_measurements(question, one, other)


def _overruled(
    experiment: Experiment, config: Config, programs: Sequence[Program], given: Collection[str]
) -> list[str]:
    """Which values that the user chose an experiment replaces, and by what in which arm."""
    notes = []
    for key in given:
        chosen = value_of(config, key)
        values = {
            f"{arm.label} has {value_of(program.config, key)}"
            for arm, program in zip((experiment.a, experiment.b), programs, strict=True)
            if value_of(program.config, key) != chosen
        }
        if values:
            notes.append(f"{key}={chosen} is overridden: {', '.join(sorted(values))}")
    return notes


def _named(progress: Progress, name: str) -> Progress:
    return lambda text: progress(f"{name}: {text}")


def measure_program(
    program: Program, mesh: MeshConfig, platform: Platform, cache: Cache, progress: Progress
) -> Measurement | str:
    """The measurement of a program, or the first line of the error that stopped it.

    - `program`, `mesh`, `platform`: what to compile, on which mesh and for what.
    - `cache`: looked up first, and given the new measurement.
    - `progress`: called with a text when a phase begins.

    Raises InputError when program, mesh and platform do not fit together.
    """
    key = key_of(platform, "measurement", mesh, program)
    if (known := cache.get(key)) is not None:
        try:
            return Measurement.from_cache(*known)
        except (KeyError, TypeError, ValueError):
            pass  # an entry that something else has written
    try:
        result = measure(program, mesh, platform, virtual_cpus=VIRTUAL_CPUS, progress=progress)
    except InputError:
        raise
    except Exception as error:  # an arm may break any compiler in any way: the report says how
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0][:200]
    cache.put(key, result.to_cache())
    return result


def _outcome(
    experiment: Experiment,
    results: tuple[Measurement | str, Measurement | str],
    platform: Platform,
    numbers: Callable[[Experiment], Numerics],
    progress: Progress,
) -> Outcome:
    """The outcome of an experiment from its measurements, with its numbers compared."""
    outcome = compare_measurements(experiment.question, *results)
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
