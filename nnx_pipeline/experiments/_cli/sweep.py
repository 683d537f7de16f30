"""The option `compare --sweep`: figures of a program for several values of a config field."""

from collections.abc import Mapping, Sequence

from nnx_pipeline.config._overrides import parse_overrides
from nnx_pipeline.experiments._registry import choose
from nnx_pipeline.experiments.growth import MESH, sweep
from nnx_pipeline.lab._cli.options import chosen_config, given, is_given
from nnx_pipeline.lab._cli.outputs import ComparisonOutputs
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._cli.values import Chosen, Target
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab._report.sweep import sweep_view
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.errors import InputError


def run_sweep(
    names: Sequence[str],
    texts: Sequence[str],
    chosen: Chosen,
    target: Target,
    cache: Cache,
    outputs: ComparisonOutputs,
) -> None:
    """Compiles a program for each value of a config field and reports the figures.

    - `names`: one experiment, to compile both arms, or none for the plain training step.
    - `texts`: `field=value,value` for each field, or `mesh=axes/axes`. The first field is the one
      that figures are given for; the others change in step with it.
    - `chosen`: the preset and its overrides, which must not name a swept field.
    - `target`: the mesh and the platform; figures of one kind of matrix products only.
    - `cache`: where figures are kept and looked up.
    - `outputs`: where the result goes.

    Raises InputError for options that do not go together, and Failed if a program did not compile.
    """
    experiments = choose(names) if names else []
    if target.gemm == "both":
        raise InputError("--sweep cannot be combined with --gemm both; leave it out")
    flags = given()
    for option in ("markdown_path", "format", "fail_above"):
        if option in flags:
            raise InputError(f"--sweep cannot be combined with {flags[option]}; leave it out")
    fields = dict(_parsed(text) for text in texts)
    _check_fields(fields, texts, chosen.assignments)
    config, mesh, platforms = chosen_config(chosen), target.mesh_config, target.platforms()
    if len(experiments) > 1:
        several = ", ".join(experiment.name for experiment in experiments)
        raise InputError(f"--sweep takes one experiment, or none for the plain step; not {several}")
    with progress() as say, compiler_errors():
        result = sweep(
            config,
            mesh,
            fields,
            experiment=experiments[0] if experiments else None,
            platform=platforms[0],
            cache=cache,
            progress=say,
        )
    on = "several meshes" if MESH in fields else mesh
    title = f"{', '.join(names) or 'training step'} of {chosen.model} on {on}: per device"
    show(sweep_view(title, result), json_path=outputs.json_path)
    emit_json(outputs.json_path, result.to_json())
    outputs.write_sweep(title, result)
    if result.errors:
        raise Failed(f"failed: {'; '.join(result.errors)}")


def _check_fields(
    fields: Mapping[str, object], texts: Sequence[str], assignments: Sequence[str]
) -> None:
    """Raises InputError for a field that is swept twice, or both set and swept."""
    for option in ("mesh", "dcn"):
        if MESH in fields and is_given(option):
            raise InputError(
                f"--{option} has no effect beside --sweep mesh; leave out one of the two"
            )
    for key in parse_overrides(assignments):
        if key in fields:
            raise InputError(
                f"--set {key} has no effect beside --sweep {key}; leave out one of the two"
            )
    swept = [_parsed(text)[0] for text in texts]
    for field in fields:
        if swept.count(field) > 1:
            raise InputError(
                f"--sweep {field} is given {swept.count(field)} times; give each field once"
            )


def _parsed(text: str) -> tuple[str, list[str]]:
    """The field and the values of `field=value,value`; meshes have commas, and slashes between."""
    field, separator, values = text.partition("=")
    parts = [part.strip() for part in values.split("/" if field.strip() == MESH else ",")]
    if not separator or not field.strip() or not all(parts):
        raise InputError(
            f"--sweep {text!r} is not of the form field=value,value; "
            "write for example --sweep pipeline.num_microbatches=4,8,16, or --sweep "
            "mesh=stage=4,fsdp=2/fsdp=8"
        )
    return field.strip(), parts
