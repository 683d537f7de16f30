"""What a program costs: compiled for an accelerator that is not there, and compared."""

from typing import TYPE_CHECKING

from nnx_pipeline.lab._lazy import lazy

if TYPE_CHECKING:
    from nnx_pipeline.lab.api import compare, measure
    from nnx_pipeline.lab.comparison.sweep import Sweep
    from nnx_pipeline.lab.compile.platform import Platform
    from nnx_pipeline.lab.memory_table import memory

__all__ = ["Platform", "Sweep", "compare", "measure", "memory"]

__getattr__, __dir__ = lazy(__name__)
