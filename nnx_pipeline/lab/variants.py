"""Other ways to do the same, kept only as arms of experiments: nothing but the lab calls them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nnx_pipeline.pipeline.stages import ApplyStage, over_stages
from nnx_pipeline.sharding import Layout, P, gather_weight, mesh_sizes, out_sharding, place


def einsum_scale(x: Array, scale: Array) -> Array:
    """RMSNorm's scale by an einsum, as MaxText has it (seeds S2.5)."""
    return jnp.einsum("...k,k->...k", x, scale)


def over_stages_by_nnx_vmap(apply_stage: ApplyStage) -> Any:
    """The stage function under `nnx.vmap`, which splits and merges the module around each call."""
    name = "stage" if mesh_sizes().get("stage", 1) > 1 else None

    def apply(params: Any, x: Any, side: Any) -> Any:  # nnx.vmap refuses bound methods
        return apply_stage(params, x, side)

    return nnx.vmap(apply, spmd_axis_name=name)


def over_stages_stripped(apply_stage: ApplyStage) -> Any:
    """The stage function, given copies of its variables that do not name the stack's axes.

    What MaxText did at each call to weights under a vmap (`meta.remove_axis`, seeds S2.10d).
    """

    def strip(variable: Any) -> Any:
        if not isinstance(variable, nnx.Variable):
            return variable  # the numbers of the layers
        axes = variable.get_metadata("logical_axes")
        return nnx.Param(variable.get_value(), logical_axes=axes[2:])

    def apply(params: Any, x: Any, side: Any) -> Any:
        stripped = jax.tree.map(strip, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        return apply_stage(stripped, x, side)

    return over_stages(apply)


@dataclass(frozen=True)
class SizeOneAxes(Layout):
    """A layout whose specs name every mesh axis, those of one device too (seeds S2.4b)."""

    def axes(self, name: str) -> tuple[str, ...]:
        on_mesh = mesh_sizes()
        return tuple(axis for axis in getattr(self, name) if axis in on_mesh)


def recast(x: Array) -> Array:
    """A cast to the dtype that x has already (seeds S2.9b)."""
    return x.astype(x.dtype)


def cast_always(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """A cast also where x has that dtype already (seeds S2.13b)."""
    return x.astype(dtype)


def place_tokens(x: Array) -> Array:
    """A constraint that the batch is spread over all its axes, named even where they have one
    device, as MaxText resharded the tokens before and behind its experts (seeds S2.11)."""
    axes = tuple(axis for axis in ("data", "fsdp", "expert", "context") if axis in mesh_sizes())
    return place(x, P(axes, None, None)) if axes else x


def full_cross_entropy(
    hidden: Array,
    kernel: Array,
    targets: Array,
    weights: Array,
    *,
    batch_axes: tuple[str, ...],
    chunks: int,
    layout: Layout,
) -> Array:
    """`chunked_cross_entropy` in one piece: all logits as one array, differentiated by JAX."""
    del chunks
    kernel = gather_weight(
        kernel.astype(hidden.dtype),
        layout.spec("embed", "vocab"),
        layout.spec(None, "vocab_of_logits"),
    )
    spec = out_sharding(layout.spec(*batch_axes, None, "vocab_of_logits"))
    logits = jnp.einsum("...d,dv->...v", hidden, kernel, out_sharding=spec).astype(jnp.float32)
    shape = (*[1] * (logits.ndim - 1), logits.shape[-1])
    columns = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    label = jnp.sum(jnp.where(columns == targets[..., None], logits, 0.0), axis=-1)
    return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - label))
