"""The routed mixture of experts of Mixtral (Jiang et al., 2024)."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.ops.experts import DenseExperts, ExpertKernels, ExpertParts, Mix
from nnx_pipeline.ops.grouped.experts import GroupedExperts
from nnx_pipeline.ops.router import Usage, expert_usage, route
from nnx_pipeline.remat import Remat
from nnx_pipeline.sharding import Layout, gather_weight, out_sharding

# From how many experts are computed together, None for the function's own choice.
EXPERTS: dict[str, Callable[[int | None], Mix]] = {
    "dense": DenseExperts,
    "grouped": GroupedExperts,
}


class MoEKernels(NamedTuple):
    """The kernels of router and experts, in the sharding and dtype in which they are stored."""

    router: Float[Array, "embed experts"]
    experts: ExpertKernels


def expert_parts(
    experts: str, group: int | None, parts: ExpertParts = ExpertParts()
) -> ExpertParts:
    """The parts with `mix` filled in, unless they have one already.

    - `experts`: the key in `EXPERTS` of the function to fill in.
    - `group`: how many experts are computed together, None for the function's own choice.
    - `parts`: what an experiment replaces; it is not changed.
    """
    return dataclasses.replace(parts, mix=parts.mix or EXPERTS[experts](group))


def routed_experts(
    x: Float[Array, "batch seq embed"],
    kernels: MoEKernels,
    *,
    num_experts_per_token: int,
    layout: Layout,
    remat: Remat,
    parts: ExpertParts,
) -> tuple[Float[Array, "batch seq embed"], Usage]:
    """Sends each token through the experts that the router chooses, and reports their usage.

    - `x`: the tokens, sharded by ("batch", None, None), as the result is.
    - `kernels`: of the router and the experts, as they are stored.
    - `num_experts_per_token`: how many experts the router chooses for each token.
    - `layout`: which mesh axes the logical axes of tokens and kernels are sharded over.
    - `remat`: what to keep of each expert for the backward pass.
    - `parts`: functions that an experiment may replace, from `expert_parts`.

    Returns the weighted sum of the experts' outputs and the usage of each sequence. The router
    works in the dtype of `x`; no token is dropped.
    """
    x = parts.enter(x)
    kernel = gather_weight(
        kernels.router.astype(x.dtype), layout.spec("embed", None), layout.spec(None, None)
    )
    spec = out_sharding(layout.spec("batch", None, None))
    logits = jnp.einsum("bsd,de->bse", x, kernel, out_sharding=spec)
    choice = route(logits, num_experts_per_token)
    mix = parts.mix or DenseExperts()
    mixed = mix(x, choice, kernels.experts, layout=layout, remat=remat, hidden=parts.hidden)
    return parts.leave(mixed), expert_usage(logits, choice[1])
