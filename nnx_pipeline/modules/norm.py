"""RMSNorm and its scale parameter."""

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.ops._norm import rms_norm
from nnx_pipeline.sharding.layout import Layout, parameter


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation of the last axis, `[..., width]` to `[..., width]`.

    - `width`: size of that axis, or of several that are normalised together; None for the residual
      stream's.
    - `axis`: the logical axis of the scale, or of each of its axes.
    - `start`: by what a new layer multiplies; the scale starts at `start` - norm_scale_offset.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        width: int | tuple[int, ...] | None = None,
        axis: str | tuple[str, ...] = "norm",
        start: float = 1.0,
        layout: Layout = Layout(),
    ) -> None:
        self.epsilon = config.norm_epsilon
        self.scale_offset = config.norm_scale_offset
        initial = nnx.initializers.constant(start - self.scale_offset)
        size = config.embed_dim if width is None else width
        shape = (size,) if isinstance(size, int) else size
        axes = (axis,) if isinstance(axis, str) else axis
        self.scale = parameter(rngs, layout, config.param_dtype, initial, shape, axes)

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.scale[...], epsilon=self.epsilon, scale_offset=self.scale_offset)
