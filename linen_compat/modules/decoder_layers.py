"""One decoder layer: of Mixtral, of Llama."""

from flax import linen as nn
from jaxtyping import Array

from linen_compat.modules.attention import Attention
from linen_compat.modules.feed_forward import MlpBlock, MoeBlock
from linen_compat.modules.norm import RMSNorm
from nnx_pipeline import InputError, Layout, ModelConfig
from nnx_pipeline.ops.residual import add_to_stream
from nnx_pipeline.ops.router import load_balance_loss
from nnx_pipeline.pipeline import MicrobatchMean
from nnx_pipeline.remat import KEEP_ALL, Remat


class _DecoderLayer(nn.Module):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h)), with dropout on both summands."""

    config: ModelConfig
    layout: Layout = Layout()
    remat: Remat = KEEP_ALL

    def setup(self) -> None:
        config, layout = self.config, self.layout
        self.pre_self_attention_layer_norm = RMSNorm(config, layout)
        self.self_attention = Attention(config, layout, self.remat)
        self.post_self_attention_layer_norm = RMSNorm(config, layout)

    def __call__(
        self,
        x: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        keys: Array | None = None,
    ) -> tuple[Array, MicrobatchMean | None]:
        """x: [batch, seq, embed] to the same, and the router's load-balance loss, if there is one.

        keys: [batch, words] for dropout (`nnx_pipeline.ops.dropout`), which is left out without
        them.
        """
        attended = self.self_attention(
            self.pre_self_attention_layer_norm(x), positions=positions, segment_ids=segment_ids
        )
        h = self._add(x, attended, keys, place=0)
        mixed, metric = self.feed_forward(self.post_self_attention_layer_norm(h))
        return self._add(h, mixed, keys, place=1), metric

    def feed_forward(self, x: Array) -> tuple[Array, MicrobatchMean | None]:
        """What follows attention, and the load-balance loss of its router."""
        raise NotImplementedError

    def _add(self, stream: Array, update: Array, keys: Array | None, *, place: int) -> Array:
        rate = self.config.dropout_rate
        return add_to_stream(stream, update, keys=keys, place=place, rate=rate, layout=self.layout)


class MixtralDecoderLayer(_DecoderLayer):
    """A layer with routed experts; see `_DecoderLayer.__call__` for what it takes and gives."""

    def setup(self) -> None:
        if self.config.num_experts < 2:
            raise InputError(
                "MixtralDecoderLayer routes to experts and num_experts=1; "
                "use LlamaDecoderLayer or choose 2 or more"
            )
        super().setup()
        self.MoeBlock_0 = MoeBlock(self.config, self.layout, self.remat)

    def feed_forward(self, x: Array) -> tuple[Array, MicrobatchMean]:
        mixed, usage = self.MoeBlock_0(x)
        return mixed, MicrobatchMean(usage, load_balance_loss)


class LlamaDecoderLayer(_DecoderLayer):
    """A layer with a dense MLP; see `_DecoderLayer.__call__` for what it takes and gives."""

    def setup(self) -> None:
        if self.config.num_experts > 1:
            raise InputError(
                f"LlamaDecoderLayer has one MLP and num_experts={self.config.num_experts}; "
                "use MixtralDecoderLayer or set num_experts=1"
            )
        super().setup()
        self.mlp = MlpBlock(self.config, self.layout)

    def feed_forward(self, x: Array) -> tuple[Array, None]:
        return self.mlp(x), None
