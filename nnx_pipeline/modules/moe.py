"""The routed mixture of experts of Mixtral."""

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.modules.parts import Parts
from nnx_pipeline.ops.experts import ExpertKernels
from nnx_pipeline.ops.moe import MoEKernels, expert_parts, routed_experts
from nnx_pipeline.ops.router import Routing, Usage
from nnx_pipeline.remat import KEEP_ALL, Remat
from nnx_pipeline.sharding import Layout, parameter


class RoutedMoE(nnx.Module):
    """A mixture of experts in which a router chooses the experts of each token.

    - `rngs`: its `params` stream gives the initial values.
    - `layout`: which mesh axes each logical axis is sharded over.
    - `parts`: functions that an experiment may replace.
    - `remat`: what to keep of each expert for the backward pass.

    The router works in the dtype of its input.
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
        self.parts = expert_parts(config, parts.experts)
        experts, embed, mlp = config.num_experts, config.embed_dim, config.mlp_dim
        dtype = config.param_dtype
        # The axis of experts is not part of an expert's fan-in.
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
        """`[batch, seq, embed]` to the same, and the usage of the experts by each sequence."""
        experts = ExpertKernels(self.gate[...], self.up[...], self.down[...])
        return routed_experts(
            x,
            MoEKernels(self.router[...], experts),
            routing=Routing.of(self.config),
            layout=self.layout,
            remat=self.remat,
            parts=self.parts,
        )
