"""`--html` and `--chart`: the result of a command as a page and as a picture to send."""

import shlex
from collections.abc import Sequence

import click
from click.core import ParameterSource

from nnx_pipeline.cli_options import Command
from nnx_pipeline.files import write_text
from nnx_pipeline.lab.chart import outcomes_chart, program_chart
from nnx_pipeline.lab.compare import Outcome
from nnx_pipeline.lab.compile import Measurement
from nnx_pipeline.lab.page import measurement_page, outcomes_page
from nnx_pipeline.lab.report import check_outputs
from nnx_pipeline.pipeline.picture import check_picture, save_figure

_OUTPUTS = ("html_path", "chart_path", "json_path")  # where results go, not what they are


def report_options(command: Command) -> Command:
    """`--html` and `--chart`."""
    command = click.option(
        "--chart",
        "chart_path",
        metavar="PATH",
        help="Draw memory by role as .png or .svg, for a pull request.",
    )(command)
    return click.option(
        "--html",
        "html_path",
        metavar="PATH",
        help="Write the report as one page that needs no network, to look at and to send.",
    )(command)


def check_reports(html_path: str | None, chart_path: str | None, json_path: str | None) -> None:
    """Raises InputError, before any work is done, if one of the files cannot be made."""
    check_outputs(html=html_path, chart=chart_path, json=json_path)
    check_picture(chart_path, "--chart")


def write_outcomes(
    title: str,
    outcomes: Sequence[Sequence[Outcome]],
    html_path: str | None,
    chart_path: str | None,
) -> None:
    """Writes what was asked for of an A/B: each file whole or not at all.

    outcomes: the same experiments once, or with Triton's and with cuBLASLt's matrix products.
    """
    if html_path:
        write_text(html_path, outcomes_page(title, *outcomes, command=_command_line()))
    if chart_path:
        save_figure(outcomes_chart(title, *outcomes), chart_path)


def write_measurement(
    title: str,
    measured: Sequence[Measurement],
    top: int,
    html_path: str | None,
    chart_path: str | None,
) -> None:
    """The same of one program, with one or both kinds of matrix products."""
    if html_path:
        page = measurement_page(title, *measured, command=_command_line(), top=top)
        write_text(html_path, page)
    if chart_path:
        save_figure(program_chart(title, *measured), chart_path)


def _command_line() -> str:
    """What was typed, without where the results go: that is of this machine."""
    context = click.get_current_context()
    words = context.command_path.split()
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        value = context.params.get(name)
        if not given or name in _OUTPUTS:
            continue
        flag = [] if isinstance(parameter, click.Argument) else [parameter.opts[0]]
        if value is True:
            words += flag
            continue
        for item in value if isinstance(value, tuple) else (value,):
            words += [*flag, str(item)]
    return shlex.join(words)
