"""RMSNorm with its scale."""

from flax import linen as nn
from jaxtyping import Array

from linen_compat.modules.parameters import parameter
from nnx_pipeline import Layout, ModelConfig
from nnx_pipeline.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last axis, `[..., embed]` to `[..., embed]`.

    The scale starts at 1 - norm_scale_offset, so that a new layer scales by one.
    """

    config: ModelConfig
    layout: Layout = Layout()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        config = self.config
        start = nn.initializers.constant(1.0 - config.norm_scale_offset)
        scale = parameter(
            self, "scale", start, (config.embed_dim,), config.param_dtype, ("norm",), self.layout
        )
        return rms_norm(
            x, scale, epsilon=config.norm_epsilon, scale_offset=config.norm_scale_offset
        )
