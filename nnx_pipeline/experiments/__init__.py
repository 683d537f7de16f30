"""Experiments that test claims about this project's training step in the compile-memory lab."""

from typing import TYPE_CHECKING

from nnx_pipeline.lab._lazy import lazy

if TYPE_CHECKING:
    from nnx_pipeline.experiments.bound.floor import floor
    from nnx_pipeline.experiments.growth import sweep

__all__ = ["floor", "sweep"]

__getattr__, __dir__ = lazy(__name__)
