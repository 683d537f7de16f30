"""What a change costs: compile for an accelerator that is not there, and compare."""

from nnx_pipeline.lab.own import compare, measure
from nnx_pipeline.lab.sweep import Sweep, sweep

__all__ = ["Sweep", "compare", "measure", "sweep"]
