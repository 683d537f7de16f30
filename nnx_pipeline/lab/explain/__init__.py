"""Says what a program that others compiled holds in memory, and what would make it smaller."""

from typing import TYPE_CHECKING

from nnx_pipeline.lab._lazy import lazy

if TYPE_CHECKING:
    from nnx_pipeline.lab.explain._cures import Cure
    from nnx_pipeline.lab.explain._program import ReadProgram
    from nnx_pipeline.lab.explain._texts import Message
    from nnx_pipeline.lab.explain.explanation import Explanation, explain

__all__ = ["Cure", "Explanation", "Message", "ReadProgram", "explain"]

__getattr__, __dir__ = lazy(__name__)
