"""The token embedding table."""

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config import ModelConfig
from nnx_pipeline.ops.embedding import ONE_HOT_LIMIT, embed_gather, embed_one_hot, one_hot_bytes
from nnx_pipeline.sharding import Layout, P, parameter


class Embed(nnx.Module):
    """Token ids `[..., seq]` to vectors `[..., seq, embed]` in the model's dtype, unscaled.

    `config.embedding` chooses how: `gather`, `one_hot`, or `auto`, which takes the one-hot product
    unless its one-hot array would be above 2 GB.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, layout: Layout = Layout()) -> None:
        self.method, self.layout = config.embedding, layout
        self.dtype = config.dtype
        self.embedding = parameter(
            rngs,
            nnx.initializers.normal(stddev=1.0),
            (config.vocab_size, config.embed_dim),
            config.param_dtype,
            ("vocab", "embed"),
            layout,
        )

    def uses_one_hot(self, num_tokens: int) -> bool:
        """Whether `num_tokens` ids (of all devices together) are looked up by a one-hot product."""
        if self.method != "auto":
            return self.method == "one_hot"
        size = one_hot_bytes(num_tokens, self.embedding.shape[0], self.dtype)
        return size <= ONE_HOT_LIMIT

    def __call__(self, tokens: Array, *, out: P | None = None) -> Array:
        """out: sharding of the result; the default leaves it whole on every device."""
        out = P(*[None] * (tokens.ndim + 1)) if out is None else out
        embed = embed_one_hot if self.uses_one_hot(tokens.size) else embed_gather
        return embed(self.embedding[...], tokens, dtype=self.dtype, out=out, layout=self.layout)
