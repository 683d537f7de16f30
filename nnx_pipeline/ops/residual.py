"""The residual stream of a decoder layer."""

from jaxtyping import Array, Float

from nnx_pipeline.ops.dropout import Keys, dropout
from nnx_pipeline.sharding import Constrain, Layout, constrain


def add_to_stream(
    stream: Float[Array, "batch seq embed"],
    update: Float[Array, "batch seq embed"],
    *,
    mask: tuple[Keys, int] | None,
    rate: float,
    layout: Layout,
    constrain: Constrain = constrain,
) -> Float[Array, "batch seq embed"]:
    """stream + dropout(update).

    - `stream`: the residual stream, sharded by ("batch", None, None), as the result is.
    - `update`: the output of attention or feed-forward.
    - `mask`: the dropout keys of the layer, and the number of the update within the layer, so that
      each update has a mask of its own; None for no dropout.
    - `rate`: the probability with which dropout sets a value to zero.
    - `layout`: which mesh axes the batch is sharded over.
    - `constrain`: holds the result to its sharding; experiments replace it.
    """
    spec = layout.spec("batch", None, None)
    if mask is not None and rate:
        keys, place = mask
        update = dropout(update, keys, rate=rate, number=place, spec=spec)
    return constrain(stream + update, spec)
