"""What a program costs: compiled for an accelerator that is not there, and compared.

Nothing here knows a model, a config or a pipeline; `nnx_pipeline.experiments` binds it to those of
this project.
"""

from nnx_pipeline.lab.api import compare, measure
from nnx_pipeline.lab.comparison.sweep import Sweep
from nnx_pipeline.lab.compile.platform import Platform

__all__ = ["Platform", "Sweep", "compare", "measure"]
