"""A linter that finds wasted memory in the jaxpr of a function, without compiling it."""

from nnx_pipeline.lint.check import lint, lint_step
from nnx_pipeline.lint.finding import Finding, Limits

__all__ = ["Finding", "Limits", "lint", "lint_step"]
