"""Generation: a model with caches, sampling, and texts as tokens."""

from typing import TYPE_CHECKING

from nnx_pipeline.lab._lazy import lazy

if TYPE_CHECKING:
    from nnx_pipeline.generate.loop import Request, generate
    from nnx_pipeline.generate.sampling import Sampling

__all__ = ["Request", "Sampling", "generate"]

__getattr__, __dir__ = lazy(__name__)
