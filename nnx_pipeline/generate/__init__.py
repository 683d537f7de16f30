"""Generation: a model with caches, sampling, and texts as tokens."""

from nnx_pipeline.generate.loop import Request, generate
from nnx_pipeline.generate.sampling import Sampling

__all__ = ["Request", "Sampling", "generate"]
