"""Options that several commands share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from nnx_pipeline.lab._cli import completion
from nnx_pipeline.lab._cli.outputs import (
    FORMATS,
    ComparisonOutputs,
    MemoryOutputs,
    Outputs,
    Written,
)
from nnx_pipeline.lab._cli.presets import presets
from nnx_pipeline.lab._cli.values import Baseline, Chosen, Costing, Measuring, Place, Target
from nnx_pipeline.lab.errors import MOST, InputError
from nnx_pipeline.lab.mesh import AXES

Command = Callable[..., Any]
COUNT = click.IntRange(1, MOST)  # of an option that says how many


def bundled(
    name: str, kind: type[Any], *options: Callable[[Command], Command]
) -> Callable[[Command], Command]:
    """Adds options to a command, which receives them as `name`: a `kind` with a field for each."""

    def add(command: Command) -> Command:
        own, inner = getattr(command, "bundled", (command, ()))
        bundles = ((name, kind), *inner)

        @functools.wraps(command)
        def with_bundles(**given: Any) -> Any:
            for name, kind in bundles:
                fields = {field.name: given.pop(field.name) for field in dataclasses.fields(kind)}
                given[name] = kind(**fields)
            return own(**given)

        decorated: Command = with_bundles
        vars(decorated)["bundled"] = own, bundles
        # Decorators apply from the bottom up: in reverse, `--help` lists them in the given order.
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return add


def json_option(command: Command) -> Command:
    text = "Write the result as JSON; - is standard output."
    return click.option("--json", "json_path", metavar="PATH", help=text)(command)


def memory_limit_option(command: Command) -> Command:
    return click.option(
        "--limit",
        default="100%",
        show_default=True,
        metavar="SHARE|BYTES",
        help="What may be used of a device: 95% of its memory, 76GB or 70GiB.",
    )(command)


top_option = click.option(
    "--top",
    type=COUNT,
    default=20,
    show_default=True,
    metavar="N",
    help="Rows of the table; all other buffers are summed in one more row.",
)
explain_option = click.option(
    "--explain", is_flag=True, help="Say below the tables what their words mean."
)

format_option = click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="Write --json in the form that github-action-benchmark or Bencher reads.",
)

_page_and_chart = (
    click.option(
        "--html",
        "html_path",
        metavar="PATH",
        help="Write the report as one self-contained HTML page.",
    ),
    click.option(
        "--chart",
        "chart_path",
        metavar="PATH",
        help="Draw memory by role as .png or .svg, for a pull request.",
    ),
)
report_options = bundled("outputs", Outputs, *_page_and_chart, json_option, explain_option)

comparison_options = bundled(
    "outputs",
    ComparisonOutputs,
    *_page_and_chart,
    click.option(
        "--markdown",
        "markdown_path",
        metavar="PATH",
        help="Write the comparison as a comment for a pull request; - is standard output.",
    ),
    click.option(
        "--link", metavar="URL", help="Where the page of --html can be read, for --markdown."
    ),
    json_option,
    format_option,
    click.option(
        "--fail-above",
        multiple=True,
        metavar="[FIGURE=]LIMIT",
        help="Exit 1 if b needs more than this: 5% above a is of the account, step=10% of the "
        "estimated step, heap=24MB of b alone; also temp and peak. A figure that is not known "
        "fails too. May be repeated.",
    ),
    explain_option,
)

pprof_option = click.option(
    "--pprof",
    "pprof_path",
    metavar="PATH",
    help="Write the heap at its peak by call stack, for `go tool pprof` and what reads its files.",
)
memory_options = bundled(
    "outputs", MemoryOutputs, *_page_and_chart, pprof_option, json_option, explain_option
)

written_options = bundled(
    "written",
    Written,
    click.option("--hlo", "hlo_path", metavar="PATH", help="Write the optimized program as text."),
    json_option,
    format_option,
    explain_option,
)


def config_options(*, required: bool = True, hidden: bool = False) -> Callable[[Command], Command]:
    """`--model` and `--set`, received as `chosen`; a hidden `--model` is an old spelling."""
    return bundled(
        "chosen",
        Chosen,
        click.option(
            "--model",
            metavar="PRESET",
            help="A preset; `nnx-pipeline models` lists them.",
            shell_complete=completion.presets,
            hidden=hidden,
            required=required,
        ),
        click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="KEY=VALUE",
            help="Override a config field, such as model.num_layers=8; may be repeated.",
            shell_complete=completion.fields,
        ),
    )


def chosen_config(chosen: Chosen) -> Any:
    return presets().config_of(str(chosen.model), chosen.assignments)


def target_options(
    kind: type[Target] = Target, *, by_one: bool = False
) -> Callable[[Command], Command]:
    """`--mesh`, `--dcn`, `--platform`, `--gemm` and `--xla`, received as `target`; `by_one` is for
    a command that compiles with one kind of matrix products."""
    default = "one device" if kind is Target else "one device for functions, else stage=4,fsdp=2"
    options: list[Callable[[Command], Command]]
    options = [mesh_option(default), dcn_option, platform_option, _gemm_option(by_one)]
    if kind is Target:
        help = (
            "Set an option of the compiler, such as xla_tpu_scoped_vmem_limit_kib=65536, or a set "
            "of them that MaxText publishes, such as @host_offload_flags (@ alone lists all); may "
            "be repeated."
        )
        return bundled("target", kind, *options, _xla_option("--xla", help))
    both = "Set an option of the compiler for both arms, as for `nnx-pipeline measure`."
    options += [_xla_option("--xla", both)]
    options += [_xla_option(f"--xla-{arm}", f"The same for arm {arm} alone.") for arm in "ab"]
    return bundled("target", kind, *options)


def _xla_option(name: str, help: str) -> Callable[[Command], Command]:
    return click.option(name, multiple=True, metavar="NAME=VALUE", help=help)


def mesh_option(
    shown: str = "one device", *, of_functions: bool = True
) -> Callable[[Command], Command]:
    others = (
        " A function may have axes of other names, such as dp=4,tp=2, or explicit:dp=4,tp=2 for "
        "explicit ones."
    )
    return click.option(
        "--mesh",
        default="",
        show_default=shown,
        metavar="AXES",
        help=f"Sizes of the mesh axes {', '.join(AXES)}; those left out are 1."
        f"{others if of_functions else ''}",
        shell_complete=completion.axes,
    )


dcn_option = click.option(
    "--dcn",
    default="",
    show_default="no difference between networks",
    metavar="AXES",
    help="How the axes of the mesh are divided over the slices of a TPU, or over hosts, such as "
    "data=2; the rest of an axis stays inside.",
    shell_complete=completion.axes,
)

_PLATFORM: dict[str, Any] = {"metavar": "PLATFORM", "shell_complete": completion.platforms}
# Of what measures: the figures of a CPU mislead, and a compiler needs no accelerator.
platform_option = click.option(
    "--platform",
    "named",
    multiple=True,
    envvar="NNX_PIPELINE_PLATFORM",
    show_default="an installed compiler, of a TPU first",
    help="cpu, local, tpu:v5p:2x2x2, tpu:v5p:2x2x2*2 (two slices), cuda:h100:8, cuda:h100:4x8 "
    "(four hosts), rocm:mi300x:8 … (nnx-pipeline platforms lists them).",
    **_PLATFORM,
)
run_option = click.option(
    "--platform",
    default="cpu",
    show_default=True,
    help="cpu, or local for the devices that JAX sees.",
    **_PLATFORM,
)

place_options = bundled("place", Place, mesh_option(of_functions=False), dcn_option, run_option)

cost_options = bundled(
    "costing",
    Costing,
    click.option(
        "--price",
        "prices",
        multiple=True,
        metavar="[PLATFORM=]PRICE",
        help="What a chip costs per hour, such as 4.2, or cuda:h100=2.9 for one kind of chip; says "
        "what tokens cost. May be repeated.",
    ),
    click.option(
        "--tokens",
        type=COUNT,
        metavar="N",
        help="The tokens of a step of your function, on all devices.",
    ),
)

baseline_options = bundled(
    "before",
    Baseline,
    click.option(
        "--baseline",
        metavar="REVISION|FILE",
        help="Compare with the same program at a git revision, such as main, or with a result that "
        "memory --json wrote to FILE.json.",
    ),
    click.option(
        "--with",
        "packages",
        multiple=True,
        metavar="PACKAGE==VERSION",
        help="Compare with the same program with another version of a package, such as "
        "jax==0.12.0.1 or libtpu==0.0.41; may be repeated.",
    ),
)


def _gemm_option(by_one: bool) -> Callable[[Command], Command]:
    default = "both, and both results are shown where they differ"
    return click.option(
        "--gemm",
        metavar="triton|cublas" if by_one else "triton|cublas|both",
        help="What computes matrix products on GPUs. Programs are compiled without a GPU, which "
        f"would choose by autotuning; {'here' if by_one else 'so'} the default is "
        f"{'triton' if by_one else default}.",
    )


measuring_options = bundled(
    "measuring",
    Measuring,
    click.option("--list", "listed", is_flag=True, help="List the experiments, and what differs."),
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


def given() -> dict[str, str]:
    """The flags on the command line, by the parameter that each fills."""
    context = click.get_current_context()
    return {
        str(one.name): one.opts[0]
        for one in context.command.params
        if context.get_parameter_source(str(one.name)) is ParameterSource.COMMANDLINE
    }


def is_given(option: str) -> bool:
    return option in given()


def refuse(besides: str, *options: str) -> None:
    """Raises InputError for those of the options that are given: `besides` has no use for them."""
    flags = given()
    if unread := [flags[name] for name in options if name in flags]:
        raise InputError(
            f"{besides} cannot be combined with {', '.join(unread)}; leave one of them out"
        )


def check_alone(option: str, *besides: str, called: str = "") -> None:
    """Raises InputError for options beside `option` that it ignores, all but `besides`."""
    flags = given()
    called = called or flags[option]
    if unread := [flag for name, flag in flags.items() if name not in (option, *besides)]:
        raise InputError(
            f"{called} cannot be combined with {', '.join(unread)}; leave one of them out"
        )
