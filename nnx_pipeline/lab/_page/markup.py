"""HTML built from nested calls of Python functions, with every text escaped and printable."""

import html
from collections.abc import Sequence
from typing import TypeAlias

from nnx_pipeline.lab.errors import printable

_VOID = {"meta", "link", "input", "rect", "path", "line"}


class Markup(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


Content: TypeAlias = "str | Sequence[Content] | None"  # a Markup is a str that is not escaped


def element(name: str, /, *content: "Content", **attributes: str | float | bool | None) -> Markup:
    """The HTML element `<name attributes>content</name>`; texts are escaped, and None is left out.

    In the name of an attribute an underscore stands for a hyphen and one at the end is dropped
    (`class_`, `aria_label`). None or False leaves an attribute out, True gives it no value.
    """
    begin = f"<{name}{''.join(_attribute(*pair) for pair in attributes.items())}>"
    if name in _VOID:
        return Markup(begin if name in ("meta", "link", "input") else begin[:-1] + "/>")
    return Markup(f"{begin}{fragment(*content)}</{name}>")


def fragment(*content: "Content") -> Markup:
    return Markup("".join(_text(part) for part in content))


def _text(part: "Content") -> str:
    if part is None:
        return ""
    if isinstance(part, Markup):
        return part
    if isinstance(part, str):
        return html.escape(printable(part, keep="\n"), quote=False)
    return fragment(*part)


def _attribute(name: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(printable(str(value)))}"'
