"""Writes the sections of docs/fields.md from what stands below each field of the configs.

`python tests/field_reference.py` does so. What stands there before the first section is written by
hand, and kept.
"""

import ast
import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from nnx_pipeline.config.config import SECTIONS

PAGE = Path(__file__).parents[1] / "docs" / "fields.md"


def document() -> str:
    """The page."""
    about = PAGE.read_text("utf-8").partition("\n## ")[0]
    parts = [about.rstrip() + "\n"]
    for name, kind in SECTIONS.items():
        parts.append(f"## {name}\n")
        parts.append("\n".join(["| field | default | what it is |\n|---|---|---|", *_rows(kind)]))
        parts.append("")
    return "\n".join(parts)


def _rows(kind: Any) -> Iterator[str]:
    said = meanings(kind)
    for field in dataclasses.fields(kind):
        has_default = field.default is not dataclasses.MISSING
        default = f"`{_value(field.default)}`" if has_default else "required"
        yield f"| `{field.name}` | {default} | {_choices(field.type)}{_cell(said[field.name])} |"


def meanings(kind: Any) -> dict[str, str]:
    """The text below each field of a dataclass, by the name of the field."""
    (found,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(found, ast.ClassDef)
    texts: dict[str, str] = {}
    for before, after in zip(found.body, found.body[1:], strict=False):
        is_field = isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        if is_field and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[before.target.id] = inspect.cleandoc(str(after.value.value))
    return texts


def _value(default: Any) -> str:
    """A default as `--set` takes it."""
    return default if isinstance(default, str) else json.dumps(default).replace("null", "none")


def _choices(kind: Any) -> str:
    """The values of a Literal, which others a field may have among them."""
    values = [one for part in (kind, *get_args(kind)) for one in get_args(part)]
    named = [f"`{value}`" for value in values if isinstance(value, str)]
    return f"{', '.join(dict.fromkeys(named))}. " if named else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(document(), "utf-8")
