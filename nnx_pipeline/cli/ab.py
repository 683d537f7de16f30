"""The command `ab`: two programs that differ in one thing, compared."""

from dataclasses import dataclass

import click

from nnx_pipeline import ending
from nnx_pipeline.cli import completion
from nnx_pipeline.cli.options import (
    Chosen,
    TwoArms,
    bundled,
    check_alone,
    config_options,
    step_title,
    target_options,
)
from nnx_pipeline.cli.reports import Outputs, report_options
from nnx_pipeline.cli.support import Failed, compiler_errors, progress
from nnx_pipeline.cli.sweep import run_sweep
from nnx_pipeline.config.overrides import parse_overrides
from nnx_pipeline.errors import InputError
from nnx_pipeline.experiments.registry import ELSEWHERE, EXPERIMENTS, choose
from nnx_pipeline.experiments.run import compare_settings, run_experiments
from nnx_pipeline.lab.compile.cache import Cache
from nnx_pipeline.lab.report import tables as report
from nnx_pipeline.lab.report import words
from nnx_pipeline.lab.report.columns import Column, Columns
from nnx_pipeline.lab.report.output import emit_json, show


@dataclass(frozen=True)
class Measuring:
    """The values of `--sweep` and `--fresh`.

    - `sweeps`: `field=value,value` for each field.
    - `fresh`: whether to measure again what the cache holds.
    """

    sweeps: tuple[str, ...]
    fresh: bool


@click.command(
    "ab",
    short_help="Compare two programs in memory and time.",
    epilog="Example: nnx-pipeline ab stage-vmap --platform tpu:v5p:2x2x2, or nnx-pipeline ab "
    "--xla-b xla_tpu_scoped_vmem_limit_kib=65536 --platform tpu:v5p:2x2x2",
)
@click.argument("names", nargs=-1, metavar="[EXPERIMENT …]", shell_complete=completion.experiments)
@click.option(
    "--list", "list_only", is_flag=True, help="List all experiments: name, claim and difference."
)
@config_options("mixtral-small")
@target_options("stage=4,fsdp=2", kind=TwoArms)
@bundled(
    "measuring",
    Measuring,
    click.option(
        "--sweep",
        "sweeps",
        multiple=True,
        metavar="FIELD=V,V,…",
        help="Compile for each value of a config field and fit a slope; the field of a further "
        "--sweep changes in step with the first. mesh=AXES/AXES compiles for each mesh.",
    ),
    click.option("--fresh", is_flag=True, help="Do not reuse results of earlier runs."),
)
@report_options
def ab_command(
    names: tuple[str, ...],
    list_only: bool,
    chosen: Chosen,
    target: TwoArms,
    measuring: Measuring,
    outputs: Outputs,
) -> None:
    """Compile two arms that differ in one thing and compare their memory.

    Without names a short set runs, with `all` every experiment. What an earlier run has measured
    with the same versions, flags and source is not measured again. For NVIDIA the arms are compiled
    twice: with matrix products by Triton and by cuBLASLt. With --sweep, a training step without an
    experiment, or both arms of one experiment, are compiled for each value of a config field. For
    NVIDIA the matrix products of a sweep are Triton's, unless --gemm chooses cuBLASLt's. With
    --xla-a or --xla-b the arms are one training step with other settings of the compiler. Exit 1
    when an arm did not compile or the arms do not compute the same.
    """
    outputs.check()
    _check_settings(names, target, measuring)
    if list_only:
        check_alone("list_only", "json_path")
        _list_experiments(outputs.json_path)
        return
    cache = Cache.of_user(fresh=measuring.fresh)
    if cache.folder is not None:
        ending.note("finished measurements are kept; run the same command again to continue")
    if measuring.sweeps:
        run_sweep(names, measuring.sweeps, chosen, target, cache, outputs)
    else:
        _run(names, chosen, target, cache, outputs)


def _check_settings(names: tuple[str, ...], target: TwoArms, measuring: Measuring) -> None:
    """Raises InputError where settings of one arm would come on top of another difference."""
    option = next(filter(None, target.options), "")
    if option and names:
        raise InputError(
            f"{option} cannot be combined with {names[0]}, whose arms differ in one thing already; "
            "leave out the name to compare a training step with and without the setting, or give "
            "it to both arms by --xla"
        )
    if option and measuring.sweeps:
        raise InputError(f"{option} cannot be combined with --sweep; use --xla instead")


def _run(
    names: tuple[str, ...], chosen: Chosen, target: TwoArms, cache: Cache, outputs: Outputs
) -> None:
    """Runs these experiments and reports the results; raises Failed if one of them failed."""
    experiments, config, mesh = choose(names), chosen.config(), target.mesh_config
    given, pairs = parse_overrides(chosen.assignments), target.pairs()
    with progress() as say, compiler_errors():
        if any(target.options):
            found = [
                [compare_settings(config, mesh, pair, target.labels, cache=cache, progress=say)]
                for pair in pairs
            ]
        else:
            found = [
                run_experiments(
                    experiments, config, mesh, platform, given=given, cache=cache, progress=say
                )
                for platform, _ in pairs
            ]
    title = f"{step_title(chosen.model, config, mesh)}; {target.platform}, per device"
    report.show_outcomes(title, found, target.platform, json_path=outputs.json_path)
    outputs.say_words(words.MEMORY, words.TIME, words.VERDICTS, words.BUFFERS)
    outputs.write_outcomes(title, found)
    failed = [one.question.name for outcomes in found for one in outcomes if one.failed]
    if failed:
        # With both kinds of matrix products an experiment may fail twice; it is named once.
        raise Failed(f"failed: {', '.join(dict.fromkeys(failed))}; the notes say why")


def _list_experiments(json_path: str | None) -> None:
    """Shows all experiments, and the claims that a command outside of `ab` measures."""
    heads = [Column("experiment"), Column("claim", 2), Column("short set", 1)]
    table = Columns([*heads, Column("difference", is_prose=True)])
    for item in EXPERIMENTS.values():
        table.add_row(item.name, item.claim, "yes" if item.by_default else "", item.difference)
    for claim, (command, difference) in ELSEWHERE.items():
        table.add_row(command, claim, "", f"{difference} (a separate command)")
    show(table, json_path=json_path)
    rows = [
        {
            "name": item.name,
            "claim": item.claim,
            "difference": item.difference,
            "kind": item.kind,
            "by_default": item.by_default,
        }
        for item in EXPERIMENTS.values()
    ]
    elsewhere = [
        {"command": command, "claim": claim, "difference": difference}
        for claim, (command, difference) in ELSEWHERE.items()
    ]
    emit_json(json_path, {"schema": 1, "experiments": rows, "elsewhere": elsewhere})
