"""The command `ab`: two programs that differ in one thing, compared."""

import click
from rich.table import Table

from nnx_pipeline import ending
from nnx_pipeline.cli_options import (
    check_alone,
    config_options,
    configured,
    gemm_option,
    json_option,
    mesh_option,
    platform_option,
    platforms,
)
from nnx_pipeline.cli_report import check_reports, report_options, write_outcomes
from nnx_pipeline.cli_support import Failed, compiler_errors, progress
from nnx_pipeline.cli_sweep import check_sweep, run_sweep
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab import report
from nnx_pipeline.lab.cache import Cache
from nnx_pipeline.lab.compare import run_experiments
from nnx_pipeline.lab.experiments import ELSEWHERE, EXPERIMENTS, Experiment, choose
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.overrides import parse_overrides


@click.command("ab", epilog="Example: nnx-pipeline ab stage-vmap --platform tpu:v5p:2x2x2")
@click.argument("names", nargs=-1, metavar="[EXPERIMENT …]")
@click.option("--list", "list_only", is_flag=True, help="Name, claim and difference of each.")
@config_options("tiny")
@mesh_option("stage=4,fsdp=2")
@platform_option
@gemm_option
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="FIELD=V,V,…",
    help="Compile for each value of a config field, and fit a slope; further ones change along.",
)
@click.option("--fresh", is_flag=True, help="Measure again what an earlier run has kept.")
@report_options
@json_option
def ab_command(
    names: tuple[str, ...],
    list_only: bool,
    model: str,
    assignments: tuple[str, ...],
    mesh: str,
    platform: str,
    gemm: str | None,
    sweeps: tuple[str, ...],
    fresh: bool,
    html_path: str | None,
    chart_path: str | None,
    json_path: str | None,
) -> None:
    """Compile two arms that differ in one thing and compare their memory.

    Without names a short set runs, with `all` every experiment. What an earlier run has measured
    with the same versions, flags and source is not measured again. For NVIDIA the arms are compiled
    with both kinds of matrix products. With --sweep the plain step, or the arms of one experiment,
    are compiled for each value, for NVIDIA with Triton's products unless --gemm says otherwise.
    Exit 1 when an arm did not compile or the arms do not compute the same.
    """
    check_reports(html_path, chart_path, json_path)
    if list_only:
        check_alone("list_only", "json_path")
        _list_experiments(json_path)
        return
    chosen = choose(names)
    config, mesh_config = configured(model, assignments), MeshConfig.parse(mesh)
    targets, cache = platforms(platform, gemm), Cache.of_user(fresh=fresh)
    if cache.folder is not None:
        ending.note("what was measured is kept, and the same command goes on from there")
    if sweeps:
        if html_path or gemm == "both":
            raise InputError("--sweep goes without --html and --gemm both; leave them out")
        check_sweep(sweeps, assignments)
        named = chosen if names else []
        title = f"{', '.join(names) or 'training step'} of {model} on {mesh_config}: per device"
        run_sweep(
            title,
            sweeps,
            named,
            config,
            mesh_config,
            targets[0],
            cache=cache,
            chart_path=chart_path,
            json_path=json_path,
        )
        return
    with progress() as say, compiler_errors():
        given = parse_overrides(assignments)
        found = [
            run_experiments(
                chosen, config, mesh_config, target, given=given, cache=cache, progress=say
            )
            for target in targets
        ]
    title = f"{model} on {mesh_config}, {platform}: memory of one training step per device"
    report.show_outcomes(title, found, platform, json_path=json_path)
    write_outcomes(title, found, html_path, chart_path)
    failed = [one.experiment.name for outcomes in found for one in outcomes if one.failed]
    if failed:
        raise Failed(f"failed: {', '.join(dict.fromkeys(failed))}; the notes say why")


def _list_experiments(json_path: str | None) -> None:
    table = Table()
    for column in ("experiment", "claim", "short set", "difference"):
        table.add_column(column)
    for item in EXPERIMENTS.values():
        table.add_row(item.name, item.claim, "yes" if item.by_default else "", _about(item))
    for claim, (command, difference) in ELSEWHERE.items():
        table.add_row(command, claim, "", f"{difference} (a command of its own)")
    report.show(table, json_path=json_path)
    rows = [
        {
            "name": item.name,
            "claim": item.claim,
            "difference": item.difference,
            "kind": item.kind,
            "by_default": item.by_default,
            "not_yet": item.later or None,
        }
        for item in EXPERIMENTS.values()
    ]
    elsewhere = [
        {"command": command, "claim": claim, "difference": difference}
        for claim, (command, difference) in ELSEWHERE.items()
    ]
    report.emit_json(json_path, {"schema": 1, "experiments": rows, "elsewhere": elsewhere})


def _about(item: Experiment) -> str:
    return f"{item.difference} (not applicable: {item.later})" if item.later else item.difference
