"""The same module, working with weights that lie elsewhere."""

from typing import TypeVar

import jax
from flax import nnx

from nnx_pipeline.sharding import Layout

Module = TypeVar("Module", bound=nnx.Module)


def with_layout(module: Module, layout: Layout) -> Module:
    """A copy whose modules all go by `layout`; the variables keep their values and metadata."""
    copy = jax.tree.map(lambda leaf: leaf, module)
    for _, inner in nnx.iter_modules(copy):
        if hasattr(inner, "layout"):
            inner.layout = layout
    return copy
