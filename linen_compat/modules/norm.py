"""RMSNorm with its scale, as a Linen module."""

from flax import linen as nn
from jaxtyping import Array

from linen_compat.modules.parameters import Weight, parameter
from nnx_pipeline import Layout, ModelConfig
from nnx_pipeline.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last axis, `[..., embed]` to `[..., embed]`.

    - `config`: sizes, dtypes, `norm_epsilon` and `norm_scale_offset`.
    - `layout`: the mesh axes over which each logical axis is sharded.

    The scale starts at 1 - norm_scale_offset, so that a new layer scales by one.
    """

    config: ModelConfig
    layout: Layout = Layout()

    def setup(self) -> None:
        config = self.config
        start = nn.initializers.constant(1.0 - config.norm_scale_offset)
        weight = Weight(start, (config.embed_dim,), config.param_dtype, ("norm",))
        self.scale = parameter(self, "scale", weight, self.layout)

    def __call__(self, x: Array) -> Array:
        return self.scaled_by(self.scale, x)

    def scaled_by(self, scale: Array, x: Array) -> Array:
        """As `__call__`, with a scale that is passed in.

        - `scale`: `[embed]`, without the offset.
        - `x`: `[…, embed]`; the result has the same shape, dtype and sharding.
        """
        epsilon, offset = self.config.norm_epsilon, self.config.norm_scale_offset
        return rms_norm(x, scale, epsilon=epsilon, scale_offset=offset)
