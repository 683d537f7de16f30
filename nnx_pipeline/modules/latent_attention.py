"""Multi-head latent attention, as DeepSeek has it."""

import functools

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.modules._cache import KeyValueCache
from nnx_pipeline.modules.attention import kernel_of
from nnx_pipeline.modules.norm import RMSNorm
from nnx_pipeline.ops._self_attention.grouped_query import query_initializer
from nnx_pipeline.ops._self_attention.latent import Latent, LatentProjections, latent_attention
from nnx_pipeline.ops._self_attention.rotary import rotary_of
from nnx_pipeline.sharding.layout import Layout, parameter


class LatentAttention(nnx.Module):
    """Self-attention through latent vectors, from `[batch, seq, embed]` to the same, no biases.

    - `rngs`: its `params` stream gives the initial values.
    - `layout`: which mesh axes each logical axis is sharded over.

    The initial values of the query kernel are as in `Attention`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, layout: Layout = Layout()) -> None:
        assert config.kv_lora_rank is not None, "the config has checked it"
        assert config.value_head_dim is not None, "the config has checked it"
        self.config, self.layout = config, layout
        self.cache: KeyValueCache | None = nnx.data(None)
        embed, heads, head_dim = config.embed_dim, config.num_heads, config.head_dim
        rank, value_dim = config.kv_lora_rank, config.value_head_dim
        down = nnx.initializers.lecun_normal()
        up = nnx.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
        back = nnx.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
        kernel = functools.partial(parameter, rngs, layout, config.param_dtype)
        norm = functools.partial(RMSNorm, config.of_latent_norms, rngs=rngs, layout=layout)

        source, of_query = embed, ("embed", "heads", "head_dim")
        if config.q_lora_rank is not None:
            source, of_query = config.q_lora_rank, ("latent", "heads", "head_dim")
            self.query_down = kernel(down, (embed, source), ("embed", None))
            self.query_norm = norm(width=source)
        initial = query_initializer(up, config)
        self.query = kernel(initial, (source, heads, head_dim), of_query)
        self.kv_down = kernel(down, (embed, rank + config.rope_dim), ("embed", None))
        self.kv_norm = norm(width=rank)
        width = head_dim - config.rope_dim + value_dim
        self.kv_up = kernel(up, (rank, heads, width), ("latent", "heads", "head_dim"))
        self.out = kernel(back, (heads, value_dim, embed), ("heads", "head_dim", "embed"))

    def new_cache(self, *, batch: int, slots: int) -> KeyValueCache:
        """As of `Attention`: keys and values of all heads, not the latent vectors behind them."""
        return KeyValueCache(self.config, batch=batch, slots=slots)

    def __call__(
        self, x: Array, *, positions: Array | None = None, segment_ids: Array | None = None
    ) -> Array:
        """`[batch, seq, embed]` to the same; the arguments are as of `Attention`."""
        config = self.config
        is_latent = config.q_lora_rank is not None
        down = self.query_down[...] if is_latent else None
        query_norm = self.query_norm if is_latent else None
        return latent_attention(
            x,
            LatentProjections(
                down, self.query[...], self.kv_down[...], self.kv_up[...], self.out[...]
            ),
            places=(positions, segment_ids),
            kernel=kernel_of(config, self.cache, positions),
            latent=Latent(rotary_of(config), config.rope_dim, query_norm, self.kv_norm),
            layout=self.layout,
        )
