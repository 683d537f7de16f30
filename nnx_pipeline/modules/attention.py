"""Grouped-query self-attention with rotary embeddings."""

import functools

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.modules._cache import KeyValueCache
from nnx_pipeline.modules.norm import RMSNorm
from nnx_pipeline.ops._attention import Options
from nnx_pipeline.ops._fast_attention.kernels import KERNELS, Kernel
from nnx_pipeline.ops._low_precision import product_of
from nnx_pipeline.ops._self_attention.grouped_query import (
    Biases,
    Projections,
    QueryKey,
    query_gain,
    query_initializer,
    self_attention,
)
from nnx_pipeline.ops._self_attention.rotary import rotary_of
from nnx_pipeline.sharding.layout import Layout, parameter


def kernel_of(
    config: ModelConfig,
    cache: KeyValueCache | None = None,
    positions: Array | None = None,
    sinks: Array | None = None,
) -> Kernel:
    """What computes the heads of a model from query, key and value; it uses the cache."""
    options = Options(
        scale=config.attention_scale,
        window=config.sliding_window,
        block=config.attention_block,
        soft_cap=config.attention_soft_cap,
        sinks=sinks,
    )
    kernel = functools.partial(KERNELS[config.attention], options=options)
    return kernel if cache is None else cache.through(kernel, positions, options)


class Attention(nnx.Module):
    """Self-attention from `[batch, seq, embed]` to the same, without biases by default.

    - `rngs`: its `params` stream gives the initial values.
    - `layout`: which mesh axes each logical axis is sharded over.

    The initial values of the query kernel are divided by sqrt(head_dim) · attention_scale, so that
    the scores of a new model have the same variance whatever `attention_scale` is. With
    `config.qk_norm` so is the scale of the query's norm. Biases start at 0.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, layout: Layout = Layout()) -> None:
        self.config, self.layout = config, layout
        embed, head_dim = config.embed_dim, config.head_dim
        heads, groups = config.num_heads, config.num_kv_heads
        into = nnx.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
        out_of = nnx.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
        kernel = functools.partial(parameter, rngs, layout, config.param_dtype)
        of_query, of_group = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.query = kernel(query_initializer(into, config), (embed, heads, head_dim), of_query)
        self.key = kernel(into, (embed, groups, head_dim), of_group)
        self.value = kernel(into, (embed, groups, head_dim), of_group)
        self.out = kernel(out_of, (heads, head_dim, embed), ("heads", "head_dim", "embed"))
        bias = functools.partial(kernel, nnx.initializers.zeros)
        inside, outside = config.attention_bias is not None, config.attention_bias == "all"
        self.query_bias = bias((heads, head_dim), of_query[1:]) if inside else None
        self.key_bias = bias((groups, head_dim), of_group[1:]) if inside else None
        self.value_bias = bias((groups, head_dim), of_group[1:]) if inside else None
        self.out_bias = bias((embed,), ("norm",)) if outside else None
        self.sinks = bias((heads,), ("heads",)) if config.attention_sinks else None
        self.query_norm = self._norm(heads, "heads", rngs, query_gain(config))
        self.key_norm = self._norm(groups, "kv_heads", rngs)
        self.cache: KeyValueCache | None = nnx.data(None)

    def _norm(self, heads: int, axis: str, rngs: nnx.Rngs, start: float = 1.0) -> RMSNorm | None:
        """The norm of each query or key, or of those of all heads together."""
        config, layout = self.config, self.layout
        if not config.qk_norm:
            return None
        norm = functools.partial(RMSNorm, config, rngs=rngs, start=start, layout=layout)
        if not config.qk_norm_over_heads:
            return norm(width=config.head_dim, axis="head_dim")
        return norm(width=(heads, config.head_dim), axis=(axis, "head_dim"))

    def new_cache(self, *, batch: int, slots: int) -> KeyValueCache:
        """An empty cache for this layer, which reads and writes it once it is its `cache`."""
        return KeyValueCache(self.config, batch=batch, slots=slots)

    def __call__(
        self, x: Array, *, positions: Array | None = None, segment_ids: Array | None = None
    ) -> Array:
        """`[batch, seq, embed]` to the same.

        - `positions`: `[batch, seq]` integers; None counts from 0.
        - `segment_ids`: `[batch, seq]` integers; None for one segment per row.

        A layer with a cache stores the keys and values of these tokens. Without positions they are
        the first ones of their sequences; else each sequence has one new token, which reads what is
        stored of the tokens before it, see `KeyValueCache`.
        """
        config = self.config
        sinks = None if self.sinks is None else self.sinks[...]
        kernels = (self.query[...], self.key[...], self.value[...], self.out[...])
        biases = (self.query_bias, self.key_bias, self.value_bias, self.out_bias)
        added = Biases(*(None if bias is None else bias[...] for bias in biases))
        return self_attention(
            x,
            Projections(*kernels, added, product_of(config)),
            positions=positions,
            segment_ids=segment_ids,
            kernel=kernel_of(config, self.cache, positions, sinks),
            query_key=QueryKey(rotary_of(config), self.query_norm, self.key_norm),
            layout=self.layout,
        )
