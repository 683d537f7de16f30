"""Grouped-query self-attention with rotary positions, as a Linen module."""

import functools

from flax import linen as nn
from jaxtyping import Array

from linen_compat.formats._names import check_names
from linen_compat.modules.norm import RMSNorm
from linen_compat.modules.parameters import Kernel, OfModel, Weight, boxed_parameter
from nnx_pipeline.modules.attention import kernel_of
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

# MaxText draws the kernels of attention from a normal distribution that is not truncated.
INTO_HEADS = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))
OUT_OF_HEADS = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=(0, 1), out_axis=2)


class Attention(OfModel):
    """Self-attention from `[batch, seq, embed]` to `[batch, seq, embed]`, by default without bias.

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
        inside, outside = 2 if config.attention_bias else 0, int(config.attention_bias == "all")
        self.query = kernel(initial, query, ("embed", "q_heads", "kv"), inside)
        self.key = kernel(INTO_HEADS, group, names, inside)
        self.value = kernel(INTO_HEADS, group, names, inside)
        back = (heads, head_dim, embed)
        self.out = kernel(OUT_OF_HEADS, back, ("heads", "kv", "embed"), outside)
        if config.attention_sinks:
            zeros = Weight(nn.initializers.zeros, (heads,), config.param_dtype, ("q_heads",))
            self.sinks = boxed_parameter(self, "sinks", zeros, self.layout)
        if config.qk_norm:
            norm = functools.partial(RMSNorm, config, self.layout)
            gain, groups = query_gain(config), config.num_kv_heads
            if config.qk_norm_over_heads:
                self.query_norm = norm((heads, head_dim), gain, ("q_heads", "kv"))
                self.key_norm = norm((groups, head_dim), names=("kv_heads", "kv_head_dim"))
            else:
                self.query_norm, self.key_norm = norm(head_dim, gain), norm(head_dim)

    def __call__(
        self, x: Array, *, positions: Array | None = None, segment_ids: Array | None = None
    ) -> Array:
        """`[batch, seq, embed]` to the same.

        - `positions`: `[batch, seq]` integers; None counts from 0.
        - `segment_ids`: `[batch, seq]` integers; None for one segment per row.
        """
        config = self.config
        norms = (self.query_norm, self.key_norm) if config.qk_norm else (None, None)
        projections = (self.query, self.key, self.value, self.out)
        query, key, value, out = (each() for each in projections)
        sinks = self.sinks if config.attention_sinks else None
        biases = Biases(*(each.added() for each in projections))
        return self_attention(
            x,
            Projections(query, key, value, out, biases, product_of(config)),
            positions=positions,
            segment_ids=segment_ids,
            kernel=kernel_of(config, sinks=sinks),
            query_key=QueryKey(rotary_of(config), *norms),
            layout=self.layout,
        )
