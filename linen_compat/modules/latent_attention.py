"""Multi-head latent attention, as DeepSeek has it, as a Linen module."""

import functools

from flax import linen as nn
from jaxtyping import Array

from linen_compat.modules.attention import INTO_HEADS, OUT_OF_HEADS
from linen_compat.modules.norm import RMSNorm
from linen_compat.modules.parameters import Kernel, OfModel
from nnx_pipeline.modules.attention import kernel_of
from nnx_pipeline.ops._self_attention.grouped_query import query_initializer
from nnx_pipeline.ops._self_attention.latent import Latent, LatentProjections, latent_attention
from nnx_pipeline.ops._self_attention.rotary import rotary_of

_DOWN = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


class LatentAttention(OfModel):
    """Self-attention through latent vectors, from `[batch, seq, embed]` to the same, without bias.

    - `layout`: the mesh axes over which each logical axis is sharded.

    A new query kernel is multiplied by `query_gain`.
    """

    def setup(self) -> None:
        config = self.config
        embed, heads, head_dim = config.embed_dim, config.num_heads, config.head_dim
        rank, value_dim = config.kv_lora_rank, config.value_head_dim
        assert rank is not None, "the config has checked it"
        assert value_dim is not None, "the config has checked it"
        kernel = functools.partial(Kernel, self.layout, config.param_dtype)

        query_init = query_initializer(INTO_HEADS, config)
        if config.q_lora_rank is None:
            names = ("embed", "q_heads", "kv")
            self.query = kernel(query_init, (embed, heads, head_dim), names)
        else:
            source, names = config.q_lora_rank, ("q_lora", "q_heads", "kv")
            self.wq_a = kernel(_DOWN, (embed, source), ("embed", "q_lora_up_proj"))
            self.q_norm = RMSNorm(config.of_latent_norms, self.layout, source)
            self.wq_b = kernel(query_init, (source, heads, head_dim), names)
        down = (embed, rank + config.rope_dim)
        self.wkv_a = kernel(_DOWN, down, ("embed", "kv_lora_up_proj"))
        self.kv_norm = RMSNorm(config.of_latent_norms, self.layout, rank)
        up = (rank, heads, head_dim - config.rope_dim + value_dim)
        self.wkv_b = kernel(INTO_HEADS, up, ("kv_lora", "kv_heads", "kv_head_dim"))
        back = (heads, value_dim, embed)
        self.out = kernel(OUT_OF_HEADS, back, ("heads", "kv", "embed"))

    def __call__(
        self, x: Array, *, positions: Array | None = None, segment_ids: Array | None = None
    ) -> Array:
        """`[batch, seq, embed]` to the same; the arguments are as of `Attention`."""
        config = self.config
        query_down, query, query_norm = None, None, None
        if config.q_lora_rank is None:
            query = self.query()
        else:
            query_down, query, query_norm = self.wq_a(), self.wq_b(), self.q_norm
        return latent_attention(
            x,
            LatentProjections(query_down, query, self.wkv_a(), self.wkv_b(), self.out()),
            places=(positions, segment_ids),
            kernel=kernel_of(config),
            latent=Latent(rotary_of(config), config.rope_dim, query_norm, self.kv_norm),
            layout=self.layout,
        )
