"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), with all its projections."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.config._remat import OUT, QUERY_KEY_VALUE, named
from nnx_pipeline.ops._fast_attention.kernels import Kernel
from nnx_pipeline.sharding._cast import cast_at_use
from nnx_pipeline.sharding.layout import Layout, gather_weight, out_sharding


class LatentProjections(NamedTuple):
    """The kernels of one layer, in the sharding and dtype in which they are stored."""

    query_down: Float[Array, "embed q_rank"] | None  # to the latent vector of queries
    query: Float[Array, "from heads head_dim"]  # from that vector, or from the stream
    kv_down: Float[Array, "embed kv_rank_and_rope"]  # and the one rotated key of all heads
    kv_up: Float[Array, "kv_rank heads key_and_value"]  # what of a key is not rotated, its value
    out: Float[Array, "heads value_dim embed"]


class Latent(NamedTuple):
    """What the heads go through between their projections and their scores.

    `rotate` takes the last `rope_dim` numbers of heads, `[batch, seq, heads, rope_dim]`, and
    positions. The norms are of the latent vectors.
    """

    rotate: Callable[[Array, Array], Array]
    rope_dim: int
    query_norm: Callable[[Array], Array] | None
    kv_norm: Callable[[Array], Array]


def latent_attention(
    x: Float[Array, "batch seq embed"],
    kernels: LatentProjections,
    *,
    places: tuple[Int[Array, "#batch seq"] | None, Int[Array, "batch seq"] | None],
    kernel: Kernel,
    latent: Latent,
    layout: Layout,
) -> Float[Array, "batch seq embed"]:
    """Self-attention whose keys and values are made from one narrow vector per token.

    With c = kv_norm(x · kv_down), head h has the key [c · kv_up_h, rotated part], of which the
    rotated part is the same in all heads, and the value c · kv_up'_h. `places` are the positions of
    the tokens and their segment ids. All else is as for `self_attention`.
    """
    positions, segment_ids = places
    if positions is None:
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    query = _query(x, kernels, latent, positions, layout)
    key, value = _key_and_value(x, kernels, latent, positions, layout)
    query, key, value = map(named, (query, key, value), QUERY_KEY_VALUE)

    grouped = layout.spec("batch", None, "kv_heads", None, None)
    mixed = kernel(query, key, value, segment_ids, grouped=grouped)
    out = _used(kernels.out, x, layout, ("heads", None, "embed"))
    spec = out_sharding(layout.spec("batch", None, None))
    return named(jnp.einsum("bshk,hkd->bsd", mixed, out, out_sharding=spec), OUT)


def _query(
    x: Array, kernels: LatentProjections, latent: Latent, positions: Array, layout: Layout
) -> Float[Array, "batch seq heads head_dim"]:
    first = "embed"
    if kernels.query_down is not None:
        assert latent.query_norm is not None, "a latent query is normalised"
        x, first = latent.query_norm(_down(x, kernels.query_down, layout)), "latent"
    query = _up(x, kernels.query, layout, first)
    plain = query.shape[-1] - latent.rope_dim
    turned = latent.rotate(query[..., plain:], positions)
    return jnp.concatenate([query[..., :plain], turned], axis=-1)


def _key_and_value(
    x: Array, kernels: LatentProjections, latent: Latent, positions: Array, layout: Layout
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq heads value_dim"]]:
    """The key heads, whose last numbers are rotated and the same in all heads, and the values."""
    narrow = _down(x, kernels.kv_down, layout)
    rank = kernels.kv_up.shape[0]
    turned = latent.rotate(narrow[..., None, rank:], positions)
    both = _up(latent.kv_norm(narrow[..., :rank]), kernels.kv_up, layout, "latent")
    plain = kernels.query.shape[-1] - latent.rope_dim
    spec = out_sharding(layout.spec("batch", None, "heads", None))
    shape = (*both.shape[:-1], latent.rope_dim)
    turned = jnp.broadcast_to(turned, shape, out_sharding=spec)
    return jnp.concatenate([both[..., :plain], turned], axis=-1), both[..., plain:]


def _down(x: Array, kernel: Array, layout: Layout) -> Array:
    """`[batch, seq, embed]` to `[batch, seq, latent]`."""
    spec = out_sharding(layout.spec("batch", None, None))
    used = _used(kernel, x, layout, ("embed", None))
    return jnp.einsum("bsd,dr->bsr", x, used, out_sharding=spec)


def _up(x: Array, kernel: Array, layout: Layout, first: str) -> Array:
    """`[batch, seq, first]` to `[batch, seq, heads, head_dim]`."""
    spec = out_sharding(layout.spec("batch", None, "heads", None))
    used = _used(kernel, x, layout, (first, "heads", None))
    return jnp.einsum("bsr,rhk->bshk", x, used, out_sharding=spec)


def _used(kernel: Array, x: Array, layout: Layout, names: tuple[str | None, ...]) -> Array:
    """A kernel in the dtype of `x`, gathered over the axes of the stream and of latent vectors."""
    whole = (None if name in ("embed", "latent") else name for name in names)
    return gather_weight(cast_at_use(kernel, x.dtype), layout.spec(*names), layout.spec(*whole))
