"""Grouped-query self-attention with rotary positions."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config import ModelConfig
from nnx_pipeline.ops.attention import dot_product_attention
from nnx_pipeline.ops.rotary import rotate
from nnx_pipeline.remat import KEEP_ALL, OUT, QUERY_KEY_VALUE, Remat, named
from nnx_pipeline.sharding import Layout, gather_weight, out_sharding, parameter

KERNELS = {"dot_product": dot_product_attention}


class Attention(nnx.Module):
    """Self-attention `[batch, seq, embed]` to `[batch, seq, embed]`, no bias.

    The query kernel starts smaller by sqrt(head_dim) · attention_scale, so that the scores of a new
    model have the same spread whatever `attention_scale` says.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        layout: Layout = Layout(),
        remat: Remat = KEEP_ALL,
    ) -> None:
        self.config, self.layout, self.remat = config, layout, remat
        embed, head_dim, heads, groups = (
            config.embed_dim,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
        )
        into = nnx.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
        out_of = nnx.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
        query_gain = head_dim**-0.5 / config.attention_scale

        def query_init(*args: object, **kwargs: object) -> Array:
            return into(*args, **kwargs) * query_gain  # type: ignore[arg-type]

        def kernel(
            init: nnx.initializers.Initializer, shape: tuple[int, ...], names: tuple[str, ...]
        ) -> nnx.Param:
            return parameter(rngs, init, shape, config.param_dtype, names, layout)

        of_query, of_group = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.query = kernel(query_init, (embed, heads, head_dim), of_query)
        self.key = kernel(into, (embed, groups, head_dim), of_group)
        self.value = kernel(into, (embed, groups, head_dim), of_group)
        self.out = kernel(out_of, (heads, head_dim, embed), ("heads", "head_dim", "embed"))

    def __call__(
        self, x: Array, *, positions: Array | None = None, segment_ids: Array | None = None
    ) -> Array:
        """positions, segment_ids: [batch, seq] integers; absent: counted from 0, one segment."""
        config, layout = self.config, self.layout
        if positions is None:
            positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        query = rotate(self._project(x, self.query, "heads"), positions, theta=config.rope_theta)
        key = rotate(self._project(x, self.key, "kv_heads"), positions, theta=config.rope_theta)
        value = self._project(x, self.value, "kv_heads")
        query, key, value = map(named, (query, key, value), QUERY_KEY_VALUE)

        def mix(query: Array, key: Array, value: Array, segment_ids: Array | None) -> Array:
            return KERNELS[config.attention](
                query,
                key,
                value,
                segment_ids,
                scale=config.attention_scale,
                grouped=layout.spec("batch", None, "kv_heads", None, None),
            )

        mixed = self.remat.checkpoint(mix)(query, key, value, segment_ids)
        kernel = gather_weight(
            self.out[...].astype(x.dtype),
            layout.spec("heads", None, "embed"),
            layout.spec("heads", None, None),
        )
        out = layout.spec("batch", None, None)
        result = jnp.einsum("bshk,hkd->bsd", mixed, kernel, out_sharding=out_sharding(out))
        return named(result, OUT)

    def _project(self, x: Array, kernel: nnx.Param, heads: str) -> Array:
        layout = self.layout
        gathered = gather_weight(
            kernel[...].astype(x.dtype),
            layout.spec("embed", heads, None),
            layout.spec(None, heads, None),
        )
        out = layout.spec("batch", None, heads, None)
        return jnp.einsum("bsd,dhk->bshk", x, gathered, out_sharding=out_sharding(out))
