"""A linter that finds wasted memory in the jaxpr of a function, without compiling it."""

from typing import TYPE_CHECKING

from nnx_pipeline.lab._lazy import lazy

if TYPE_CHECKING:
    from nnx_pipeline.lab.lint.check import lint
    from nnx_pipeline.lab.lint.finding import Finding, Limits

__all__ = ["Finding", "Limits", "lint"]

__getattr__, __dir__ = lazy(__name__)
