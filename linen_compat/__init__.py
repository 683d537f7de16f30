"""Linen-style classes and checkpoints beside `nnx_pipeline`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linen_compat.loading import load as load

# Public names and where they are; imported when they are asked for, so that `linen-compat --help`
# does not wait for what it does not need.
_PUBLIC = {
    "load": "loading",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'linen_compat' has no attribute {name!r}")
    return getattr(importlib.import_module(f"linen_compat.{_PUBLIC[name]}"), name)
