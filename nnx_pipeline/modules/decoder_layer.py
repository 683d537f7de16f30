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
from nnx_pipeline.ops._residual import add_to_stream, two_updates, update_of
from nnx_pipeline.ops._router import not_padding, router_metrics
from nnx_pipeline.pipeline.metrics import MicrobatchMean
from nnx_pipeline.sharding.layout import Layout


class DecoderLayer(nnx.Module):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h)), with dropout on both updates.

    `config.norm_placement` says where the norms are, and `config.residual_scale` multiplies both
    updates.

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
        self.residual_scale = config.residual_scale

        def norm(where: str) -> RMSNorm | None:
            there = config.norm_placement in (where, "both")
            return RMSNorm(config, rngs=rngs, layout=layout) if there else None

        self.attention_norm, self.attention_post_norm = norm("before"), norm("after")
        attention = Attention if config.kv_lora_rank is None else LatentAttention
        self.attention = attention(config, rngs=rngs, layout=layout)
        self.feed_forward_norm, self.feed_forward_post_norm = norm("before"), norm("after")
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
            call = functools.partial(self.attention, positions=positions, segment_ids=segment_ids)
            norms = self.attention_norm, self.attention_post_norm
            return update_of(x, call, norms, self.residual_scale)

        def feed_forward(x: Array) -> tuple[Array, MicrobatchMean | None]:
            reported: list[MicrobatchMean] = []

            def call(x: Array) -> Array:
                if not isinstance(self.feed_forward, RoutedMoE):
                    return self.feed_forward(x)
                mixed, usage = self.feed_forward(x, not_padding(segment_ids))
                reported.append(MicrobatchMean(usage, router_metrics))
                return mixed

            norms = self.feed_forward_norm, self.feed_forward_post_norm
            update = update_of(x, call, norms, self.residual_scale)
            return update, reported[0] if reported else None

        add = functools.partial(
            add_to_stream, keys=keys, rate=self.dropout_rate, layout=self.layout
        )
        return two_updates(x, attend, feed_forward, add)
