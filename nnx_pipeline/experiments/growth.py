"""How memory, work and time grow with a field of the config, or differ between meshes."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from nnx_pipeline.config._overrides import apply_overrides, known_keys, value_of
from nnx_pipeline.config.config import Config
from nnx_pipeline.experiments._arms import Experiment, Program
from nnx_pipeline.experiments._measuring import NO_CACHE, Job, measure_programs
from nnx_pipeline.lab.comparison.sweep import Point, Sweep
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile.measure import Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError, nearest
from nnx_pipeline.lab.mesh import MeshConfig

MESH = "mesh"  # swept like a field of the config


def sweep(
    config: Config,
    mesh: MeshConfig | str,
    fields: Mapping[str, Sequence[object]],
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
      number of microbatches keeps microbatches of the same size. The name `mesh` sweeps meshes,
      such as `stage=4,fsdp=2`, in the place of the argument.
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
    rows = _rows(config, mesh, fields)
    field = next(iter(fields))
    for row in rows:
        row.config.check_mesh(row.mesh)
    labels = (experiment.a.label, experiment.b.label) if experiment else ("step",)
    # All of them before any is compiled: what an experiment refuses is said at once.
    programs = [_programs(row, experiment, fields) for row in rows]
    names = dict[Job, str]()
    for row, arms in zip(rows, programs, strict=True):
        for label, program in zip(labels, arms, strict=True):
            names.setdefault((program, row.mesh), f"{label}, {field}={row.value}")
    measured = measure_programs(names, platform, cache=cache, progress=progress)
    points: dict[str, list[Point]] = {label: [] for label in labels}
    for row, arms in zip(rows, programs, strict=True):
        for label, program in zip(labels, arms, strict=True):
            result = measured[program, row.mesh]
            pair = (None, result) if isinstance(result, str) else (result, "")
            points[label].append(Point(value=row.value, result=pair[0], error=pair[1]))
    return Sweep(
        field=field,
        arms=tuple((label, tuple(points[label])) for label in labels),
        platform=str(platform),
        along=tuple(
            (name, tuple(_value_in(row, name) for row in rows)) for name in list(fields)[1:]
        ),
    )


def _value_in(row: "_Row", field: str) -> object:
    return str(row.mesh) if field == MESH else value_of(row.config, field)


class _Row(NamedTuple):
    """One value of a sweep, with the config and the mesh that it gives."""

    value: object
    config: Config
    mesh: MeshConfig


def _rows(config: Config, mesh: MeshConfig, fields: Mapping[str, Sequence[object]]) -> list[_Row]:
    """One row per value; all fields take their values in the same order."""
    if not fields:
        raise InputError("a sweep of no field; give one, as {'pipeline.num_microbatches': [4, 8]}")
    known, (first, values) = [*known_keys(), MESH], next(iter(fields.items()))
    for field, column in fields.items():
        if field == "platform":
            raise InputError("sweep of platform: give compare several --platform instead")
        if field not in known:
            raise InputError(f"sweep of {field}: no such config field; {nearest(field, known)}")
        if len(column) != len(values):
            raise InputError(
                f"sweep of {field} has {len(column)} values and that of {first} {len(values)}; "
                "fields that are swept together need equally many"
            )
    rows = []
    for at in range(len(values)):
        texts = {field: str(column[at]) for field, column in fields.items()}
        on = MeshConfig.parse(texts.pop(MESH)) if MESH in texts else mesh
        each = apply_overrides(config, texts)
        rows.append(_Row(str(on) if first == MESH else value_of(each, first), each, on))
    if len({repr(row.value) for row in rows}) < max(len(values), 2):
        raise InputError(f"sweep of {first} needs two different values or more, none of them twice")
    return rows


def _programs(
    row: _Row, experiment: Experiment | None, fields: Collection[str]
) -> tuple[Program, ...]:
    """The programs of a row, one per arm; InputError where an arm sets a swept field itself."""
    if experiment is None:
        return (Program(row.config),)
    programs = experiment.programs(row.config, row.mesh)
    for swept in (field for field in fields if field != MESH):
        value = value_of(row.config, swept)
        if any(value_of(program.config, swept) != value for program in programs):
            # Every value would give the same program.
            raise InputError(
                f"{experiment.name} sets {swept} itself, so that {value} would have no effect; "
                "sweep another field"
            )
    return programs
