"""The dense gated MLP of Llama."""

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.ops._low_precision import product_of
from nnx_pipeline.ops._mlp import gated_mlp
from nnx_pipeline.sharding.layout import Layout, parameter

FAN_IN = nnx.initializers.lecun_normal()


class MLP(nnx.Module):
    """SwiGLU without biases, from `[batch, seq, embed]` to the same.

    - `rngs`: its `params` stream gives the initial values.
    - `layout`: which mesh axes each logical axis is sharded over.
    - `width`: its number of hidden units; None for `config.mlp_dim`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        layout: Layout = Layout(),
        width: int | None = None,
    ) -> None:
        self.config, self.layout = config, layout
        width = config.mlp_dim if width is None else width
        into, out_of = (config.embed_dim, width), (width, config.embed_dim)
        dtype = config.param_dtype
        self.gate = parameter(rngs, FAN_IN, into, dtype, ("embed", "mlp"), layout)
        self.up = parameter(rngs, FAN_IN, into, dtype, ("embed", "mlp"), layout)
        self.down = parameter(rngs, FAN_IN, out_of, dtype, ("mlp", "embed"), layout)

    def __call__(self, x: Array) -> Array:
        kernels = (self.gate[...], self.up[...], self.down[...])
        return gated_mlp(x, *kernels, product=product_of(self.config), layout=self.layout)
