"""What a program costs: compiled for an accelerator that is not there, and compared."""

from typing import TYPE_CHECKING

from nnx_pipeline.lab._lazy import lazy

if TYPE_CHECKING:
    from nnx_pipeline.lab._page.memory_table import memory
    from nnx_pipeline.lab.api import compare, fit_largest, measure
    from nnx_pipeline.lab.comparison.sweep import Sweep
    from nnx_pipeline.lab.compile.platform import Platform

__all__ = ["Platform", "Sweep", "compare", "fit_largest", "measure", "memory"]

__getattr__, __dir__ = lazy(__name__)
