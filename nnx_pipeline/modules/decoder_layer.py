"""One decoder layer of Mixtral, or of Llama when there is one expert."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config import ModelConfig
from nnx_pipeline.modules.attention import Attention
from nnx_pipeline.modules.mlp import MLP
from nnx_pipeline.modules.moe import RoutedMoE
from nnx_pipeline.modules.norm import RMSNorm
from nnx_pipeline.modules.parts import Parts
from nnx_pipeline.ops.dropout import dropout, fold_in
from nnx_pipeline.ops.router import Usage
from nnx_pipeline.remat import KEEP_ALL, Remat
from nnx_pipeline.sharding import Layout


class DecoderLayer(nnx.Module):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h)), with dropout on both summands."""

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
        self.attention = Attention(config, rngs=rngs, layout=layout, remat=remat)
        self.feed_forward_norm = RMSNorm(config, rngs=rngs, layout=layout, parts=parts)
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
        groups: int = 1,
    ) -> tuple[Array, Usage | None]:
        """x: [batch, seq, embed] to the same, and how the router used its experts, if there is one.

        keys: [batch, words] for dropout (`ops.dropout`), which is left out without them.
        groups: microbatches in this batch; see `ops.router.expert_usage`.
        """
        spec = self.layout.spec("batch", None, None)
        attended = self.attention(
            self.attention_norm(x), positions=positions, segment_ids=segment_ids
        )
        h = self.constrain(x + self._drop(attended, keys, place=0), spec)
        normed = self.feed_forward_norm(h)
        if isinstance(self.feed_forward, RoutedMoE):
            mixed, usage = self.feed_forward(normed, groups=groups)
        else:
            mixed, usage = self.feed_forward(normed), None
        return self.constrain(h + self._drop(mixed, keys, place=1), spec), usage

    def _drop(self, x: Array, keys: Array | None, *, place: int) -> Array:
        if keys is None or not self.dropout_rate:
            return x
        spec = self.layout.spec("batch", None, None)
        return dropout(x, fold_in(keys, jnp.int32(place)), rate=self.dropout_rate, spec=spec)
