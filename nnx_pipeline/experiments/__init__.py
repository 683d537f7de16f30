"""Experiments that test claims about this project's training step in the compile-memory lab."""

from nnx_pipeline.experiments.bound.floor import floor
from nnx_pipeline.experiments.growth import sweep

__all__ = ["floor", "sweep"]
