"""One decoder layer of Mixtral or DeepSeek, or of Llama when there is one expert."""

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.modules.attention import Attention
from nnx_pipeline.modules.latent_attention import LatentAttention
from nnx_pipeline.modules.mlp import MLP
from nnx_pipeline.modules.moe import RoutedMoE
from nnx_pipeline.modules.norm import RMSNorm
from nnx_pipeline.modules.parts import Parts
from nnx_pipeline.ops.residual import add_to_stream
from nnx_pipeline.ops.router import not_padding, router_metrics
from nnx_pipeline.pipeline.metrics import MicrobatchMean
from nnx_pipeline.remat import KEEP_ALL, Remat
from nnx_pipeline.sharding import Layout


class DecoderLayer(nnx.Module):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h)), with dropout on both updates.

    - `rngs`: its `params` stream gives the initial values.
    - `layout`: which mesh axes each logical axis is sharded over.
    - `parts`: functions that an experiment may replace.
    - `remat`: what the experts keep for the backward pass.

    The feed-forward block is a routed mixture of experts, or a dense MLP if there is one expert.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        layout: Layout = Layout(),
        parts: Parts = Parts(),
        remat: Remat = KEEP_ALL,
    ) -> None:
        self.layout, self.dropout_rate = layout, config.dropout_rate
        self.constrain = parts.constrain
        self.attention_norm = RMSNorm(config, rngs=rngs, layout=layout, parts=parts)
        attention = Attention if config.kv_lora_rank is None else LatentAttention
        self.attention = attention(config, rngs=rngs, layout=layout, parts=parts)
        self.feed_forward_norm = RMSNorm(config, rngs=rngs, layout=layout, parts=parts)
        self.feed_forward: MLP | RoutedMoE
        if config.num_experts > 1:
            self.feed_forward = RoutedMoE(
                config, rngs=rngs, layout=layout, parts=parts, remat=remat
            )
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
        """The output of the layer, and what its router reports, see `router_metrics`.

        - `x`: `[batch, seq, embed]`; the output has the same shape.
        - `positions`, `segment_ids`: as in `Attention`.
        - `keys`: `[batch, words]`, a dropout key per sequence (`ops.dropout`); None for no dropout.

        The metric is None in a layer without a router.
        """
        attended = self.attention(
            self.attention_norm(x), positions=positions, segment_ids=segment_ids
        )
        h = self._add(x, attended, keys, place=0)
        normed = self.feed_forward_norm(h)
        if isinstance(self.feed_forward, RoutedMoE):
            mixed, usage = self.feed_forward(normed, not_padding(segment_ids))
            metric = MicrobatchMean(usage, router_metrics)
        else:
            mixed, metric = self.feed_forward(normed), None
        return self._add(h, mixed, keys, place=1), metric

    def _add(self, stream: Array, update: Array, keys: Array | None, *, place: int) -> Array:
        """stream + dropout(update); `place` gives each of the two updates its own dropout mask."""
        return add_to_stream(
            stream,
            update,
            mask=None if keys is None else (keys, place),
            rate=self.dropout_rate,
            layout=self.layout,
            constrain=self.constrain,
        )
