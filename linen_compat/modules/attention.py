"""Grouped-query self-attention with rotary positions, as a Linen module."""

import functools

from flax import linen as nn
from jaxtyping import Array

from linen_compat.formats._names import check_names
from linen_compat.modules.norm import RMSNorm
from linen_compat.modules.parameters import Kernel, OfModel
from nnx_pipeline.modules.attention import kernel_of
from nnx_pipeline.ops._low_precision import product_of
from nnx_pipeline.ops._self_attention.grouped_query import (
    Projections,
    QueryKey,
    query_gain,
    query_initializer,
    self_attention,
)
from nnx_pipeline.ops._self_attention.rotary import rotary_of

# MaxText draws the kernels of attention from a normal distribution that is not truncated.
INTO_HEADS = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))
OUT_OF_HEADS = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=(0, 1), out_axis=2)


class Attention(OfModel):
    """Self-attention from `[batch, seq, embed]` to `[batch, seq, embed]`, without bias.

    - `layout`: the mesh axes over which each logical axis is sharded.

    A new query kernel is multiplied by `query_gain`, and with `config.qk_norm` so is the scale of
    the query's norm. With attention_scale 1.0 the kernel starts as in MaxText.
    """

    def setup(self) -> None:
        config = self.config
        check_names(config)
        embed, head_dim = config.embed_dim, config.head_dim
        kernel = functools.partial(Kernel, self.layout, config.param_dtype)
        heads, names = config.num_heads, ("embed", "kv_heads", "kv_head_dim")
        query, group = (embed, heads, head_dim), (embed, config.num_kv_heads, head_dim)
        initial = query_initializer(INTO_HEADS, config)
        self.query = kernel(initial, query, ("embed", "q_heads", "kv"))
        self.key = kernel(INTO_HEADS, group, names)
        self.value = kernel(INTO_HEADS, group, names)
        self.out = kernel(OUT_OF_HEADS, (heads, head_dim, embed), ("heads", "kv", "embed"))
        if config.qk_norm:
            self.query_norm = RMSNorm(config, self.layout, head_dim, query_gain(config))
            self.key_norm = RMSNorm(config, self.layout, head_dim)

    def __call__(
        self, x: Array, *, positions: Array | None = None, segment_ids: Array | None = None
    ) -> Array:
        """`[batch, seq, embed]` to the same.

        - `positions`: `[batch, seq]` integers; None counts from 0.
        - `segment_ids`: `[batch, seq]` integers; None for one segment per row.
        """
        config = self.config
        norms = (self.query_norm, self.key_norm) if config.qk_norm else (None, None)
        kernels = (self.query(), self.key(), self.value(), self.out())
        return self_attention(
            x,
            Projections(*kernels, product=product_of(config)),
            positions=positions,
            segment_ids=segment_ids,
            kernel=kernel_of(config),
            query_key=QueryKey(rotary_of(config), *norms),
            layout=self.layout,
        )
