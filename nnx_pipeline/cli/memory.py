"""The command `memory`: what the device memory of a training step, or of a function, holds."""

import click

from nnx_pipeline.cli_functions import inputs_options
from nnx_pipeline.cli_options import (
    config_options,
    configured,
    gemm_option,
    json_option,
    mesh_option,
    platform_option,
    platforms,
)
from nnx_pipeline.cli_report import check_reports, report_options, write_measurement
from nnx_pipeline.cli_support import Failed, compiler_errors, progress
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab import report
from nnx_pipeline.lab.attribution import Attribution
from nnx_pipeline.lab.attribution_view import memory_view
from nnx_pipeline.lab.compile import Measurement, Progress, measure_step
from nnx_pipeline.lab.functions import arguments_of, find_function, mesh_on
from nnx_pipeline.lab.own import measure
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.lab.unread_view import FIGURES, unread_lines
from nnx_pipeline.mesh import MeshConfig


@click.command(
    "memory",
    epilog="Example: nnx-pipeline memory --model mixtral-small --mesh stage=4,fsdp=2 "
    "--platform tpu:v5p:2x2x2, or nnx-pipeline memory my_model:step --inputs my_model:inputs",
)
@click.argument("function", required=False, metavar="[MODULE:FUNCTION]")
@inputs_options
@config_options(None, required=False)
@mesh_option("")
@platform_option
@gemm_option
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Rows of the table; what is left is one row.",
)
@report_options
@json_option
def memory_command(
    function: str | None,
    inputs: str | None,
    arguments: tuple[str, ...],
    model: str | None,
    assignments: tuple[str, ...],
    mesh: str,
    platform: str,
    gemm: str | None,
    top: int,
    html_path: str | None,
    chart_path: str | None,
    json_path: str | None,
) -> None:
    """Say what the device memory holds at its peak: buffer, bytes, role, line of source.

    The bytes are those of the compiler's own buffer assignment, per device. The account below says
    what else the program holds there: arguments, outputs and constants. Equal rows are shown
    as one with their number; JSON has every buffer. For NVIDIA the program is compiled with both
    kinds of matrix products; the JSON has the second one under `other_gemm`.
    """
    check_reports(html_path, chart_path, json_path)
    if (function is None) == (model is None):
        raise InputError("memory looks at one thing: give --model PRESET or MODULE:FUNCTION")
    if model is not None and (inputs or arguments):
        raise InputError("--inputs and --arg are of MODULE:FUNCTION; leave them out with --model")
    if function is not None and assignments:
        raise InputError(f"--set {assignments[0]} is of --model; a function has no config")
    mesh_config, targets = MeshConfig.parse(mesh), platforms(platform, gemm)
    with progress() as say, compiler_errors():
        if model is not None:
            config = configured(model, assignments)
            results = [measure_step(config, mesh_config, one, progress=say) for one in targets]
            title = f"one training step of {model} on {mesh_config}"
        else:
            assert function is not None, "checked above"
            given = function, inputs, arguments, mesh_config
            results = [_measure_function(*given, one, say) for one in targets]
            title = f"{function} on {mesh_config}"
    found = [_with_buffers(result, platform) for result in results]
    differ = len({result.memory for result in results}) > 1
    for result, attribution in zip(results, found, strict=True):
        if result is not results[0] and not differ:
            report.show(report.SAME_MEMORY, json_path=json_path)
            continue
        by = f", matrix products by {report.GEMM_NAMES[result.gemm]}" if result.gemm else ""
        named = f"{title}, {report.compiler(result)}{by}"
        report.show(memory_view(named, attribution, top=top), json_path=json_path)
        report.show(report.account_view(result), json_path=json_path)
    rows = [
        {**result.to_json(), "buffers": attribution.to_json()}
        for result, attribution in zip(results, found, strict=True)
    ]
    report.emit_json(json_path, report.with_other_gemm(rows))
    shown = results if differ else results[:1]
    write_measurement(title, shown, top, html_path, chart_path)


def _with_buffers(result: Measurement, platform: str) -> Attribution:
    if result.attribution is None:
        if unread := [line for line in unread_lines([result]) if FIGURES["buffers"] in line]:
            raise Failed(unread[0])
        raise Failed(
            f"{platform} gave no buffer assignment; a program from JAX's persistent compilation "
            "cache has none: unset jax_compilation_cache_dir"
        )
    return result.attribution


def _measure_function(
    function: str,
    inputs: str | None,
    arguments: tuple[str, ...],
    mesh: MeshConfig,
    platform: Platform,
    say: Progress,
) -> Measurement:
    grid = mesh_on(mesh, platform.devices(mesh.num_devices if platform.kind == "cpu" else 1))
    given = arguments_of(inputs, arguments, grid)
    return measure(find_function(function), *given, mesh=grid, platform=platform, progress=say)
