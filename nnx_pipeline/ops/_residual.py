"""The residual stream of a decoder layer."""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.sharding.dropout import Keys, dropout
from nnx_pipeline.sharding.layout import Layout, constrain

Reported = TypeVar("Reported")
Norm = Callable[[Array], Array]


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


def update_of(
    x: Float[Array, "batch seq embed"],
    block: Callable[[Array], Array],
    norms: tuple[Norm | None, Norm | None],
    scale: float = 1.0,
) -> Float[Array, "batch seq embed"]:
    """scale · after(block(before(x))): what a block adds to the stream that it reads.

    `norms` are `before` and `after`, either of which may be missing.
    """
    before, after = norms
    x = block(x if before is None else before(x))
    x = x if after is None else after(x)
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


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
