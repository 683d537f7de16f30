"""The options that write a result: as JSON, a page, a picture, or a comment of a pull request."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from nnx_pipeline.lab._cli.support import Failed
from nnx_pipeline.lab._files import (
    check_picture,
    save_figure,
    write_output,
    write_text,
    write_whole,
)
from nnx_pipeline.lab.errors import InputError

if TYPE_CHECKING:
    from nnx_pipeline.lab._report.markdown import ChangedLines
    from nnx_pipeline.lab._report.view.remarks import Remark
    from nnx_pipeline.lab.comparison.limit import Limit
    from nnx_pipeline.lab.comparison.outcome import Outcome
    from nnx_pipeline.lab.comparison.sweep import Sweep
    from nnx_pipeline.lab.compile.measure import Measurement

# Where results go, and what is said beside them; they change no result.
FORMATS = ("github-action-benchmark", "bencher")  # of other tools that read JSON
_OUTPUTS = (
    *("html_path", "chart_path", "json_path", "pprof_path", "explain"),
    *("markdown_path", "link", "format"),
)


@dataclass(frozen=True)
class Explained:
    json_path: str | None
    explain: bool

    @property
    def to_standard_output(self) -> str | None:
        """`-` where standard output is for a file's text, and no table is shown there."""
        return "-" if self.json_path == "-" else None

    def say_words(self, *groups: Mapping[str, str]) -> None:
        from rich.text import Text

        from nnx_pipeline.lab._report.output import show
        from nnx_pipeline.lab._report.tables import word_list
        from nnx_pipeline.lab._report.view.words import HINT

        view = word_list(*groups) if self.explain else Text(HINT, style="dim")
        show(view, json_path=self.to_standard_output)


@dataclass(frozen=True)
class Formatted(Explained):
    format: str | None

    def check_format(self) -> None:
        if self.format and self.json_path is None:
            raise InputError(f"--format {self.format} is a form of --json; add --json PATH")

    def emit(self, ours: object, measured: Iterable[tuple[str, Measurement]]) -> None:
        """Writes `--json`: as ours or, in the form of another tool, the figures of programs."""
        from nnx_pipeline.lab._report.output import emit_json

        if self.format:
            from nnx_pipeline.lab._report.benchmarks import benchmark_json

            ours = benchmark_json(self.format, measured)
        emit_json(self.json_path, ours)


@dataclass(frozen=True)
class Written(Formatted):
    hlo_path: str | None


@dataclass(frozen=True)
class Outputs(Explained):
    html_path: str | None
    chart_path: str | None

    def check(self) -> None:
        from nnx_pipeline.lab._report.output import check_outputs

        names = ("html", "chart", "pprof", "json")
        check_outputs(**{name: getattr(self, f"{name}_path", None) for name in names})
        check_picture(self.chart_path, "--chart")

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


@dataclass(frozen=True)
class MemoryOutputs(Outputs):
    pprof_path: str | None

    def write_profile(self, title: str, measured: Measurement) -> None:
        if self.pprof_path and (heap := measured.attribution):
            from nnx_pipeline.lab._report.pprof import pprof_profile

            write_whole(self.pprof_path, pprof_profile(heap, f"{title}: {_command_line()}"))


@dataclass(frozen=True)
class ComparisonOutputs(Outputs, Formatted):
    markdown_path: str | None
    link: str | None
    fail_above: tuple[str, ...]

    @property
    def to_standard_output(self) -> str | None:
        return "-" if "-" in (self.json_path, self.markdown_path) else None

    def check(self) -> None:
        from nnx_pipeline.lab._report.output import check_outputs

        paths = {"html": self.html_path, "chart": self.chart_path}
        check_outputs(**paths, json=self.json_path, markdown=self.markdown_path)
        check_picture(self.chart_path, "--chart")
        self.check_format()
        self._limits()
        if self.link is None:
            return
        if self.markdown_path is None:
            raise InputError(f"--link {self.link} is put into --markdown; add --markdown PATH")
        if not re.fullmatch(r"https?://[^\s<>]+", self.link):
            raise InputError(
                f"--link {self.link} is no address of a page; give one such as "
                "https://example.org/report.html"
            )

    def report(
        self,
        title: str,
        outcomes: Sequence[Sequence[Outcome]],
        platform: str,
        changed: ChangedLines = MappingProxyType({}),
    ) -> None:
        """Shows the outcomes, and writes the files that the user named.

        - `title`: what is compared.
        - `outcomes`: once, or with Triton's and with cuBLASLt's matrix products.
        - `platform`: what was compiled for.
        - `changed`: the lines that differ between the sources of the arms, by their file.
        """
        from nnx_pipeline.lab._report import tables
        from nnx_pipeline.lab._report.view import words

        tables.show_outcomes(title, outcomes, platform, json_path=self.to_standard_output)
        self.emit(
            tables.outcomes_json(outcomes, platform),
            _titled_arms(title.partition(platform)[0].rstrip(" ,;"), outcomes),
        )
        self.say_words(words.MEMORY, words.TIME, words.VERDICTS, words.BUFFERS)
        if self.html_path:
            from nnx_pipeline.lab._page import outcomes_page

            write_text(self.html_path, outcomes_page(title, *outcomes, command=_command_line()))
        if self.chart_path:
            from nnx_pipeline.lab._report.chart import outcomes_chart

            save_figure(outcomes_chart(title, *outcomes), self.chart_path)
        if self.markdown_path:
            from nnx_pipeline.lab._report.markdown import outcomes_markdown

            text = outcomes_markdown(
                title, outcomes, changed=changed, link=self.link, command=_command_line()
            )
            if self.markdown_path == "-":
                write_output(text)
            else:
                write_text(self.markdown_path, text)

    def write_sweep(self, title: str, sweep: Sweep) -> None:
        if self.html_path:
            from nnx_pipeline.lab._page import sweep_page

            write_text(self.html_path, sweep_page(title, sweep, command=_command_line()))
        if self.chart_path:
            from nnx_pipeline.lab._report.sweep import sweep_chart

            save_figure(sweep_chart(title, sweep), self.chart_path)

    def fail_if_worse(self, outcomes: Sequence[Sequence[Outcome]]) -> None:
        """Raises Failed where arm b exceeds arm a by more than `--fail-above` allows."""
        each = itertools.product(itertools.chain(*outcomes), self._limits())
        if worse := [
            text for outcome, limit in each if (text := limit.broken_by(outcome, "--fail-above"))
        ]:
            raise Failed("; ".join(dict.fromkeys(worse)))

    def _limits(self) -> list[Limit]:
        if not self.fail_above:
            return []
        from nnx_pipeline.lab.comparison.limit import parse_limit

        return [parse_limit("--fail-above", text) for text in self.fail_above]


def _titled_arms(
    title: str, outcomes: Sequence[Sequence[Outcome]]
) -> Iterator[tuple[str, Measurement]]:
    """Functions by their names, and presets by the title, so that they are called the same at every
    revision."""
    from nnx_pipeline.lab._report.view.figures import subject_of

    for outcome in itertools.chain(*outcomes):
        for key, (_, arm) in zip("ab", outcome.arms, strict=True):
            if arm:
                is_function = "function" in arm.config
                what = subject_of(arm) if is_function else f"{outcome.question.name}, {title}"
                yield f"{what}, {key}", arm


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
