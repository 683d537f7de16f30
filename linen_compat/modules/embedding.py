"""The token embedding table, as a Linen module."""

from flax import linen as nn
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from linen_compat.modules.parameters import OfModel, Weight, boxed_parameter
from nnx_pipeline.ops._embedding import embed


class Embed(OfModel):
    """Token ids `[..., seq]` to vectors `[..., seq, embed]` in the model's dtype, unscaled.

    - `config`: its `embedding` chooses the method.
    - `layout`: the mesh axes over which each logical axis is sharded.
    """

    def setup(self) -> None:
        config = self.config
        initial = nn.initializers.normal(stddev=config.embedding_deviation)
        shape, names = (config.vocab_size, config.embed_dim), ("vocab", "embed_vocab")
        weight = Weight(initial, shape, config.param_dtype, names)
        self.embedding = boxed_parameter(self, "embedding", weight, self.layout)

    def __call__(self, tokens: Array, *, out: P | None = None) -> Array:
        """The vectors of the tokens, sharded by `out`; None leaves them whole on every device."""
        return self.look_up(self.embedding, tokens, out=out)

    def look_up(self, table: Array, tokens: Array, *, out: P | None = None) -> Array:
        """As `__call__`, with a table `[vocab, embed]` that is passed in."""
        method, dtype = self.config.embedding, self.config.dtype
        return embed(table, tokens, method=method, dtype=dtype, out=out, layout=self.layout)
