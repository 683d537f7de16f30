"""The routed mixture of experts of Mixtral (Jiang et al., 2024)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.ops.experts import ExpertParts, Mix, dense_experts
from nnx_pipeline.ops.router import Usage, expert_usage, route
from nnx_pipeline.remat import Remat
from nnx_pipeline.sharding import Layout, gather_weight, out_sharding

EXPERTS: dict[str, Mix] = {"dense": dense_experts}


def routed_experts(
    x: Float[Array, "batch seq embed"],
    router: Float[Array, "embed experts"],
    gate: Float[Array, "experts embed mlp"],
    up: Float[Array, "experts embed mlp"],
    down: Float[Array, "experts mlp embed"],
    *,
    num_experts_per_token: int,
    experts: str,
    layout: Layout,
    remat: Remat,
    parts: ExpertParts = ExpertParts(),
) -> tuple[Float[Array, "batch seq embed"], Usage]:
    """Each token through its best experts, weighted by the router, and how they were used.

    The router works in the dtype of x; no token is dropped. The weights come as they are stored.
    experts: key of `EXPERTS`.
    """
    x = parts.enter(x)
    kernel = gather_weight(
        router.astype(x.dtype), layout.spec("embed", None), layout.spec(None, None)
    )
    spec = out_sharding(layout.spec("batch", None, None))
    logits = jnp.einsum("bsd,de->bse", x, kernel, out_sharding=spec)
    choice = route(logits, num_experts_per_token)
    mix = parts.mix or EXPERTS[experts]
    mixed = mix(x, choice, gate, up, down, layout=layout, remat=remat, hidden=parts.hidden)
    return parts.leave(mixed), expert_usage(logits, choice[1])
