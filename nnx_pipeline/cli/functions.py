"""The commands `measure` and `compare` for your own functions, and `lint` for these or a preset."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import click
import jax
from jax.sharding import Mesh

from nnx_pipeline.cli.options import (
    Chosen,
    Target,
    TwoArms,
    bundled,
    config_options,
    json_option,
    mesh_option,
    target_options,
)
from nnx_pipeline.cli.reports import Outputs, explain_option, report_options, say_words
from nnx_pipeline.cli.support import Failed, compiler_errors, progress
from nnx_pipeline.config.config import Config, to_dict
from nnx_pipeline.errors import InputError, counted
from nnx_pipeline.files import write_text
from nnx_pipeline.lab.api import compare, measure
from nnx_pipeline.lab.compile.functions import arguments_of, find_function
from nnx_pipeline.lab.compile.places import mesh_on
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.report import tables as report
from nnx_pipeline.lab.report import words
from nnx_pipeline.lab.report.output import check_outputs, check_writable, emit_json, show
from nnx_pipeline.lint import Finding, Limits, lint, lint_step
from nnx_pipeline.lint.report import findings_json, findings_view
from nnx_pipeline.mesh import MeshConfig, make_mesh


@dataclass(frozen=True)
class Inputs:
    """The values of `--inputs` and `--arg`, the two ways to give a function its abstract arguments.

    - `inputs`: `module:function` of a function that returns the tuple of arguments, or None.
    - `arguments`: one text for each argument, such as `bfloat16[8@data,128]`.
    """

    inputs: str | None
    arguments: tuple[str, ...]

    def on(self, config: MeshConfig, platform: Platform) -> tuple[Mesh | None, tuple[Any, ...]]:
        """The mesh over the devices of a platform, and the arguments, sharded as they say.

        - `config`: the axes of the mesh.
        - `platform`: what is compiled for. Where it has no devices, the function of `--inputs` runs
          on virtual CPU devices, as it may compute arrays.

        Raises InputError as in `arguments_of`.
        """
        apart = self.inputs is not None and not platform.is_real
        needed = config.num_devices if apart or platform.kind == "cpu" else 1
        mesh = mesh_on(config, platform.devices(needed))
        place = mesh_on(config, jax.devices("cpu")) if apart else mesh
        return mesh, arguments_of(self.inputs, self.arguments, place)


inputs_options = bundled(
    "inputs",
    Inputs,
    click.option(
        "--inputs",
        metavar="MODULE:FUNCTION",
        help="A function that returns the tuple of abstract arguments, instead of --arg.",
    ),
    click.option(
        "--arg",
        "arguments",
        multiple=True,
        metavar="DTYPE[SHAPE]",
        help="An argument of the function, such as bfloat16[8@data,128]; may be repeated.",
    ),
)


def check_subject(function: str | None, inputs: Inputs, chosen: Chosen) -> None:
    """Checks that a command got either a function or a preset, and no option that it would ignore.

    - `function`: `module:function`, or None where a preset is given.
    - `inputs`: allowed only with a function.
    - `chosen`: the preset, None where a function is given; its overrides need a preset.

    Raises InputError otherwise.
    """
    if (function is None) == (chosen.model is None):
        found = "neither is" if function is None else "both are"
        raise InputError(f"give either --model PRESET or MODULE:FUNCTION; {found} given")
    if chosen.model is not None and (inputs.inputs or inputs.arguments):
        raise InputError(
            "--inputs and --arg apply only to MODULE:FUNCTION; leave them out with --model"
        )
    if function is not None and chosen.assignments:
        raise InputError(f"--set {chosen.assignments[0]} needs --model: a function has no config")


@click.command(
    "measure",
    short_help="Compile a function: what it costs.",
    epilog="Example: nnx-pipeline measure my_model:train_step --inputs my_model:abstract_inputs "
    "--mesh data=8 --platform tpu:v5p:2x2x2",
)
@click.argument("function", metavar="MODULE:FUNCTION")
@inputs_options
@target_options("")
@click.option("--hlo", "hlo_path", metavar="PATH", help="Write the optimized program as text.")
@json_option
@explain_option
def measure_command(
    function: str,
    inputs: Inputs,
    target: Target,
    hlo_path: str | None,
    json_path: str | None,
    explain: bool,
) -> None:
    """Compile your own function: memory, time, and whether it fits.

    For NVIDIA it is compiled twice: with matrix products by Triton and by cuBLASLt. The JSON has
    the second program under `other_gemm`.
    """
    check_outputs(json=json_path, hlo=hlo_path)
    targets = target.platforms()
    with progress() as say, compiler_errors():
        # The targets differ only in the kind of matrix products, so one mesh serves them all.
        grid, given = inputs.on(target.mesh_config, targets[0])
        own = find_function(function)
        results = [measure(own, *given, mesh=grid, platform=one, progress=say) for one in targets]
    title = f"{function} on {target.mesh_config}"
    report.show_measurements(title, results, json_path=json_path)
    say_words(explain, json_path, words.MEMORY, words.TIME)
    if hlo_path:
        write_text(hlo_path, results[0].hlo)


@click.command(
    "compare",
    short_help="Compare two functions of your own.",
    epilog="Example: nnx-pipeline compare my_model:step my_model:step_with_remat "
    "--inputs my_model:abstract_inputs --platform tpu:v5p:2x2x2",
)
@click.argument("function_a", metavar="MODULE:FUNCTION")
@click.argument("function_b", metavar="MODULE:FUNCTION")
@inputs_options
@target_options("", kind=TwoArms)
@report_options
def compare_command(
    function_a: str,
    function_b: str,
    inputs: Inputs,
    target: TwoArms,
    outputs: Outputs,
) -> None:
    """Compile two functions that take the same arguments and compare their memory.

    With --xla-a and --xla-b they may be one function, compiled with two settings. The verdict is
    about the account: arguments, outputs not aliased to them, constants and heap. The numbers that
    they compute are not compared. Exit 1 when one of them did not compile.
    """
    outputs.check()
    pairs, names = target.pairs(), (function_a, function_b)
    with progress() as say, compiler_errors():
        grid, given = inputs.on(target.mesh_config, pairs[0][0])
        one, other = (
            f"{name}, {option}" if option else name
            for name, option in zip(names, target.options, strict=True)
        )
        arms = functools.partial(compare, *map(find_function, names), *given, mesh=grid)
        found = [[arms(platform=pair, labels=(one, other), progress=say)] for pair in pairs]
    title = f"{function_a} and {function_b} on {target.mesh_config}, {target.platform}: per device"
    report.show_outcomes(title, found, target.platform, json_path=outputs.json_path)
    outputs.say_words(words.MEMORY, words.TIME, words.VERDICTS, words.BUFFERS)
    outputs.write_outcomes(title, found)
    if failed := [outcome.note for (outcome,) in found if outcome.failed]:
        # Both kinds of matrix products may fail for the same reason, which is then given once.
        raise Failed("; ".join(dict.fromkeys(failed)))


@dataclass(frozen=True)
class LimitsInMB:
    """The values of `--large` and `--one-hot`, in MB (10⁶ bytes).

    - `large`: the size below which arrays are not reported.
    - `one_hot`: the size below which one-hot arrays are not reported.
    """

    large: float
    one_hot: float

    def limits(self) -> Limits:
        """The limits in bytes.

        Raises InputError for a size that is infinite or not a number.
        """
        for option, size in (("--large", self.large), ("--one-hot", self.one_hot)):
            if not math.isfinite(size):
                raise InputError(
                    f"{option} {size} is not a valid size in MB; give one such as {option} 10"
                )
        return Limits(large=self.large * 1e6, one_hot=self.one_hot * 1e6)


@click.command(
    "lint",
    short_help="Find memory that is wasted.",
    epilog="Example: nnx-pipeline lint --model mixtral-small --mesh stage=4,fsdp=2, or "
    "nnx-pipeline lint my_model:train_step --inputs my_model:abstract_inputs",
)
@click.argument("function", required=False, metavar="[MODULE:FUNCTION]")
@inputs_options
@config_options(None, required=False)
@mesh_option("")
@bundled(
    "limits",
    LimitsInMB,
    click.option(
        "--large",
        type=click.FloatRange(min=0),
        default=Limits().large / 1e6,
        show_default=True,
        metavar="MB",
        help="Arrays below this size are not reported.",
    ),
    click.option(
        "--one-hot",
        type=click.FloatRange(min=0),
        default=Limits().one_hot / 1e6,
        show_default=True,
        metavar="MB",
        help="One-hot arrays below this size are not reported.",
    ),
)
@json_option
def lint_command(
    function: str | None,
    inputs: Inputs,
    chosen: Chosen,
    mesh: str,
    limits: LimitsInMB,
    json_path: str | None,
) -> None:
    """Find wasted memory in a training step, or in your own function, without a compiler.

    \b
    Rules:
      parameter-in-loop
        a parameter is carried or stacked by a loop
      remat-policy
        a policy of jax.checkpoint saves everything, or
        nothing by mistake
      hidden-upcast
        a large array is cast to float32 to match another
        operand
      one-hot
        a one-hot array above --one-hot
      gradient-per-microbatch
        gradients of all microbatches are stored before
        they are added up
      trivial-constraint
        a sharding constraint that shards no axis

    Sizes are per device where the sharding is known without a compiler, else for all devices
    together. The parameters of your own function are the nnx.Params of its first argument, or, if
    that has no NNX variables, all of its floating-point arrays. Exit 1 when there are findings, and
    2 when the function cannot be traced.
    """
    check_writable(json_path, "--json")
    check_subject(function, inputs, chosen)
    sizes, mesh_config = limits.limits(), MeshConfig.parse(mesh)
    if function is None:
        title, config = f"one training step of {chosen.model} on {mesh_config}", chosen.config()
        subject: dict[str, Any] = {"config": to_dict(config)}
        find = functools.partial(_lint_model, config)
    else:
        title, subject = f"{function} on {mesh_config}", {"function": function}
        find = functools.partial(_lint_function, function, inputs)
    # 1 means findings, so that a function that cannot be traced ends with 2.
    with progress() as say, compiler_errors(InputError):
        say("tracing")
        findings = find(mesh_config, sizes)
    show(findings_view(title, findings), json_path=json_path)
    subject = {"mesh": mesh_config.sizes(), **subject}
    emit_json(json_path, findings_json(subject, findings, sizes))
    if findings:
        raise Failed(counted(len(findings), "finding"))


def _lint_model(config: Config, mesh_config: MeshConfig, limits: Limits) -> list[Finding]:
    config.check_mesh(mesh_config)
    # Linting only traces, so virtual CPU devices can stand for any others.
    devices = Platform("cpu").devices(mesh_config.num_devices)
    grid = make_mesh(mesh_config, devices, sharding=config.pipeline.sharding)
    return lint_step(config, grid, limits=limits)


def _lint_function(
    function: str, inputs: Inputs, mesh_config: MeshConfig, limits: Limits
) -> list[Finding]:
    # Linting only traces, so virtual CPU devices can stand for any others.
    grid, given = inputs.on(mesh_config, Platform("cpu"))
    return lint(find_function(function), *given, mesh=grid, limits=limits)
