"""The routed mixture of experts of Mixtral (Jiang et al., 2024)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from nnx_pipeline.config._remat import Remat
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.ops._capacity import CapacityExperts
from nnx_pipeline.ops._experts import DenseExperts, ExpertBiases, ExpertKernels, Mix
from nnx_pipeline.ops._grouped.experts import GroupedExperts
from nnx_pipeline.ops._router import Routing, Usage, expert_usage, route
from nnx_pipeline.sharding.layout import Layout, gather_weight, out_sharding

# What an expert takes over what it gets when all get the same, where the config does not say it.
CAPACITY_FACTOR = 1.25
EXPERTS: dict[str, Callable[[ModelConfig], Mix]] = {
    "dense": lambda config: DenseExperts(config.expert_group, config.activation),
    "grouped": lambda config: GroupedExperts(config.expert_group, activation=config.activation),
    "capacity": lambda config: CapacityExperts(
        config.capacity_factor or CAPACITY_FACTOR, config.activation
    ),
}


class MoEKernels(NamedTuple):
    router: Float[Array, "embed experts"]
    experts: ExpertKernels
    bias: Float[Array, "experts"] | None = None
    logits_bias: Float[Array, "experts"] | None = None
    biases: ExpertBiases | None = None


def mix_of(config: ModelConfig) -> Mix:
    return EXPERTS[config.experts](config)


def routed_experts(
    x: Float[Array, "batch seq embed"],
    kernels: MoEKernels,
    real: Bool[Array, "batch seq"] | None = None,
    *,
    config: ModelConfig,
    layout: Layout,
    remat: Remat,
) -> tuple[Float[Array, "batch seq embed"], Usage]:
    """Sends each token through the experts that the router chooses, and reports their usage.

    `x` and the result are sharded by ("batch", None, None); the router works in the dtype of `x`.
    Padding, where `real` is False, takes no room of an expert and does not count.
    """
    routing, mix = Routing.of(config), mix_of(config)
    kernel = gather_weight(
        kernels.router.astype(x.dtype), layout.spec("embed", None), layout.spec(None, None)
    )
    spec = out_sharding(layout.spec("batch", None, None))
    logits = jnp.einsum("bsd,de->bse", x, kernel, out_sharding=spec)
    if kernels.logits_bias is not None:
        logits = logits + kernels.logits_bias.astype(x.dtype)
    if kernels.biases is not None:
        assert isinstance(mix, DenseExperts), "the config has checked it"
        mix = dataclasses.replace(mix, biases=kernels.biases)
    weights, chosen = route(logits, routing, kernels.bias)
    if real is not None and isinstance(mix, CapacityExperts):
        # Other experts compute padding too, as MaxText does: it takes nothing from other tokens.
        chosen = jnp.where(real[..., None], chosen, logits.shape[-1])
    mixed = mix(x, (weights, chosen), kernels.experts, layout=layout, remat=remat)
    usage = expert_usage(logits, chosen, mixed.dropped, score=routing.score, real=real)
    return mixed.output, usage
