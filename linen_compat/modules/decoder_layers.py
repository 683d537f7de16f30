"""One decoder layer of Mixtral, and one of Llama."""

from flax import linen as nn
from jaxtyping import Array

from linen_compat.modules.attention import Attention
from linen_compat.modules.feed_forward import MlpBlock, MoeBlock
from linen_compat.modules.norm import RMSNorm
from nnx_pipeline import InputError, Layout, ModelConfig
from nnx_pipeline.ops.residual import add_to_stream
from nnx_pipeline.ops.router import router_metrics
from nnx_pipeline.pipeline import MicrobatchMean
from nnx_pipeline.remat import KEEP_ALL, Remat


class _DecoderLayer(nn.Module):
    """A decoder layer: attention and a feed-forward part, each added to the residual stream.

    h = x + attention(norm(x)); y = h + feed_forward(norm(h)), with dropout on both summands.

    - `layout`: the mesh axes over which each logical axis is sharded.
    - `remat`: what the experts of Mixtral keep for the backward pass.
    """

    config: ModelConfig
    layout: Layout = Layout()
    remat: Remat = KEEP_ALL

    def setup(self) -> None:
        config, layout = self.config, self.layout
        self.pre_self_attention_layer_norm = RMSNorm(config, layout)
        self.self_attention = Attention(config, layout)
        self.post_self_attention_layer_norm = RMSNorm(config, layout)

    def __call__(
        self,
        x: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        keys: Array | None = None,
    ) -> tuple[Array, MicrobatchMean | None]:
        """The output of one layer, and what its router reports, see `router_metrics`.

        - `x`: `[batch, seq, embed]`; the result has the same shape.
        - `positions`, `segment_ids`: `[batch, seq]` integers, as of `Attention`.
        - `keys`: `[batch, words]` for dropout (`nnx_pipeline.ops.dropout`), which is left out
          without them.
        """
        attended = self.self_attention(
            self.pre_self_attention_layer_norm(x), positions=positions, segment_ids=segment_ids
        )
        h = self._add(x, attended, keys, place=0)
        mixed, metric = self.feed_forward(self.post_self_attention_layer_norm(h))
        return self._add(h, mixed, keys, place=1), metric

    def feed_forward(self, x: Array) -> tuple[Array, MicrobatchMean | None]:
        """What follows attention, and what its router reports, or None."""
        raise NotImplementedError

    def _add(self, stream: Array, update: Array, keys: Array | None, *, place: int) -> Array:
        rate = self.config.dropout_rate
        mask = None if keys is None else (keys, place)
        return add_to_stream(stream, update, mask=mask, rate=rate, layout=self.layout)


class MixtralDecoderLayer(_DecoderLayer):
    """A decoder layer with routed experts; it is called as `_DecoderLayer`."""

    def setup(self) -> None:
        if self.config.num_experts < 2:
            raise InputError(
                "MixtralDecoderLayer needs two experts or more, and the config has num_experts=1; "
                "use LlamaDecoderLayer, or set num_experts to 2 or more"
            )
        super().setup()
        self.MoeBlock_0 = MoeBlock(self.config, self.layout, self.remat)

    def feed_forward(self, x: Array) -> tuple[Array, MicrobatchMean]:
        mixed, usage = self.MoeBlock_0(x)
        return mixed, MicrobatchMean(usage.packed(), router_metrics)


class LlamaDecoderLayer(_DecoderLayer):
    """A decoder layer with a dense MLP; it is called as `_DecoderLayer`."""

    def setup(self) -> None:
        if self.config.num_experts > 1:
            raise InputError(
                "LlamaDecoderLayer needs num_experts=1, and the config has "
                f"num_experts={self.config.num_experts}; use MixtralDecoderLayer, or set it to 1"
            )
        super().setup()
        self.mlp = MlpBlock(self.config, self.layout)

    def feed_forward(self, x: Array) -> tuple[Array, None]:
        return self.mlp(x), None
