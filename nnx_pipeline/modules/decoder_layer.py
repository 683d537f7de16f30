"""One decoder layer of Mixtral or DeepSeek, or of Llama when there is one expert."""

import functools

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config._remat import KEEP_ALL, Remat
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.modules.attention import Attention
from nnx_pipeline.modules.latent_attention import LatentAttention
from nnx_pipeline.modules.mlp import MLP
from nnx_pipeline.modules.moe import RoutedMoE
from nnx_pipeline.modules.norm import RMSNorm
from nnx_pipeline.ops._residual import add_to_stream, two_updates
from nnx_pipeline.ops._router import not_padding, router_metrics
from nnx_pipeline.pipeline.metrics import MicrobatchMean
from nnx_pipeline.sharding.layout import Layout


class DecoderLayer(nnx.Module):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h)), with dropout on both updates.

    - `rngs`: its `params` stream gives the initial values.
    - `layout`: which mesh axes each logical axis is sharded over.
    - `remat`: what the experts keep for the backward pass.

    The feed-forward block is a `RoutedMoE`, or an `MLP` if there is one expert.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        layout: Layout = Layout(),
        remat: Remat = KEEP_ALL,
    ) -> None:
        self.layout, self.dropout_rate = layout, config.dropout_rate
        self.attention_norm = RMSNorm(config, rngs=rngs, layout=layout)
        attention = Attention if config.kv_lora_rank is None else LatentAttention
        self.attention = attention(config, rngs=rngs, layout=layout)
        self.feed_forward_norm = RMSNorm(config, rngs=rngs, layout=layout)
        self.feed_forward: MLP | RoutedMoE
        if config.num_experts > 1:
            self.feed_forward = RoutedMoE(config, rngs=rngs, layout=layout, remat=remat)
        else:
            self.feed_forward = MLP(config, rngs=rngs, layout=layout)

    def __call__(
        self,
        x: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        keys: Array | None = None,
    ) -> tuple[Array, MicrobatchMean | None]:
        """The output of the layer, and what its router reports (`router_metrics`), or None.

        - `x`: `[batch, seq, embed]`; the output has the same shape.
        - `positions`, `segment_ids`: as in `Attention`.
        - `keys`: `[batch, words]`, see `sharding.dropout`; None for no dropout.
        """

        def attend(x: Array) -> Array:
            x = self.attention_norm(x)
            return self.attention(x, positions=positions, segment_ids=segment_ids)

        def feed_forward(x: Array) -> tuple[Array, MicrobatchMean | None]:
            x = self.feed_forward_norm(x)
            if not isinstance(self.feed_forward, RoutedMoE):
                return self.feed_forward(x), None
            mixed, usage = self.feed_forward(x, not_padding(segment_ids))
            return mixed, MicrobatchMean(usage, router_metrics)

        add = functools.partial(
            add_to_stream, keys=keys, rate=self.dropout_rate, layout=self.layout
        )
        return two_updates(x, attend, feed_forward, add)
