"""RMSNorm and its scale parameter."""

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.modules.parts import Parts
from nnx_pipeline.ops.norm import rms_norm
from nnx_pipeline.sharding import Layout, parameter


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation of the last axis, `[..., embed]` to `[..., embed]`.

    - `layout`: which mesh axes each logical axis is sharded over.
    - `parts`: functions that an experiment may replace.

    The scale starts at 1 - norm_scale_offset, so that a new layer multiplies by one.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        layout: Layout = Layout(),
        parts: Parts = Parts(),
    ) -> None:
        self.epsilon = config.norm_epsilon
        self.scale_offset = config.norm_scale_offset
        self.apply_scale = parts.apply_norm_scale
        start = nnx.initializers.constant(1.0 - self.scale_offset)
        self.scale = parameter(
            rngs, start, (config.embed_dim,), config.param_dtype, ("norm",), layout
        )

    def __call__(self, x: Array) -> Array:
        return rms_norm(
            x,
            self.scale[...],
            epsilon=self.epsilon,
            scale_offset=self.scale_offset,
            apply_scale=self.apply_scale,
        )
