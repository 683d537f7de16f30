"""Findings as a table for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab.errors import printable
from nnx_pipeline.lab.lint.finding import Finding

_STYLES = {"warning": "bold yellow", "advice": "cyan"}


def findings_view(title: str, findings: Sequence[Finding]) -> RenderableType:
    if not findings:
        return Text(f"{title}: no findings")
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("of", no_wrap=True)
    table.add_column("where and what", overflow="fold")
    for finding in findings:
        rule = Text(finding.rule, style=_STYLES[finding.severity])
        rule.append(f"\n{finding.severity}", style="dim")
        if finding.times > 1:
            rule.append(f"\n{finding.times} times", style="dim")
        of = "one device" if finding.per_device else "all devices"
        table.add_row(rule, f"{finding.bytes / 1e6:,.1f}", of, _text(finding))
    return Group(table)


def _text(finding: Finding) -> Text:
    location = finding.location
    text = Text(f"{_short(str(location))}\n", style="bold")
    if location.caller:
        text.append(f"called from {_short(location.caller)}\n", style="dim")
    text.append(f"{printable(finding.what)}\n", style="not bold")
    text.append(f"→ {finding.cure}", style="not bold green")
    return text


def _short(location: str) -> str:
    return printable(location.removeprefix(f"{Path.cwd()}/"))
