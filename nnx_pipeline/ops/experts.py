"""All experts on all tokens, one expert after the other."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.remat import HIDDEN, Remat, named
from nnx_pipeline.sharding import Layout, P, gather_weight, mesh_sizes, out_sharding, place


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
    owners, parts = _size(layout, "expert"), _size(layout, "mlp")
    beside = layout.spec("batch_beside_experts", None, None)
    x, combine = place(x, beside), place(combine, beside)
    partial = layout.spec("expert", "mlp", "batch_beside_experts", None, None)
    into = _Kernel(layout, ("expert", "embed_of_expert", "mlp", None))
    out_of = _Kernel(layout, ("expert", "mlp", None, "embed_of_expert"))

    def one_expert(total: Array, operands: tuple[Array, ...]) -> tuple[Array, None]:
        gate, up, down, weight = operands
        opened = jnp.einsum(
            "bsd,odtf->otbsf", x, into.gathered(gate, x.dtype), out_sharding=out_sharding(partial)
        )
        raised = jnp.einsum(
            "bsd,odtf->otbsf", x, into.gathered(up, x.dtype), out_sharding=out_sharding(partial)
        )
        opened, raised = map(named, (opened, raised), HIDDEN)
        hidden = jax.nn.silu(opened) * raised * weight[:, None, :, :, None]
        down = out_of.gathered(down, x.dtype)
        product = jnp.einsum("otbsf,otfd->otbsd", hidden, down, out_sharding=out_sharding(partial))
        return total + product.astype(jnp.float32), None

    operands = (
        into.split(gate, owners, parts, axis=2),
        into.split(up, owners, parts, axis=2),
        out_of.split(down, owners, parts, axis=1),
        _split_weights(combine, owners, layout),
    )
    start = place(jnp.zeros((owners, parts, *x.shape), jnp.float32), partial)
    total, _ = jax.lax.scan(remat.checkpoint(one_expert), start, operands)
    return place(jnp.sum(total, axis=(0, 1)).astype(x.dtype), layout.spec("batch", None, None))


class _Kernel:
    """Layout of one kind of expert kernel after its owner and tensor axes have been split off."""

    def __init__(self, layout: Layout, names: tuple[str | None, ...]) -> None:
        self.stored = layout.spec(*names)
        self.used = layout.spec(*(None if name == "embed_of_expert" else name for name in names))

    def split(self, kernel: Array, owners: int, parts: int, axis: int) -> Array:
        """[experts, …, mlp, …] to [experts / owners, owners, …, parts, mlp / parts, …]."""
        shape = list(kernel.shape)
        shape[axis : axis + 1] = [parts, shape[axis] // parts]
        shape[0:1] = [owners, shape[0] // owners]
        entries = list(self.stored)
        spec = P(entries[0], None, *entries[1:])
        kernel = jax.lax.reshape(kernel, tuple(shape), out_sharding=out_sharding(spec))
        return jnp.swapaxes(kernel, 0, 1)

    def gathered(self, kernel: Array, dtype: jax.typing.DTypeLike) -> Array:
        return gather_weight(kernel.astype(dtype), self.stored, self.used)


def _split_weights(combine: Array, owners: int, layout: Layout) -> Array:
    """[batch, seq, experts] to [experts / owners, owners, batch, seq], each owner with its own."""
    batch, length, experts = combine.shape
    combine = jnp.moveaxis(
        combine.reshape(batch, length, owners, experts // owners), (2, 3), (1, 0)
    )
    return place(combine, layout.spec(None, "expert", "batch_beside_experts", None))


def _size(layout: Layout, name: str) -> int:
    sizes = mesh_sizes()
    return math.prod(sizes[axis] for axis in layout.axes(name))
