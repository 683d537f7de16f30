"""The options `--html` and `--chart`, which write a result as a page and as a picture."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from nnx_pipeline.lab._files import check_picture, save_figure, write_text

if TYPE_CHECKING:
    from nnx_pipeline.lab._report.view.remarks import Remark
    from nnx_pipeline.lab.comparison.outcome import Outcome
    from nnx_pipeline.lab.compile.measure import Measurement

# Where results go, and what is said beside them; they change no result.
_OUTPUTS = ("html_path", "chart_path", "json_path", "explain")


@dataclass(frozen=True)
class Explained:
    json_path: str | None
    explain: bool

    def say_words(self, *groups: Mapping[str, str]) -> None:
        from rich.text import Text

        from nnx_pipeline.lab._report.output import show
        from nnx_pipeline.lab._report.tables import word_list
        from nnx_pipeline.lab._report.view.words import HINT

        view = word_list(*groups) if self.explain else Text(HINT, style="dim")
        show(view, json_path=self.json_path)


@dataclass(frozen=True)
class Written(Explained):
    hlo_path: str | None


@dataclass(frozen=True)
class Outputs(Explained):
    html_path: str | None
    chart_path: str | None

    def check(self) -> None:
        from nnx_pipeline.lab._report.output import check_outputs

        check_outputs(html=self.html_path, chart=self.chart_path, json=self.json_path)
        check_picture(self.chart_path, "--chart")

    def write_outcomes(self, title: str, outcomes: Sequence[Sequence[Outcome]]) -> None:
        """Takes the outcomes once, or with Triton's and with cuBLASLt's matrix products."""
        if self.html_path:
            from nnx_pipeline.lab._page import outcomes_page

            write_text(self.html_path, outcomes_page(title, *outcomes, command=_command_line()))
        if self.chart_path:
            from nnx_pipeline.lab._report.chart import outcomes_chart

            save_figure(outcomes_chart(title, *outcomes), self.chart_path)

    def write_measurement(
        self, title: str, measured: Sequence[Measurement], top: int, notes: Sequence[Remark] = ()
    ) -> None:
        """Writes the page and the chart; `notes` are further lines at the head of the page."""
        if self.html_path:
            from nnx_pipeline.lab._page import measurement_page

            command = _command_line()
            page = measurement_page(title, *measured, command=command, top=top, notes=notes)
            write_text(self.html_path, page)
        if self.chart_path:
            from nnx_pipeline.lab._report.chart import program_chart

            save_figure(program_chart(title, *measured), self.chart_path)


def _command_line() -> str:
    """The command as typed, without output files: they mean nothing on another machine."""
    context = click.get_current_context()
    words = context.command_path.split()
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        value = context.params.get(name)
        if not is_given or name in _OUTPUTS:
            continue
        flag = [] if isinstance(parameter, click.Argument) else [parameter.opts[0]]
        if value is True:
            words += flag
        else:
            for item in value if isinstance(value, tuple) else (value,):
                words += [*flag, str(item)]
    return shlex.join(words)
