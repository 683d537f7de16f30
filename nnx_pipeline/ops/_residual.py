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
    number: int,
    rate: float,
    layout: Layout,
) -> Float[Array, "batch seq embed"]:
    """stream + dropout(update), whose mask depends on its `number` within the layer."""
    spec = layout.spec("batch", None, None)
    if keys is not None and rate:
        update = dropout(update, keys, rate=rate, number=number, spec=spec)
    return constrain(stream + update, spec)


def two_updates(
    x: Float[Array, "batch seq embed"],
    attend: Callable[[Array], Array],
    feed_forward: Callable[[Array], tuple[Array, Reported]],
    add: Callable[..., Array],
) -> tuple[Float[Array, "batch seq embed"], Reported]:
    """h = x + attend(x); y = h + feed_forward(h); returns y and what `feed_forward` reports."""
    h = add(x, attend(x), number=0)
    mixed, reported = feed_forward(h)
    return add(h, mixed, number=1), reported
