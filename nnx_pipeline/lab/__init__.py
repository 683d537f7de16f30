"""What a change costs: compile for an accelerator that is not there, and compare."""

from nnx_pipeline.lab.own import compare, measure

__all__ = ["compare", "measure"]
