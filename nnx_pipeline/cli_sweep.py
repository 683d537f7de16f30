"""`ab --sweep`: figures against a field of the config."""

from collections.abc import Sequence

from nnx_pipeline.cli_support import Failed, compiler_errors, progress
from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab import report
from nnx_pipeline.lab.cache import Cache
from nnx_pipeline.lab.experiments import Experiment
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.lab.sweep import sweep
from nnx_pipeline.lab.sweep_chart import sweep_chart
from nnx_pipeline.lab.sweep_view import sweep_view
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.overrides import parse_overrides
from nnx_pipeline.pipeline.picture import save_figure


def run_sweep(
    title: str,
    texts: Sequence[str],
    experiments: Sequence[Experiment],
    config: Config,
    mesh: MeshConfig,
    platform: Platform,
    *,
    cache: Cache,
    chart_path: str | None,
    json_path: str | None,
) -> None:
    """Sweeps the first field, the others along with it, and reports.

    texts: `field=value,value` each. experiments: none for the plain step, or one for its arms.
    """
    if len(experiments) > 1:
        names = ", ".join(experiment.name for experiment in experiments)
        raise InputError(f"--sweep takes one experiment, or none for the plain step; not {names}")
    fields = [_parsed(text) for text in texts]
    (field, values), along = fields[0], dict(fields[1:])
    if len({name for name, _ in fields}) < len(fields):
        raise InputError(f"--sweep {texts[-1]}: each field once")
    with progress() as say, compiler_errors():
        found = sweep(
            config,
            mesh,
            field,
            values,
            along=along,
            experiment=experiments[0] if experiments else None,
            platform=platform,
            cache=cache,
            progress=say,
        )
    report.show(sweep_view(title, found), json_path=json_path)
    report.emit_json(json_path, found.to_json())
    if chart_path:
        save_figure(sweep_chart(title, found), chart_path)
    if found.errors:
        raise Failed(f"failed: {'; '.join(found.errors)}")


def check_sweep(texts: Sequence[str], assignments: Sequence[str]) -> None:
    """Raises InputError where a field is set and swept."""
    swept = {_parsed(text)[0] for text in texts}
    for key in parse_overrides(assignments):
        if key in swept:
            raise InputError(f"--set {key} and --sweep {key}: only the sweep counts; leave out one")


def _parsed(text: str) -> tuple[str, list[str]]:
    field, separator, values = text.partition("=")
    parts = [part.strip() for part in values.split(",")]
    if not separator or not field.strip() or not all(parts):
        raise InputError(
            f"--sweep {text!r} is not of the form field=value,value; "
            "write for example --sweep pipeline.num_microbatches=4,8,16"
        )
    return field.strip(), parts
