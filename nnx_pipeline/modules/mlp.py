"""The dense gated MLP of Llama."""

import functools

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.ops._low_precision import product_of
from nnx_pipeline.ops._mlp import GatedKernels, gated_mlp
from nnx_pipeline.sharding.layout import Layout, parameter


class MLP(nnx.Module):
    """A gated MLP without biases, from `[batch, seq, embed]` to the same.

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
        kernel = functools.partial(parameter, rngs, layout, config.param_dtype)
        initial = nnx.initializers.lecun_normal()
        self.gate = kernel(initial, into, ("embed", "mlp"))
        self.up = kernel(initial, into, ("embed", "mlp"))
        self.down = kernel(initial, out_of, ("mlp", "embed"))

    def __call__(self, x: Array) -> Array:
        kernels = GatedKernels(self.gate[...], self.up[...], self.down[...])
        product, activation = product_of(self.config), self.config.activation
        return gated_mlp(x, kernels, product=product, activation=activation, layout=self.layout)
