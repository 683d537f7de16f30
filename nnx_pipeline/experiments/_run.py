"""Runs experiments: compiles both arms, checks that they compute the same, gives the verdict."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

import jax

from nnx_pipeline.config._overrides import value_of
from nnx_pipeline.config.config import Config
from nnx_pipeline.experiments._arms import Experiment, Program
from nnx_pipeline.experiments._measuring import NO_CACHE, measure_programs
from nnx_pipeline.experiments._numerics import VIRTUAL_CPUS, compare_arms
from nnx_pipeline.lab.comparison._numerics import Numerics
from nnx_pipeline.lab.comparison.outcome import (
    NOT_APPLICABLE,
    Outcome,
    Question,
    compare_measurements,
)
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import MeshConfig


def run_experiments(
    experiments: Sequence[Experiment],
    config: Config,
    mesh: MeshConfig,
    platform: Platform,
    *,
    overrides: Collection[str] = (),
    cache: Cache = NO_CACHE,
    progress: Progress = lambda text: None,
    finished: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Compiles both arms of each experiment and compares their numbers on the CPU.

    - `experiments`: the experiments, run in order.
    - `config`, `mesh`: what all experiments start from.
    - `platform`: what to compile for.
    - `overrides`: dotted keys of the config that the user chose; an outcome says where an arm has
      another value nevertheless.
    - `cache`: where figures are kept and looked up.
    - `progress`: called with a text when a phase begins.
    - `finished`: called with each outcome, one after the other, once all programs are compiled.

    Arms that are the same program are compiled once. Input errors of the shared config are raised.
    An experiment that says nothing on this config and mesh is not applicable, and what goes wrong
    inside one arm is in the note of the outcome, with the figures of the other arm.
    """
    config.check_mesh(mesh)
    # Either compiling or comparing numbers comes first and starts JAX, which fixes the number of
    # devices: it must be enough for both.
    virtual_cpus = max(VIRTUAL_CPUS, mesh.num_devices if platform.kind == "cpu" else 1)
    numbers = functools.partial(compare_arms, config=config, cache=cache, virtual_cpus=virtual_cpus)
    pairs = [_programs(experiment, config, mesh) for experiment in experiments]
    results = measure_programs(
        _jobs(experiments, pairs, mesh), platform, cache=cache, progress=progress
    )
    outcomes = []
    for experiment, programs in zip(experiments, pairs, strict=True):
        if isinstance(programs, InputError):
            outcome = Outcome(
                question=experiment.question, verdict=NOT_APPLICABLE, note=str(programs)
            )
        else:
            measured = (results[programs[0], mesh], results[programs[1], mesh])
            outcome = _outcome(experiment, measured, platform, numbers, progress)
            notes = [outcome.note, *_overruled(experiment, config, programs, overrides)]
            outcome = dataclasses.replace(outcome, note="; ".join(filter(None, notes)))
            # The CPU machine code of some sixty programs is more than a process can map.
            jax.clear_caches()
        outcomes.append(outcome)
        finished(outcome)
    return outcomes


def _programs(
    experiment: Experiment, config: Config, mesh: MeshConfig
) -> tuple[Program, Program] | InputError:
    """The programs of both arms, or why the experiment says nothing here."""
    try:
        return experiment.programs(config, mesh)
    except InputError as error:
        return error


def _jobs(
    experiments: Sequence[Experiment],
    pairs: Sequence[tuple[Program, Program] | InputError],
    mesh: MeshConfig,
) -> dict[tuple[Program, MeshConfig], str]:
    """Each program once, with the name of the first arm that it is."""
    named: dict[tuple[Program, MeshConfig], str] = {}
    for experiment, programs in zip(experiments, pairs, strict=True):
        if not isinstance(programs, InputError):
            for arm, program in zip((experiment.a, experiment.b), programs, strict=True):
                named.setdefault((program, mesh), f"{experiment.name}, {arm.label}")
    return named


def compare_steps(
    configs: tuple[Config, Config],
    mesh: MeshConfig,
    platforms: tuple[Platform, Platform],
    labels: tuple[str, str],
    *,
    cache: Cache = NO_CACHE,
    progress: Progress = lambda text: None,
) -> Outcome:
    """Compiles two training steps, or one with two settings of the compiler, and compares them.

    - `configs`, `mesh`: the programs of the arms, which may be one.
    - `platforms`: what to compile each arm for: one platform, of which the settings may differ.
    - `labels`: what the arms are called.
    - `cache`, `progress`: as for `run_experiments`.

    The verdict is about the account. The numbers that the arms compute are not compared, because
    that takes the devices. Raises InputError as `run_experiments` does, and for a setting that the
    compiler does not take.
    """
    results = []
    for config, platform, label in zip(configs, platforms, labels, strict=True):
        config.check_mesh(mesh)
        job = (Program(config), mesh)
        results.append(
            measure_programs({job: label}, platform, cache=cache, progress=progress)[job]
        )
    what = "one training step with two settings of the compiler"
    question = Question(
        name="step",
        claim="",
        difference=what if configs[0] == configs[1] else "the training steps of two presets",
        labels=labels,
        judged_by="account",
    )
    return compare_measurements(question, *results)


def _overruled(
    experiment: Experiment, config: Config, programs: Sequence[Program], overrides: Collection[str]
) -> list[str]:
    """Which values that the user chose an experiment replaces, and by what in which arm."""
    notes = []
    for key in overrides:
        chosen = value_of(config, key)
        values = {
            f"{arm.label} has {value_of(program.config, key)}"
            for arm, program in zip((experiment.a, experiment.b), programs, strict=True)
            if value_of(program.config, key) != chosen
        }
        if values:
            notes.append(f"{key}={chosen} is overridden: {', '.join(sorted(values))}")
    return notes


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
