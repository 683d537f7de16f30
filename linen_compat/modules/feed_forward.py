"""The part of a layer after attention: a dense MLP, or routed experts, with others or without."""

import functools

from flax import linen as nn
from jaxtyping import Array

from linen_compat.formats._names import check_names
from linen_compat.modules.parameters import Kernel, Names, OfModel, Weight, boxed_parameter
from nnx_pipeline.config._remat import KEEP_ALL, Remat
from nnx_pipeline.ops._experts import ExpertBiases, ExpertKernels
from nnx_pipeline.ops._low_precision import product_of
from nnx_pipeline.ops._mlp import GatedKernels, gated_mlp
from nnx_pipeline.ops._moe import MoEKernels, routed_experts
from nnx_pipeline.ops._router import Usage

FAN_IN = nn.initializers.lecun_normal()
# MaxText counts the experts as inputs and the rows of a kernel as outputs, so that the variance is
# 1 / (experts · columns).
OF_EXPERTS = nn.initializers.lecun_normal(in_axis=0, out_axis=1)


class MlpBlock(OfModel):
    """A gated MLP from `[batch, seq, embed]` to `[batch, seq, embed]`, without bias.

    - `layout`: the mesh axes over which each logical axis is sharded.
    - `width`: its number of hidden units; None for `config.mlp_dim`.
    """

    width: int | None = None

    def setup(self) -> None:
        config, width = self.config, self.width or self.config.mlp_dim
        into, out_of = (config.embed_dim, width), (width, config.embed_dim)
        kernel = functools.partial(Kernel, self.layout, config.param_dtype, FAN_IN)
        self.wi_0 = kernel(into, ("embed", "mlp"))
        self.wi_1 = kernel(into, ("embed", "mlp"))
        self.wo = kernel(out_of, ("mlp", "embed"))

    def __call__(self, x: Array) -> Array:
        kernels = GatedKernels(self.wi_0(), self.wi_1(), self.wo())
        product, activation = product_of(self.config), self.config.activation
        return gated_mlp(x, kernels, product=product, activation=activation, layout=self.layout)


class Gate(OfModel):
    """The kernel of a router, and its bias where it has one."""

    def setup(self) -> None:
        config, layout = self.config, self.layout
        # The kernels of DeepSeek's routers have another name of this axis.
        names: Names = ("embed_moe" if config.kv_lora_rank else "embed", None)
        shape = (config.embed_dim, config.num_experts)
        weight = Weight(FAN_IN, shape, config.param_dtype, names)
        self.kernel = boxed_parameter(self, "kernel", weight, layout)
        if config.router_bias or config.router_logits_bias:
            dtype = "float32" if config.router_bias else config.param_dtype
            zeros = Weight(nn.initializers.zeros, shape[1:], dtype, (None,))
            self.bias = boxed_parameter(self, "bias", zeros, layout)

    def __call__(self) -> tuple[Array, Array | None, Array | None]:
        """The kernel, `[embed, experts]`, and each bias, `[experts]`: of a choice, of logits."""
        config = self.config
        return (
            self.kernel,
            self.bias if config.router_bias else None,
            self.bias if config.router_logits_bias else None,
        )


class MoeBlock(OfModel):
    """Sends each token to its best experts, and reports how the experts were used.

    - `layout`: the mesh axes over which each logical axis is sharded.
    - `remat`: what to keep of each expert for the backward pass.

    The router works in the dtype of its input.
    """

    remat: Remat = KEEP_ALL

    def setup(self) -> None:
        config = self.config
        check_names(config)
        experts, embed, mlp = config.num_experts, config.embed_dim, config.mlp_dim
        dtype, layout = config.param_dtype, self.layout
        into: Names = ("exp", "embed_moe", "mlp_moe")
        out_of: Names = ("exp", "mlp_moe", "embed_moe")
        self.gate = Gate(config, layout)
        of_input = Weight(OF_EXPERTS, (experts, embed, mlp), dtype, into)
        of_output = Weight(OF_EXPERTS, (experts, mlp, embed), dtype, out_of)
        self.wi_0 = boxed_parameter(self, "wi_0", of_input, layout)
        self.wi_1 = boxed_parameter(self, "wi_1", of_input, layout)
        self.wo = boxed_parameter(self, "wo", of_output, layout)
        if config.expert_bias:
            zeros = nn.initializers.zeros
            wide = Weight(zeros, (experts, mlp), dtype, ("exp", "mlp_moe"))
            self.wi_0_bias = boxed_parameter(self, "wi_0_bias", wide, layout)
            self.wi_1_bias = boxed_parameter(self, "wi_1_bias", wide, layout)
            narrow = Weight(zeros, (experts, embed), dtype, ("exp", "norm"))
            self.wo_bias = boxed_parameter(self, "wo_bias", narrow, layout)

    def __call__(self, x: Array, real: Array | None = None) -> tuple[Array, Usage]:
        """`[batch, seq, embed]` to the same, and the usage of the experts by each sequence.

        - `real`: bool `[batch, seq]`, False for padding; None if there is none.
        """
        router, bias, of_logits = self.gate()
        biases = None
        if self.config.expert_bias:
            biases = ExpertBiases(self.wi_0_bias, self.wi_1_bias, self.wo_bias)
        experts = ExpertKernels(self.wi_0, self.wi_1, self.wo)
        kernels = MoEKernels(router, experts, bias, of_logits, biases)
        return routed_experts(
            x, kernels, real, config=self.config, layout=self.layout, remat=self.remat
        )


class DeepSeekMoeBlock(OfModel):
    """Routed experts, and beside them a dense MLP for the shared ones, whose results are added.

    - `layout`: the mesh axes over which each logical axis is sharded.
    - `remat`: what to keep of each expert for the backward pass.
    """

    remat: Remat = KEEP_ALL

    def setup(self) -> None:
        config, layout = self.config, self.layout
        self.MoeBlock_0 = MoeBlock(config, layout, self.remat)
        if config.num_shared_experts:
            width = config.num_shared_experts * config.mlp_dim
            self.shared_experts = MlpBlock(config, layout, width)

    def __call__(self, x: Array, real: Array | None = None) -> tuple[Array, Usage]:
        """As of `MoeBlock`: the sum of both results, and the usage of the routed experts."""
        mixed, usage = self.MoeBlock_0(x, real)
        return mixed + self.shared_experts(x) if self.config.num_shared_experts else mixed, usage
