"""The routed mixture of experts of Mixtral."""

import functools

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config._remat import KEEP_ALL, Remat
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.modules.mlp import MLP
from nnx_pipeline.ops._experts import ExpertBiases, ExpertKernels
from nnx_pipeline.ops._moe import MoEKernels, routed_experts
from nnx_pipeline.ops._router import Usage
from nnx_pipeline.sharding.layout import Layout, parameter


class SelectionBias(nnx.Param[Array]):
    """A bias for choosing experts alone: it has no gradient, and training leaves it."""


class RoutedMoE(nnx.Module):
    """A mixture of experts in which a router chooses the experts of each token.

    - `rngs`: its `params` stream gives the initial values.
    - `layout`: which mesh axes each logical axis is sharded over.
    - `remat`: what to keep of each expert for the backward pass.

    The router works in the dtype of its input.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        layout: Layout = Layout(),
        remat: Remat = KEEP_ALL,
    ) -> None:
        self.config, self.layout, self.remat = config, layout, remat
        experts, embed, mlp = config.num_experts, config.embed_dim, config.mlp_dim
        kernel = functools.partial(parameter, rngs, layout, config.param_dtype)
        # The axis of experts is not part of an expert's fan-in.
        fan_in = nnx.initializers.lecun_normal(batch_axis=0)
        into = ("expert", "embed_of_expert", "mlp")
        out_of = ("expert", "mlp", "embed_of_expert")
        self.router = kernel(nnx.initializers.lecun_normal(), (embed, experts), ("embed", None))
        self.gate = kernel(fan_in, (experts, embed, mlp), into)
        self.up = kernel(fan_in, (experts, embed, mlp), into)
        self.down = kernel(fan_in, (experts, mlp, embed), out_of)
        if config.router_bias:
            zeros = nnx.initializers.zeros
            made = parameter(rngs, layout, "float32", zeros, (experts,), (None,))
            kind = nnx.Param if config.router_bias_in_weights else SelectionBias
            self.router_bias = kind(made.get_value(), logical_axes=(None,))
        bias = functools.partial(kernel, nnx.initializers.zeros)
        of_experts, wide = config.expert_bias, ("expert", "mlp")
        self.router_logits_bias = bias((experts,), (None,)) if config.router_logits_bias else None
        self.gate_bias = bias((experts, mlp), wide) if of_experts else None
        self.up_bias = bias((experts, mlp), wide) if of_experts else None
        self.down_bias = bias((experts, embed), ("expert", "norm")) if of_experts else None
        if config.num_shared_experts:
            width = config.num_shared_experts * mlp
            self.shared = MLP(config, rngs=rngs, layout=layout, width=width)

    def __call__(self, x: Array, real: Array | None = None) -> tuple[Array, Usage]:
        """`[batch, seq, embed]` to the same, and the usage of the experts by each sequence.

        - `real`: bool `[batch, seq]`, False for padding; None if there is none.
        """
        experts = ExpertKernels(self.gate[...], self.up[...], self.down[...])
        bias = self.router_bias[...] if self.config.router_bias else None
        logits_bias = None if self.router_logits_bias is None else self.router_logits_bias[...]
        parts = (self.gate_bias, self.up_bias, self.down_bias)
        found = [each[...] for each in parts if each is not None]
        biases = ExpertBiases(*found) if found else None
        kernels = MoEKernels(self.router[...], experts, bias, logits_bias, biases)
        mixed, usage = routed_experts(
            x, kernels, real, config=self.config, layout=self.layout, remat=self.remat
        )
        return mixed + self.shared(x) if self.config.num_shared_experts else mixed, usage
