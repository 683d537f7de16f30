"""The residual stream of a decoder layer."""

from collections.abc import Callable
from typing import TypeVar

from jaxtyping import Array, Float

from nnx_pipeline.sharding.dropout import Keys, dropout
from nnx_pipeline.sharding.layout import Layout, constrain

Reported = TypeVar("Reported")


def add_to_stream(
    stream: Float[Array, "batch seq embed"],
    update: Float[Array, "batch seq embed"],
    *,
    keys: Keys | None,
    place: int,
    rate: float,
    layout: Layout,
) -> Float[Array, "batch seq embed"]:
    """stream + dropout(update).

    - `stream`: the residual stream, sharded by ("batch", None, None), as the result is.
    - `update`: the output of attention or feed-forward.
    - `keys`: the dropout keys of the layer; None for no dropout.
    - `place`: the number of the update within the layer: each update has a dropout mask of its own.
    - `rate`: the probability with which dropout sets a value to zero.
    - `layout`: which mesh axes the batch is sharded over.
    """
    spec = layout.spec("batch", None, None)
    if keys is not None and rate:
        update = dropout(update, keys, rate=rate, number=place, spec=spec)
    return constrain(stream + update, spec)


def two_updates(
    x: Float[Array, "batch seq embed"],
    attend: Callable[[Array], Array],
    feed_forward: Callable[[Array], tuple[Array, Reported]],
    add: Callable[..., Array],
) -> tuple[Float[Array, "batch seq embed"], Reported]:
    """A decoder layer: h = x + attend(x); y = h + feed_forward(h), with dropout on both updates.

    - `x`: the residual stream.
    - `attend`: the first update, with the norm before it.
    - `feed_forward`: the second update, with the norm before it, and what a router reports.
    - `add`: `add_to_stream` with all arguments but stream, update and `place`.

    Returns y, and what `feed_forward` reports.
    """
    h = add(x, attend(x), place=0)
    mixed, reported = feed_forward(h)
    return add(h, mixed, place=1), reported
