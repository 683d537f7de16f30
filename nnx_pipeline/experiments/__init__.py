"""Experiments that test claims about this project's training step in the compile-memory lab."""

from nnx_pipeline.experiments.growth import sweep

__all__ = ["sweep"]
