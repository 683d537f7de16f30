"""The routed mixture of experts of Mixtral."""

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config import ModelConfig
from nnx_pipeline.modules.parts import Parts
from nnx_pipeline.ops.moe import routed_experts
from nnx_pipeline.ops.router import Usage
from nnx_pipeline.remat import KEEP_ALL, Remat
from nnx_pipeline.sharding import Layout, parameter


class RoutedMoE(nnx.Module):
    """Each token to its best experts, `[batch, seq, embed]` to the same, and how they were used.

    The router works in the dtype of its input; no token is dropped.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        layout: Layout = Layout(),
        parts: Parts = Parts(),
        remat: Remat = KEEP_ALL,
    ) -> None:
        self.config, self.layout, self.remat = config, layout, remat
        self.parts = parts.experts
        experts, embed, mlp = config.num_experts, config.embed_dim, config.mlp_dim
        dtype = config.param_dtype
        fan_in = nnx.initializers.lecun_normal(batch_axis=0)
        into = ("expert", "embed_of_expert", "mlp")
        self.router = parameter(
            rngs, nnx.initializers.lecun_normal(), (embed, experts), dtype, ("embed", None), layout
        )
        self.gate = parameter(rngs, fan_in, (experts, embed, mlp), dtype, into, layout)
        self.up = parameter(rngs, fan_in, (experts, embed, mlp), dtype, into, layout)
        self.down = parameter(
            rngs,
            fan_in,
            (experts, mlp, embed),
            dtype,
            ("expert", "mlp", "embed_of_expert"),
            layout,
        )

    def __call__(self, x: Array) -> tuple[Array, Usage]:
        """x: `[batch, seq, embed]` to the same, and the usage of each sequence."""
        return routed_experts(
            x,
            self.router[...],
            self.gate[...],
            self.up[...],
            self.down[...],
            num_experts_per_token=self.config.num_experts_per_token,
            experts=self.config.experts,
            layout=self.layout,
            remat=self.remat,
            parts=self.parts,
        )
