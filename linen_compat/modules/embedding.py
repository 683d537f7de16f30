"""The token embedding table."""

from flax import linen as nn
from jaxtyping import Array

from linen_compat.modules.parameters import parameter
from nnx_pipeline import Layout, ModelConfig
from nnx_pipeline.ops.embedding import embed
from nnx_pipeline.sharding import P


class Embed(nn.Module):
    """Token ids `[..., seq]` to vectors `[..., seq, embed]` in the model's dtype, unscaled."""

    config: ModelConfig
    layout: Layout = Layout()

    def setup(self) -> None:
        config = self.config
        self.embedding = parameter(
            self,
            "embedding",
            nn.initializers.normal(stddev=1.0),
            (config.vocab_size, config.embed_dim),
            config.param_dtype,
            ("vocab", "embed_vocab"),
            self.layout,
        )

    def __call__(self, tokens: Array, *, out: P | None = None) -> Array:
        """out: sharding of the result; the default leaves it whole on every device."""
        return self.look_up(self.embedding, tokens, out=out)

    def look_up(self, table: Array, tokens: Array, *, out: P | None = None) -> Array:
        """As `__call__`, from a table that is handed in."""
        return embed(
            table,
            tokens,
            method=self.config.embedding,
            dtype=self.config.dtype,
            out=out,
            layout=self.layout,
        )
