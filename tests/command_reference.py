"""Writes the sections of docs/commands.md from the help of the commands.

`python tests/command_reference.py` does so. What stands there before the first section is written
by hand, and kept.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
from helpers import commands_of

from linen_compat._cli.main import commands as linen_compat
from nnx_pipeline.lab._cli.main import cli as nnx_pipeline

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"


def document() -> str:
    """The page."""
    groups = {"nnx-pipeline": nnx_pipeline, "linen-compat": linen_compat}
    about = PAGE.read_text("utf-8").partition("\n## ")[0]
    lines = [about.rstrip() + "\n"]
    for program, group in groups.items():
        for name, command in commands_of(group).items():
            lines += _command(f"{program} {name}", command)
    return "\n".join(lines)


def _command(name: str, command: click.Command) -> Iterator[str]:
    given = [one for one in command.params if isinstance(one, click.Argument)]
    yield f"## {name}\n"
    yield f"`{' '.join([name, '[OPTIONS]', *map(_metavar, given)])}`\n"
    for paragraph in (command.help or "").split("\n\n"):
        yield (_listed if "\b" in paragraph else _cell)(paragraph) + "\n"
    example = _cell(command.epilog or "").removeprefix("Example: ")
    if example:
        yield f"Example: `{example.replace(', or ', '`, or `')}`\n"
    yield "| option | what it does |\n|---|---|"
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            yield f"| {_names(option)} | {_cell(option.help or '')}{_default(option)} |"
    yield ""


def _metavar(parameter: click.Parameter) -> str:
    name = parameter.metavar or (parameter.name or "").upper()
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _names(option: click.Option) -> str:
    value = option.metavar
    if value is None and isinstance(option.type, click.Choice):
        value = "|".join(map(str, option.type.choices))
    if value is None and not option.is_flag:
        value = "NUMBER" if _is_number(option.type) else "TEXT"
    names = "`, `".join(option.opts)
    return f"`{names} {value.replace('|', chr(92) + '|')}`" if value else f"`{names}`"


def _is_number(kind: click.ParamType) -> bool:
    return isinstance(kind, type(click.INT) | type(click.FLOAT))


def _default(option: click.Option) -> str:
    if option.required:
        return " Required."
    shown = option.show_default
    if not shown:
        return ""
    return f" Default: {shown if isinstance(shown, str) else option.default}."


def _listed(text: str) -> str:
    """A heading and names, each with a text below it that is further in, as a list."""
    head, *lines = textwrap.dedent(text.replace("\b", "")).strip().splitlines()
    items = re.split(r"^(?=\S)", textwrap.dedent("\n".join(lines)), flags=re.MULTILINE)[1:]
    parts = (item.partition("\n") for item in items)
    return "\n".join([f"{head}\n", *(f"- `{name}`: {_cell(what)}" for name, _, what in parts)])


def _cell(text: str) -> str:
    """A text in one line, as a cell of a table can hold it."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(document(), "utf-8")
