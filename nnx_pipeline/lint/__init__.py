"""What a jaxpr shows to be wasted memory, before any compiler has seen it."""

from nnx_pipeline.lint.check import lint, lint_step
from nnx_pipeline.lint.finding import Finding, Limits

__all__ = ["Finding", "Limits", "lint", "lint_step"]
