"""RMSNorm and its scale parameter."""

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.modules.parts import Parts
from nnx_pipeline.ops.norm import rms_norm
from nnx_pipeline.sharding import Layout, parameter


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation of the last axis, `[..., width]` to `[..., width]`.

    - `width`: size of that axis, and the name of its logical axis in a scale; None for the residual
      stream's.
    - `start`: by what a new layer multiplies.
    - `layout`: which mesh axes each logical axis is sharded over.
    - `parts`: functions that an experiment may replace.

    The scale starts at `start` - norm_scale_offset.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        width: tuple[int, str] | None = None,
        start: float = 1.0,
        layout: Layout = Layout(),
        parts: Parts = Parts(),
    ) -> None:
        self.epsilon = config.norm_epsilon
        self.scale_offset = config.norm_scale_offset
        self.apply_scale = parts.apply_norm_scale
        initial = nnx.initializers.constant(start - self.scale_offset)
        size, axis = width or (config.embed_dim, "norm")
        self.scale = parameter(rngs, initial, (size,), config.param_dtype, (axis,), layout)

    def __call__(self, x: Array) -> Array:
        return rms_norm(
            x,
            self.scale[...],
            epsilon=self.epsilon,
            scale_offset=self.scale_offset,
            apply_scale=self.apply_scale,
        )
