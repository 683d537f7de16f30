"""How memory, work and compile time grow with a field of the config."""

from collections.abc import Mapping, Sequence
from typing import Any

from nnx_pipeline.config.config import Config
from nnx_pipeline.config.overrides import apply_overrides, known_keys, value_of
from nnx_pipeline.errors import InputError, nearest
from nnx_pipeline.experiments.arms import Experiment, Program
from nnx_pipeline.experiments.run import NO_CACHE, measure_program
from nnx_pipeline.lab.comparison.sweep import Point, Sweep
from nnx_pipeline.lab.compile.cache import Cache
from nnx_pipeline.lab.compile.measure import Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.mesh import MeshConfig


def sweep(
    config: Config,
    mesh: MeshConfig | str,
    fields: Mapping[str, Sequence[Any]],
    *,
    experiment: Experiment | None = None,
    platform: Platform | str = "cpu",
    cache: Cache = NO_CACHE,
    progress: Progress = lambda text: None,
) -> Sweep:
    """Compiles one training step for each value of a config field.

    - `config`: the config whose field is changed.
    - `mesh`: the mesh, or a text such as `stage=4,fsdp=2`.
    - `fields`: the values of the field by its dotted name, such as `pipeline.num_microbatches`.
      Further fields must have as many values and change along with it: a batch that grows with the
      number of microbatches keeps microbatches of the same size.
    - `experiment`: sweeps both of its arms instead of the plain step.
    - `platform`: what to compile for, such as `tpu:v5p:2x2x2`.
    - `cache`: where figures are kept and looked up.
    - `progress`: called with a text when a phase begins.

    Raises InputError, before anything is compiled, for a field that does not exist and for values
    that its config, the mesh or the experiment refuses. A program that does not compile is a point
    with an error.
    """
    if isinstance(mesh, str):
        mesh = MeshConfig.parse(mesh)
    if isinstance(platform, str):
        platform = Platform.parse(platform)
    field = next(iter(fields))
    configs = _configs(config, fields)
    for each in configs:
        each.check_mesh(mesh)
    labels = (experiment.a.label, experiment.b.label) if experiment else ("step",)
    programs = [
        experiment.programs(each, mesh) if experiment else (Program(each),) for each in configs
    ]
    points: dict[str, list[Point]] = {label: [] for label in labels}
    # Checked for all values first: an arm that sets a swept field would give one program for all.
    for each, row in zip(configs, programs, strict=True):
        value = value_of(each, field)
        for swept in fields:
            if any(value_of(program.config, swept) != value_of(each, swept) for program in row):
                raise InputError(
                    f"{experiment.name if experiment else 'step'} sets {swept} itself, so that "
                    f"{value_of(each, swept)} would have no effect; sweep another field"
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
    """One config per value; all fields take their values in the same order."""
    known, (first, values) = known_keys(), next(iter(fields.items()))
    for field, given in fields.items():
        if field not in known:
            raise InputError(f"sweep of {field}: no such config field; {nearest(field, known)}")
        if len(given) != len(values):
            raise InputError(
                f"sweep of {field} has {len(given)} values and that of {first} {len(values)}; "
                "fields that are swept together need equally many"
            )
    rows = zip(*fields.values(), strict=True)
    texts = [dict(zip(fields, map(str, row), strict=True)) for row in rows]
    configs = [apply_overrides(config, row) for row in texts]
    if len({repr(value_of(each, first)) for each in configs}) < max(len(values), 2):
        raise InputError(f"sweep of {first} needs two different values or more, none of them twice")
    return configs


def _named(progress: Progress, name: str) -> Progress:
    return lambda text: progress(f"{name}: {text}")
