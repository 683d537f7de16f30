"""The token embedding table."""

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.ops._embedding import embed
from nnx_pipeline.sharding.layout import Layout, P, parameter


class Embed(nnx.Module):
    """Token ids `[..., seq]` to vectors `[..., seq, embed]` in the model's dtype, unscaled.

    - `config`: its `embedding` chooses the method.
    - `rngs`: its `params` stream gives the initial values.
    - `layout`: which mesh axes each logical axis is sharded over.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, layout: Layout = Layout()) -> None:
        self.method, self.layout = config.embedding, layout
        self.dtype = config.dtype
        initial = nnx.initializers.normal(stddev=config.embedding_deviation)
        shape, axes = (config.vocab_size, config.embed_dim), ("vocab", "embed_of_vocab")
        self.embedding = parameter(rngs, layout, config.param_dtype, initial, shape, axes)

    def __call__(self, tokens: Array, *, out: P | None = None) -> Array:
        """The vectors of the tokens, sharded by `out`; None leaves them whole on every device."""
        table, layout = self.embedding[...], self.layout
        return embed(table, tokens, method=self.method, dtype=self.dtype, out=out, layout=layout)
