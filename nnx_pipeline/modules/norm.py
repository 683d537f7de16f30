"""RMSNorm and its scale parameter."""

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.ops._norm import rms_norm
from nnx_pipeline.sharding.layout import Layout, parameter


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation of the last axis, `[..., width]` to `[..., width]`.

    - `width`: size of that axis; None for the residual stream's.
    - `axis`: the logical axis of the scale.
    - `start`: by what a new layer multiplies; the scale starts at `start` - norm_scale_offset.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        width: int | None = None,
        axis: str = "norm",
        start: float = 1.0,
        layout: Layout = Layout(),
    ) -> None:
        self.epsilon = config.norm_epsilon
        self.scale_offset = config.norm_scale_offset
        initial = nnx.initializers.constant(start - self.scale_offset)
        size = config.embed_dim if width is None else width
        self.scale = parameter(rngs, layout, config.param_dtype, initial, (size,), (axis,))

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.scale[...], epsilon=self.epsilon, scale_offset=self.scale_offset)
