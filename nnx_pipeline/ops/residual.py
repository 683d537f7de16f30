"""The residual stream of a decoder layer."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.ops.dropout import Keys, dropout, fold_in
from nnx_pipeline.sharding import Constrain, Layout, constrain


def add_to_stream(
    stream: Float[Array, "batch seq embed"],
    update: Float[Array, "batch seq embed"],
    *,
    keys: Keys | None,
    place: int,
    rate: float,
    layout: Layout,
    constrain: Constrain = constrain,
) -> Float[Array, "batch seq embed"]:
    """stream + dropout(update). keys: those of the layer; without them nothing is left out.

    place: number of the update within the layer, so that each has a mask of its own.
    """
    spec = layout.spec("batch", None, None)
    if keys is not None and rate:
        update = dropout(update, fold_in(keys, jnp.int32(place)), rate=rate, spec=spec)
    return constrain(stream + update, spec)
