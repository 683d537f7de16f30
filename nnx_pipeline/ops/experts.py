"""All experts on all tokens, one expert after the other."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.remat import HIDDEN, Remat, named
from nnx_pipeline.sharding import Layout, P, gather_weight, out_sharding, place


def dense_experts(
    x: Float[Array, "batch seq embed"],
    combine: Float[Array, "batch seq experts"],
    gate: Float[Array, "experts embed mlp"],
    up: Float[Array, "experts embed mlp"],
    down: Float[Array, "experts mlp embed"],
    *,
    layout: Layout,
    remat: Remat,
) -> Float[Array, "batch seq embed"]:
    """Σ_e (combine_e · silu(x · gate_e) · (x · up_e)) · down_e, summed in float32, cast to x.dtype.

    A scan over experts: one expert's weights are gathered and one expert's hidden units exist at a
    time, where one product over all of them holds `experts` times as much. A token's weight goes
    onto its hidden units, so that the backward pass has no use for the output of the down
    projection and does not compute it again.

    Each mesh coordinate along `expert` and `tensor` sums what it owns on two leading axes of its
    own (o, t below), so that one reduction follows the scan instead of one per expert.

    remat: what to keep of each expert for the backward pass; its hidden units have names.
    """
    owners, parts = layout.size("expert"), layout.size("mlp")
    beside = layout.spec("batch_beside_experts", None, None)
    x, combine = place(x, beside), place(combine, beside)
    partial = layout.spec("expert", "mlp", "batch_beside_experts", None, None)
    kernel = _Kernel(layout)

    def one_expert(total: Array, operands: tuple[Array, ...]) -> tuple[Array, None]:
        gate, up, down, weight = operands
        opened = jnp.einsum(
            "bsd,odtf->otbsf", x, kernel.gathered(gate, x.dtype), out_sharding=out_sharding(partial)
        )
        raised = jnp.einsum(
            "bsd,odtf->otbsf", x, kernel.gathered(up, x.dtype), out_sharding=out_sharding(partial)
        )
        opened, raised = map(named, (opened, raised), HIDDEN)
        hidden = jax.nn.silu(opened) * raised * weight[:, None, :, :, None]
        down = kernel.gathered(down, x.dtype)
        product = jnp.einsum("otbsf,odtf->otbsd", hidden, down, out_sharding=out_sharding(partial))
        return total + product.astype(jnp.float32), None

    operands = (
        kernel.split(gate, owners, parts),
        kernel.split(up, owners, parts),
        kernel.split(jnp.swapaxes(down, 1, 2), owners, parts),
        _split_weights(combine, owners, layout),
    )
    start = place(jnp.zeros((owners, parts, *x.shape), jnp.float32), partial)
    total, _ = jax.lax.scan(remat.checkpoint(one_expert), start, operands)
    return place(jnp.sum(total, axis=(0, 1)).astype(x.dtype), layout.spec("batch", None, None))


class _Kernel:
    """Layout of the kernels, `[experts, embed, mlp]`, with owners and tensor parts split off.

    The down projection is handled in this order too: with 2 repeats at `mixtral-small` on TPU v5p
    (libtpu 0.0.42.1) that holds 220 MB of temp instead of 262, as fewer copies turn it around.
    """

    def __init__(self, layout: Layout) -> None:
        self.stored = layout.spec("expert", "embed_of_expert", "mlp", None)
        self.used = layout.spec("expert", None, "mlp", None)

    def split(self, kernel: Array, owners: int, parts: int) -> Array:
        """[experts, embed, mlp] to [experts / owners, owners, embed, parts, mlp / parts]."""
        experts, embed, mlp = kernel.shape
        shape = (owners, experts // owners, embed, parts, mlp // parts)
        spec = P(self.stored[0], None, *self.stored[1:])
        return jnp.swapaxes(jax.lax.reshape(kernel, shape, out_sharding=out_sharding(spec)), 0, 1)

    def gathered(self, kernel: Array, dtype: jax.typing.DTypeLike) -> Array:
        return gather_weight(kernel.astype(dtype), self.stored, self.used)


def _split_weights(combine: Array, owners: int, layout: Layout) -> Array:
    """[batch, seq, experts] to [experts / owners, owners, batch, seq], each owner with its own."""
    batch, length, experts = combine.shape
    combine = jnp.moveaxis(
        combine.reshape(batch, length, owners, experts // owners), (2, 3), (1, 0)
    )
    return place(combine, layout.spec(None, "expert", "batch_beside_experts", None))
