"""The routed mixture of experts of Mixtral (Jiang et al., 2024)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.ops.capacity.experts import CapacityExperts
from nnx_pipeline.ops.experts import DenseExperts, ExpertKernels, ExpertParts, Mix
from nnx_pipeline.ops.grouped.experts import GroupedExperts
from nnx_pipeline.ops.router import Routing, Usage, expert_usage, route
from nnx_pipeline.remat import Remat
from nnx_pipeline.sharding import Layout, gather_weight, out_sharding

# What an expert takes over what it gets when all get the same, where the config does not say it.
CAPACITY_FACTOR = 1.25
EXPERTS: dict[str, Callable[[ModelConfig], Mix]] = {
    "dense": lambda config: DenseExperts(config.expert_group),
    "grouped": lambda config: GroupedExperts(config.expert_group),
    "capacity": lambda config: CapacityExperts(config.capacity_factor or CAPACITY_FACTOR),
}


class MoEKernels(NamedTuple):
    """The kernels of router and experts, in the sharding and dtype in which they are stored."""

    router: Float[Array, "embed experts"]
    experts: ExpertKernels
    bias: Float[Array, "experts"] | None = None


def expert_parts(
    config: ModelConfig, remat: Remat, parts: ExpertParts = ExpertParts()
) -> ExpertParts:
    """The parts with `remat`, and with `mix` filled in unless they have one already.

    - `config`: says how experts are computed.
    - `remat`: what to keep of each expert for the backward pass.
    - `parts`: what an experiment replaces; it is not changed.
    """
    mix = parts.mix or EXPERTS[config.experts](config)
    return dataclasses.replace(parts, mix=mix, remat=remat)


def routed_experts(
    x: Float[Array, "batch seq embed"],
    kernels: MoEKernels,
    real: Bool[Array, "batch seq"] | None = None,
    *,
    routing: Routing,
    layout: Layout,
    parts: ExpertParts,
) -> tuple[Float[Array, "batch seq embed"], Usage]:
    """Sends each token through the experts that the router chooses, and reports their usage.

    - `x`: the tokens, sharded by ("batch", None, None), as the result is.
    - `kernels`: of the router and the experts, as they are stored.
    - `real`: False for padding, which takes no room of an expert and does not count in the usage;
      None if there is none.
    - `routing`: how the router chooses experts for each token.
    - `layout`: which mesh axes the logical axes of tokens and kernels are sharded over.
    - `parts`: how experts are computed, from `expert_parts`.

    Returns the weighted sum of the experts' outputs and the usage of each sequence. The router
    works in the dtype of `x`.
    """
    x = parts.enter(x)
    kernel = gather_weight(
        kernels.router.astype(x.dtype), layout.spec("embed", None), layout.spec(None, None)
    )
    spec = out_sharding(layout.spec("batch", None, None))
    logits = jnp.einsum("bsd,de->bse", x, kernel, out_sharding=spec)
    weights, chosen = route(logits, routing, kernels.bias)
    mix, remat, hidden = parts.mix or DenseExperts(), parts.remat, parts.hidden
    if real is not None and isinstance(mix, CapacityExperts):
        # Other experts compute padding too, as MaxText does: it takes nothing from other tokens.
        chosen = jnp.where(real[..., None], chosen, logits.shape[-1])
    choice = weights, chosen
    mixed = mix(x, choice, kernels.experts, layout=layout, remat=remat, hidden=hidden)
    usage = expert_usage(logits, chosen, mixed.dropped, score=routing.score, real=real)
    return parts.leave(mixed.output), usage
