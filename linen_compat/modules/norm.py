"""RMSNorm with its scale, as a Linen module."""

from flax import linen as nn
from jaxtyping import Array

from linen_compat.modules.parameters import Names, OfModel, Weight, boxed_parameter
from nnx_pipeline.ops._norm import rms_norm


class RMSNorm(OfModel):
    """Root-mean-square normalisation of the last axis, `[..., width]` to `[..., width]`.

    - `layout`: the mesh axes over which each logical axis is sharded.
    - `width`: size of that axis, or of several that are normalised together; None for the residual
      stream's.
    - `start`: by what a new layer multiplies; the scale starts at `start` - norm_scale_offset.
    - `names`: MaxText's names of the axes of the scale.
    """

    width: int | tuple[int, ...] | None = None
    start: float = 1.0
    names: Names = ("norm",)

    def setup(self) -> None:
        config = self.config
        initial = nn.initializers.constant(self.start - config.norm_scale_offset)
        size = self.width or config.embed_dim
        shape = (size,) if isinstance(size, int) else size
        weight = Weight(initial, shape, config.param_dtype, self.names)
        self.scale = boxed_parameter(self, "scale", weight, self.layout)

    def __call__(self, x: Array) -> Array:
        return self.scaled_by(self.scale, x)

    def scaled_by(self, scale: Array, x: Array) -> Array:
        """As `__call__`, with a scale `[width]` that is passed in, without the offset."""
        epsilon, offset = self.config.norm_epsilon, self.config.norm_scale_offset
        return rms_norm(x, scale, epsilon=epsilon, scale_offset=offset)
