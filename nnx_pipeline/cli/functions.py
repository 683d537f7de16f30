"""Commands on people's own functions: `measure`, `compare`, and `lint`, also of a training step."""

import math
from typing import Any

import click
from jax.sharding import Mesh

from nnx_pipeline.cli_options import (
    Command,
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
from nnx_pipeline.config import to_dict
from nnx_pipeline.errors import InputError
from nnx_pipeline.files import write_text
from nnx_pipeline.lab import report
from nnx_pipeline.lab.functions import arguments_of, find_function, mesh_on
from nnx_pipeline.lab.own import compare, measure
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.lint import Finding, Limits, lint, lint_step
from nnx_pipeline.lint.report import findings_json, findings_view
from nnx_pipeline.mesh import MeshConfig, make_mesh


def inputs_options(command: Command) -> Command:
    """`--inputs` and `--arg`, the two ways to give abstract arguments."""
    command = click.option(
        "--arg",
        "arguments",
        multiple=True,
        metavar="DTYPE[SHAPE]",
        help="An argument of the function, such as bfloat16[8@data,128]; may come often.",
    )(command)
    return click.option(
        "--inputs",
        metavar="MODULE:FUNCTION",
        help="A function that gives the tuple of abstract arguments, instead of --arg.",
    )(command)


@click.command(
    "measure",
    epilog="Example: nnx-pipeline measure my_model:train_step --inputs my_model:abstract_inputs "
    "--mesh data=8 --platform tpu:v5p:2x2x2",
)
@click.argument("function", metavar="MODULE:FUNCTION")
@inputs_options
@mesh_option("")
@platform_option
@gemm_option
@click.option("--hlo", "hlo_path", metavar="PATH", help="Write the optimized program as text.")
@json_option
def measure_command(
    function: str,
    inputs: str | None,
    arguments: tuple[str, ...],
    mesh: str,
    platform: str,
    gemm: str | None,
    hlo_path: str | None,
    json_path: str | None,
) -> None:
    """Compile your own function and report its memory, products and collectives.

    For NVIDIA it is compiled with both kinds of matrix products; the JSON has the second program
    under `other_gemm`.
    """
    report.check_outputs(json=json_path, hlo=hlo_path)
    targets = platforms(platform, gemm)
    with progress() as say, compiler_errors():
        grid = _grid(mesh, targets[0])
        given = arguments_of(inputs, arguments, grid)
        own = find_function(function)
        results = [measure(own, *given, mesh=grid, platform=one, progress=say) for one in targets]
    title = f"{function} on {MeshConfig.parse(mesh)}"
    report.show_measurements(title, results, json_path=json_path)
    if hlo_path:
        write_text(hlo_path, results[0].hlo)


@click.command(
    "compare",
    epilog="Example: nnx-pipeline compare my_model:step my_model:step_with_remat "
    "--inputs my_model:abstract_inputs --platform tpu:v5p:2x2x2",
)
@click.argument("function_a", metavar="MODULE:FUNCTION")
@click.argument("function_b", metavar="MODULE:FUNCTION")
@inputs_options
@mesh_option("")
@platform_option
@gemm_option
@report_options
@json_option
def compare_command(
    function_a: str,
    function_b: str,
    inputs: str | None,
    arguments: tuple[str, ...],
    mesh: str,
    platform: str,
    gemm: str | None,
    html_path: str | None,
    chart_path: str | None,
    json_path: str | None,
) -> None:
    """Compile two functions of the same arguments and compare their memory.

    The verdict is about the account: arguments, outputs beside them, constants and heap. The
    numbers that they compute are not compared. Exit 1 when one of them did not compile.
    """
    check_reports(html_path, chart_path, json_path)
    targets = platforms(platform, gemm)
    with progress() as say, compiler_errors():
        grid = _grid(mesh, targets[0])
        labels = function_a, function_b
        functions = [find_function(label) for label in labels]
        given = arguments_of(inputs, arguments, grid)
        found = [
            [compare(*functions, *given, mesh=grid, platform=one, labels=labels, progress=say)]
            for one in targets
        ]
    title = f"{function_a} and {function_b} on {MeshConfig.parse(mesh)}, {platform}: per device"
    report.show_outcomes(title, found, platform, json_path=json_path)
    write_outcomes(title, found, html_path, chart_path)
    if failed := [outcome.note for (outcome,) in found if outcome.failed]:
        raise Failed("; ".join(dict.fromkeys(failed)))


def _grid(mesh: str, platform: Platform) -> Mesh | None:
    config = MeshConfig.parse(mesh)
    return mesh_on(config, platform.devices(config.num_devices if platform.kind == "cpu" else 1))


@click.command(
    "lint",
    epilog="Example: nnx-pipeline lint --model mixtral-small --mesh stage=4,fsdp=2, or "
    "nnx-pipeline lint my_model:train_step --inputs my_model:abstract_inputs",
)
@click.argument("function", required=False, metavar="[MODULE:FUNCTION]")
@inputs_options
@config_options(None, required=False)
@mesh_option("")
@click.option(
    "--large",
    type=click.FloatRange(min=0),
    default=Limits().large / 1e6,
    show_default=True,
    metavar="MB",
    help="Arrays below this size are not reported.",
)
@click.option(
    "--one-hot",
    type=click.FloatRange(min=0),
    default=Limits().one_hot / 1e6,
    show_default=True,
    metavar="MB",
    help="One-hot arrays below this size are not reported.",
)
@json_option
def lint_command(
    function: str | None,
    inputs: str | None,
    arguments: tuple[str, ...],
    model: str | None,
    assignments: tuple[str, ...],
    mesh: str,
    large: float,
    one_hot: float,
    json_path: str | None,
) -> None:
    """Find wasted memory in a training step, or in your own function, without a compiler.

    \b
    Rules:
      parameter-in-loop        a parameter is carried or stacked by a loop
      remat-policy             a policy of jax.checkpoint saves nothing, or everything
      hidden-upcast            a large array becomes float32 because something else is
      one-hot                  a one-hot array above --one-hot
      gradient-per-microbatch  gradients of a parameter side by side, to be added up
      trivial-constraint       a sharding constraint that spreads nothing

    Sizes are of one device where the sharding is known without a compiler, else of all together.
    The parameters of your own function are the nnx.Params of its first argument, or all of its
    floating-point arrays. Exit 1 when there are findings.
    """
    report.check_writable(json_path, "--json")
    if (function is None) == (model is None):
        raise InputError("lint looks at one thing: give --model PRESET or MODULE:FUNCTION")
    if model is not None and (inputs or arguments):
        raise InputError("--inputs and --arg are of MODULE:FUNCTION; leave them out with --model")
    if function is not None and assignments:
        raise InputError(f"--set {assignments[0]} is of --model; a function has no config")
    for option, size in (("--large", large), ("--one-hot", one_hot)):
        if not math.isfinite(size):
            raise InputError(f"{option} {size} is no size; give MB, such as {option} 10")
    limits = Limits(large=large * 1e6, one_hot=one_hot * 1e6)
    mesh_config = MeshConfig.parse(mesh)
    with progress() as say, compiler_errors():
        say("tracing")
        if model is not None:
            title = f"one training step of {model} on {mesh_config}"
            config = configured(model, assignments)
            findings = _lint_model(model, assignments, mesh_config, limits)
            subject: dict[str, Any] = {"config": to_dict(config)}
        else:
            assert function is not None, "checked above"
            title = f"{function} on {mesh_config}"
            findings = _lint_function(function, inputs, arguments, mesh_config, limits)
            subject = {"function": function}
    report.show(findings_view(title, findings), json_path=json_path)
    subject = {"mesh": mesh_config.sizes(), **subject}
    report.emit_json(json_path, findings_json(subject, findings, limits))
    if findings:
        raise Failed(f"{len(findings)} finding{'s' if len(findings) > 1 else ''}")


def _lint_model(
    model: str, assignments: tuple[str, ...], mesh_config: MeshConfig, limits: Limits
) -> list[Finding]:
    config = configured(model, assignments)
    config.check_mesh(mesh_config)
    devices = Platform("cpu").devices(mesh_config.num_devices)
    grid = make_mesh(mesh_config, devices, sharding=config.pipeline.sharding)
    return lint_step(config, grid, limits=limits)


def _lint_function(
    function: str,
    inputs: str | None,
    arguments: tuple[str, ...],
    mesh_config: MeshConfig,
    limits: Limits,
) -> list[Finding]:
    grid = mesh_on(mesh_config, Platform("cpu").devices(mesh_config.num_devices))
    found, given = find_function(function), arguments_of(inputs, arguments, grid)
    return lint(found, *given, mesh=grid, limits=limits)
