"""The commands of the lab and their options; what they do is imported when they run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from nnx_pipeline.lab._cli import completion, options
from nnx_pipeline.lab._cli.outputs import ComparisonOutputs, MemoryOutputs, Written
from nnx_pipeline.lab._cli.presets import presets
from nnx_pipeline.lab._cli.subject import (
    GivenArguments,
    OfSubject,
    Shown,
    inputs_options,
    is_function,
    subject_of,
    subject_options,
)
from nnx_pipeline.lab._cli.values import Baseline, Chosen, Costing, Measuring, Target, TwoArms
from nnx_pipeline.lab.errors import InputError

if TYPE_CHECKING:
    from nnx_pipeline.lab.lint import Limits


@click.command(
    "measure",
    cls=OfSubject,
    short_help="Compile a program: what it costs.",
    epilog="Example: nnx-pipeline measure mixtral-small --mesh stage=4,fsdp=2 "
    "--platform tpu:v5p:2x2x2, or nnx-pipeline measure my_model:train_step "
    "--inputs my_model:abstract_inputs --mesh data=8",
)
@subject_options
@options.target_options()
@click.option(
    "--across",
    metavar="jax=V,V,…",
    help="Compile it with each of these versions of JAX and compare, such as "
    "jax=0.10.2,0.12.0.1. Environments with them are built by pip and kept in the cache folder.",
)
@options.cost_options
@options.written_options
def measure_command(
    name: str | None,
    inputs: GivenArguments,
    chosen: Chosen,
    target: Target,
    across: str | None,
    costing: Costing,
    written: Written,
) -> None:
    """Compile one training step of a preset, or a function of your own: memory, time, and whether
    it fits.

    SUBJECT is a preset, a config.yml of MaxText, which says its mesh, MODULE:FUNCTION or
    FILE.py:FUNCTION. For NVIDIA it is compiled twice: with matrix products by Triton and by
    cuBLASLt. The JSON has the second program under `other_gemm`.
    """
    subject = subject_of(name, chosen, inputs, target.mesh, target.dcn)
    from nnx_pipeline.lab._report.output import check_outputs

    check_outputs(json=written.json_path, hlo=written.hlo_path)
    written.check_format()
    target = target.settled(on_mesh=subject.config is not None)
    if across is not None:
        options.check_alone(
            "across",
            *("name", "model", "assignments", "inputs", "arguments", "mesh", "dcn", "named"),
            *("gemm", "xla", "json_path"),
        )
        from nnx_pipeline.lab._cli.other_process import run_across

        run_across(across, subject, target, written.json_path)
        return
    platforms = target.platforms()
    costing.check(platforms[:1], of_function=subject.config is None)
    from nnx_pipeline.lab._cli.measuring import run_measure

    run_measure(subject, platforms, costing, written)


@click.command(
    "compare",
    cls=OfSubject,
    short_help="Compare two programs: memory and time.",
    epilog="Example: nnx-pipeline compare mixtral-small loss-chunks, or nnx-pipeline compare "
    "my_model:step my_model:step_with_remat --inputs my_model:abstract_inputs, or nnx-pipeline "
    "compare tiny --mesh fsdp=8 --xla-b xla_tpu_scoped_vmem_limit_kib=65536",
)
@click.argument(
    "names", nargs=-1, metavar="[SUBJECT] [OTHER …]", shell_complete=completion.compared
)
@inputs_options
@options.config_options(required=False, hidden=True)
@options.target_options(TwoArms)
@options.baseline_options
@options.measuring_options
@options.cost_options
@options.comparison_options
def compare_command(
    names: tuple[str, ...],
    inputs: GivenArguments,
    chosen: Chosen,
    target: TwoArms,
    before: Baseline,
    measuring: Measuring,
    costing: Costing,
    outputs: ComparisonOutputs,
) -> None:
    """Compile two programs that differ in one thing and compare their memory and time.

    SUBJECT is a preset, MODULE:FUNCTION or FILE.py:FUNCTION. OTHER is what it is compared with: a
    second preset or function of the same arguments, or experiments, each of which changes one
    thing in a training step; `all` is all of them. With --xla-a and --xla-b the two programs are
    SUBJECT with other settings of the compiler. A preset without anything else is compared in a
    short set of experiments, and mixtral-small where no preset is named. With several --platform
    one SUBJECT is compared on all of them: memory, whether it fits, time, tokens and their cost.

    Experiments run on the mesh stage=4,fsdp=2 unless --mesh names one, and check that both programs
    compute the same numbers. What an earlier run has measured with the same versions, flags and
    source is not measured again. With --sweep a training step, or both programs of one experiment,
    are compiled for each value of a config field; for NVIDIA with Triton's matrix products, unless
    --gemm chooses cuBLASLt's. Otherwise programs for NVIDIA are compiled with both.

    The verdict on functions, presets and settings is less, same or more memory by the account:
    arguments, outputs not aliased to them, constants and heap; their numbers are not compared. Exit
    1 when a program did not compile, an experiment's numbers differ, or b is worse than
    --fail-above allows.
    """
    outputs.check()
    if before.is_given:
        _compare_with_baseline(names, inputs, chosen, target, before, outputs)
        return
    if len(target.named) > 1 and not measuring.listed:
        _compare_platforms(names, inputs, chosen, target, costing, outputs)
        return
    if costing.prices or costing.tokens:
        raise InputError(
            "--price and --tokens are for one program on several platforms; give several "
            "--platform, or take nnx-pipeline measure"
        )
    if not any(map(is_function, names)):
        if inputs.inputs or inputs.arguments:
            raise InputError("--inputs and --arg are for functions; leave them out")
        presets().compare(names, chosen, target, measuring, outputs)
        return
    pair = _two_functions(names, target)
    target = target.settled(on_mesh=False)
    pairs = target.pairs()
    from nnx_pipeline.lab._cli.measuring import run_compare

    run_compare(pair, inputs, target, pairs, outputs)


def _compare_with_baseline(
    names: tuple[str, ...],
    inputs: GivenArguments,
    chosen: Chosen,
    target: TwoArms,
    before: Baseline,
    outputs: ComparisonOutputs,
) -> None:
    option = "--baseline" if before.baseline else "--with"
    unread = ("xla_a", "xla_b", "listed", "sweeps", "fresh", "prices", "tokens")
    options.refuse(option, *unread)
    if len(names) > 1:
        raise InputError(
            f"{' '.join(names)}: with {option} one program is compared; leave out {names[1]}"
        )
    subject = subject_of(next(iter(names), None), chosen, inputs, target.mesh, target.dcn)
    target = target.settled(on_mesh=subject.config is not None)
    from nnx_pipeline.lab._cli.other_process import run_baseline

    run_baseline(subject, before, target, outputs)


def _compare_platforms(
    names: tuple[str, ...],
    inputs: GivenArguments,
    chosen: Chosen,
    target: TwoArms,
    costing: Costing,
    outputs: ComparisonOutputs,
) -> None:
    options.check_alone(
        *(
            "named",
            "names",
            "model",
            "assignments",
            "inputs",
            "arguments",
            "mesh",
            "dcn",
            "gemm",
            "xla",
        ),
        *("prices", "tokens", "json_path", "explain"),
        called="several --platform",
    )
    if len(names) > 1:
        raise InputError(
            f"{' '.join(names)}: with several --platform one program is compared; leave out "
            f"{names[1]}, or all but one --platform"
        )
    subject = subject_of(next(iter(names), None), chosen, inputs, target.mesh, target.dcn)
    if target.gemm == "both":
        raise InputError(
            "--gemm both: with several --platform one kind of matrix products is compared; write "
            "--gemm triton or --gemm cublas"
        )
    platforms = [one.platforms()[0] for one in target.each()]
    costing.check(platforms, of_function=subject.config is None)
    from nnx_pipeline.lab._cli.measuring import run_platforms

    run_platforms(subject, platforms, costing, outputs)


def _two_functions(names: tuple[str, ...], target: TwoArms) -> tuple[str, str]:
    if strangers := [name for name in names if not is_function(name)]:
        raise InputError(
            f"a function is compared with a function of the same arguments, and {strangers[0]} is "
            "none; write MODULE:FUNCTION"
        )
    if len(names) > 2 or (len(names) == 1 and not any(target.options)):
        raise InputError(
            f"{', '.join(names)}: give two functions to compare, or one with --xla-a or --xla-b"
        )
    flags = options.given()
    for option in ("model", "assignments", "listed", "sweeps", "fresh"):
        if option in flags:
            raise InputError(f"{flags[option]} needs a preset; leave it out with {names[0]}")
    return names[0], names[-1]


@click.command(
    "memory",
    cls=OfSubject,
    short_help="Say what the memory holds at its peak.",
    epilog="Example: nnx-pipeline memory mixtral-small --mesh stage=4,fsdp=2 "
    "--platform tpu:v5p:2x2x2, or nnx-pipeline memory my_model:step --inputs my_model:inputs",
)
@subject_options
@options.target_options()
@options.bundled(
    "shown",
    Shown,
    options.top_option,
    click.option(
        "--try",
        "tries",
        is_flag=True,
        help="Compile your function with each change that needs none of its source, and show what "
        "each gains in memory and costs in time, in the place of the tables.",
    ),
)
@options.memory_options
def memory_command(
    name: str | None,
    inputs: GivenArguments,
    chosen: Chosen,
    target: Target,
    shown: Shown,
    outputs: MemoryOutputs,
) -> None:
    """Say what the device memory holds at its peak: buffer, bytes, role, line of source.

    The bytes are those of the compiler's own buffer assignment, per device. The account below says
    what else the program holds there: arguments, outputs and constants. Buffers whose rows would
    be identical share one row, which says how many they are; the JSON lists every buffer. Below
    that, the estimated time of a step is listed by line of source and by pass. A last line names
    the arguments of your function that could be donated. For NVIDIA the program is compiled twice:
    with matrix products by Triton and by cuBLASLt. The JSON has the second program under
    `other_gemm`.

    With --try the changes are: donation of what results can take the memory of; jax.checkpoint
    around the bodies of loops that store much; other policies, where the function calls
    jax.checkpoint; settings of the compiler; and the best of each kind together. Each is a compile
    of its own, and Ctrl-C shows what there is so far. No change but the settings changes a result.
    """
    subject = subject_of(name, chosen, inputs, target.mesh, target.dcn)
    outputs.check()
    if shown.tries:
        shown.check(subject, target)
    platforms = target.settled(on_mesh=subject.config is not None).platforms()
    if shown.tries:
        from nnx_pipeline.lab._cli.changing.trying import run_tries

        run_tries(subject, platforms[0], outputs, shown.top)
        return
    from nnx_pipeline.lab._cli.measuring import run_memory

    run_memory(subject, platforms, outputs, shown.top)


@dataclass(frozen=True)
class LimitsInMB:
    """The values of `--large` and `--one-hot`, in MB (10⁶ bytes)."""

    large: float
    one_hot: float

    def limits(self) -> Limits:
        """The limits in bytes; raises InputError unless they are finite."""
        from nnx_pipeline.lab.lint.finding import Limits

        for option, size in (("--large", self.large), ("--one-hot", self.one_hot)):
            if not math.isfinite(size):
                raise InputError(
                    f"{option} {size} is not a valid size in MB; give one such as {option} 10"
                )
        return Limits(large=self.large * 1e6, one_hot=self.one_hot * 1e6)


@click.command(
    "lint",
    cls=OfSubject,
    short_help="Find memory that is wasted.",
    epilog="Example: nnx-pipeline lint mixtral-small --mesh stage=4,fsdp=2, or "
    "nnx-pipeline lint my_model:train_step --inputs my_model:abstract_inputs",
)
@subject_options
@options.mesh_option()
@options.bundled(
    "limits",
    LimitsInMB,
    click.option(
        "--large",
        type=click.FloatRange(min=0),
        default=1.0,
        show_default=True,
        metavar="MB",
        help="Arrays below this size are not reported.",
    ),
    click.option(
        "--one-hot",
        type=click.FloatRange(min=0),
        default=256.0,
        show_default=True,
        metavar="MB",
        help="One-hot arrays below this size are not reported.",
    ),
)
@options.json_option
def lint_command(
    name: str | None,
    inputs: GivenArguments,
    chosen: Chosen,
    mesh: str,
    limits: LimitsInMB,
    json_path: str | None,
) -> None:
    """Find wasted memory in a training step, or in your own function, without a compiler.

    \b
    Rules:
      not-donated
        an argument comes back updated, and is not donated
      donation-lost
        it is donated, and the result has another dtype or
        sharding
      cache-rebuilt
        a cache is copied into a new array in each step
      residuals-stacked
        a scan stores much, and has no jax.checkpoint
      scores-stored
        attention scores of all queries with all keys
      logits-stored
        float32 logits of all tokens and the vocabulary
      states-stored
        states of all positions, of an associative scan
      dispatch-stored
        one-hot arrays of tokens, experts and capacity
      layers-gathered
        all layers of a stack are gathered at once
      gathered-twice
        the same array is gathered twice
      replicated-parameter
        a parameter is whole on each device, where others
        are split
      captured-constant
        an array is part of the program, not an argument
      parameter-in-loop
        a parameter is carried or stacked by a loop
      gradient-per-microbatch
        gradients of all microbatches are stored before
        they are added up
      remat-policy
        a policy of jax.checkpoint saves everything, or
        nothing by mistake
      cast-before-loop
        an array is cast to a wider dtype whole, and a loop
        reads parts of it
      hidden-upcast
        a large array is cast to match another operand
      one-hot
        a one-hot array above --one-hot
      trivial-constraint
        a sharding constraint that shards no axis

    What models do on purpose in small (whatever is stored or stacked) is reported from 32
    times --large and 5 % of the arguments, a cast before a loop from 32 times, and a captured
    constant from 4 times. Sizes are per device where the sharding is known without a compiler, else
    for all devices together. The parameters of your own function are the nnx.Params of its
    arguments. Without NNX variables they are the floating-point arrays of those arguments that a
    training step multiplies by and returns in their shapes, or of the first argument. Exit 1 when
    there are findings, and 2 when the function cannot be traced.
    """
    sizes = limits.limits()
    subject = subject_of(name, chosen, inputs, mesh)
    from nnx_pipeline.lab._report.output import check_writable

    check_writable(json_path, "--json")
    from nnx_pipeline.lab._cli.linting import run_lint

    run_lint(subject, sizes, json_path)


@click.command(
    "platforms",
    short_help="List what can be compiled for.",
    epilog="Example: nnx-pipeline platforms",
)
@options.json_option
def platforms_command(json_path: str | None) -> None:
    """List the accelerators that a program can be compiled for, each with a host of it.

    Memory is what a program may use of one device, in GB (10⁹ bytes). `time` says from what a step
    is estimated. A larger slice of a TPU, or more GPUs or hosts, are written in the same way:
    tpu:v5p:4x4x4, cuda:h100:4x8 for four hosts of eight GPUs.
    """
    from nnx_pipeline.lab._cli.platforms import list_platforms

    list_platforms(json_path)
