"""Imports the modules of a package's public names when a name is first asked for."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package with this dotted name.

    Its names are what its `__init__` imports under `if TYPE_CHECKING`. So the package alone imports
    no JAX: pytest imports that of the plugin before any `conftest.py` can set JAX's flags, and
    `--help` should answer at once.
    """
    module = sys.modules[package]
    text = Path(module.__file__ or "").read_text(encoding="utf-8")
    home = {
        alias.asname or alias.name: (node.module, alias.name)
        for statement in ast.parse(text).body
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
        for node in statement.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        source, origin = home[name]
        value = getattr(importlib.import_module(source), origin)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *home})
