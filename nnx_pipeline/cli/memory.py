"""The command `memory`: what a training step, or your own function, holds in device memory.

Below that it says where the estimated time of a step goes.
"""

import dataclasses
from typing import Any

import click

from nnx_pipeline.cli.functions import Inputs, check_subject, inputs_options
from nnx_pipeline.cli.options import Chosen, Target, config_options, step_title, target_options
from nnx_pipeline.cli.reports import Outputs, report_options
from nnx_pipeline.cli.support import Failed, compiler_errors, progress
from nnx_pipeline.experiments.programs import measure_step
from nnx_pipeline.lab.api import measure
from nnx_pipeline.lab.attribution.result import Attribution
from nnx_pipeline.lab.compile.functions import find_function
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.report import tables as report
from nnx_pipeline.lab.report import words
from nnx_pipeline.lab.report.memory_tables import memory_view
from nnx_pipeline.lab.report.output import emit_json, show
from nnx_pipeline.lab.report.time_table import lines_table, time_table
from nnx_pipeline.lab.report.unread import FIGURES, unread_lines
from nnx_pipeline.mesh import MeshConfig


@click.command(
    "memory",
    short_help="Say what the memory holds at its peak.",
    epilog="Example: nnx-pipeline memory --model mixtral-small --mesh stage=4,fsdp=2 "
    "--platform tpu:v5p:2x2x2, or nnx-pipeline memory my_model:step --inputs my_model:inputs",
)
@click.argument("function", required=False, metavar="[MODULE:FUNCTION]")
@inputs_options
@config_options(None, required=False)
@target_options("")
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Rows of the table; all other buffers are summed in one more row.",
)
@report_options
def memory_command(
    function: str | None,
    inputs: Inputs,
    chosen: Chosen,
    target: Target,
    top: int,
    outputs: Outputs,
) -> None:
    """Say what the device memory holds at its peak: buffer, bytes, role, line of source.

    The bytes are those of the compiler's own buffer assignment, per device. The account below says
    what else the program holds there: arguments, outputs and constants. Buffers whose rows would
    be identical share one row, which says how many they are; the JSON lists every buffer. Below
    that, the estimated time of a step is listed by line of source and by pass. For
    NVIDIA the program is compiled twice: with matrix products by Triton and by cuBLASLt. The JSON
    has the second program under `other_gemm`.
    """
    outputs.check()
    check_subject(function, inputs, chosen)
    mesh_config, targets = target.mesh_config, target.platforms()
    with progress() as say, compiler_errors():
        if function is None:
            config = chosen.config()
            results = [measure_step(config, mesh_config, one, progress=say) for one in targets]
            title = step_title(chosen.model, config, mesh_config)
        else:
            results = [
                _measure_function(function, inputs, mesh_config, one, say) for one in targets
            ]
            title = f"{function} on {mesh_config}"
    found = [_with_buffers(result, target.platform) for result in results]
    differ = len({result.memory for result in results}) > 1
    for result, attribution in zip(results, found, strict=True):
        # A second program with the same memory is one line rather than the same table again.
        if result is not results[0] and not differ:
            show(report.SAME_MEMORY, json_path=outputs.json_path)
            continue
        by = f", matrix products by {report.GEMM_NAMES[result.gemm]}" if result.gemm else ""
        named = f"{title}, {report.compiler(result)}{by}"
        show(memory_view(named, attribution, top=top), json_path=outputs.json_path)
        show(report.account_view(result), json_path=outputs.json_path)
        if result.time:
            show(lines_table(result.time, top=top), json_path=outputs.json_path)
            show(time_table(result.time), json_path=outputs.json_path)
    outputs.say_words(words.BUFFERS, words.MEMORY, words.TIME)
    rows = [
        {**result.to_json(), "buffers": attribution.to_json(), "time_by_line": _by_line(result)}
        for result, attribution in zip(results, found, strict=True)
    ]
    emit_json(outputs.json_path, report.with_other_gemm(rows))
    shown = results if differ else results[:1]
    outputs.write_measurement(title, shown, top)


def _by_line(result: Measurement) -> list[dict[str, Any]] | None:
    """The estimated compute by line, kind and pass; None where there is no estimate."""
    return None if result.time is None else [dataclasses.asdict(row) for row in result.time.rows]


def _with_buffers(result: Measurement, platform: str) -> Attribution:
    """The buffers of a program; raises Failed with the reason where they are not known."""
    if result.attribution is None:
        if unread := [line for line in unread_lines([result]) if FIGURES["buffers"] in line]:
            raise Failed(unread[0])
        raise Failed(
            f"{platform} gave no buffer assignment; a program from JAX's persistent compilation "
            "cache has none: unset jax_compilation_cache_dir"
        )
    return result.attribution


def _measure_function(
    function: str, inputs: Inputs, mesh: MeshConfig, platform: Platform, say: Progress
) -> Measurement:
    grid, given = inputs.on(mesh, platform)
    return measure(find_function(function), *given, mesh=grid, platform=platform, progress=say)
