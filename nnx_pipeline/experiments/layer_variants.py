"""Other ways to do the same, kept only as arms of experiments: nothing but the lab calls them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nnx_pipeline.ops.attention import allowed
from nnx_pipeline.ops.experts import Kernels, by_owner
from nnx_pipeline.pipeline.stages import ApplyStage, over_stages
from nnx_pipeline.remat import Remat
from nnx_pipeline.sharding import (
    Layout,
    P,
    constrain,
    gather_weight,
    mesh_sizes,
    out_sharding,
    place,
)


def einsum_scale(x: Array, scale: Array, offset: float) -> Array:
    """RMSNorm's scale by an einsum, after an addition of 0 too, as MaxText had it (seeds S2.5)."""
    return jnp.einsum("...k,k->...k", x, scale + offset)


def mask_array(length: int, segment_ids: Array | None) -> Array:
    """The mask of `allowed` as an array of numbers, s32[batch, seq, seq] (seeds S2.8).

    A kernel that takes a mask takes it as an array. The barrier stands for such a kernel: it keeps
    the compiler from putting the comparison into what reads it.
    """
    return jax.lax.optimization_barrier(allowed(length, segment_ids).astype(jnp.int32)) != 0


def over_stages_by_nnx_vmap(apply_stage: ApplyStage) -> Any:
    """The stage function under `nnx.vmap`: the layers' state goes in and comes out again.

    As in MaxText's pipeline of NNX modules the stacked layers are split into graph and state, each
    stage merges the two, runs, and splits its layers again. `loop_variants.carry_layers` is what
    hands the state on.
    """
    name = "stage" if mesh_sizes().get("stage", 1) > 1 else None

    def apply(params: Any, x: Any, side: Any) -> Any:
        layers, numbers = params
        graph, state = nnx.split(layers)

        def one_stage(state: Any, number: Array, x: Any, side: Any) -> Any:
            own = nnx.merge(graph, state)
            given = apply_stage((own, number), x, side)
            return given, nnx.split(own)[1]

        given, _ = nnx.vmap(one_stage, spmd_axis_name=name)(state, numbers, x, side)
        return given

    return apply


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


@dataclass(frozen=True)
class FlaxShardings(Layout):
    """A layout that is in Flax's own metadata of each parameter too (seeds S2.13a).

    always: Flax's flag `flax_always_shard_variable` while a parameter is made: Flax places it.
    """

    always: bool = True

    def variable(self, value: Array, logical_axes: tuple[str | None, ...]) -> nnx.Param:
        with nnx.use_eager_sharding(self.always):
            spec = self.spec(*logical_axes)
            return nnx.Param(value, logical_axes=logical_axes, out_sharding=spec)


# Tokens lie whole along `expert`, where a spread over it has something to move (seeds S2.11); the
# embedding's columns too, or each device would look up a part of a row.
WHOLE_OVER_EXPERTS = Layout(batch=("data", "fsdp"), embed=("fsdp",))


def tokens_in(x: Array) -> Array:
    """The batch spread over all its axes, named even where they have one device, as MaxText
    resharded the tokens before its experts (seeds S2.11)."""
    return place(x, P(("data", "fsdp", "expert", "context"), None, None))


def tokens_out(x: Array) -> Array:
    """The batch as `WHOLE_OVER_EXPERTS` has it, as they were resharded behind its experts."""
    return place(x, P(WHOLE_OVER_EXPERTS.batch, None, None))


def through_float32(x: Array) -> Array:
    """A cast to float32 and one back, which change no value (seeds S2.9b)."""
    return x.astype(jnp.float32).astype(x.dtype)


def leave_gradient(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """No cast, as MaxText leaves gradients alone where `grad_dtype` is float32 (seeds S2.13b)."""
    del dtype
    return x


def sum_chosen(
    x: Array,
    choice: tuple[Array, Array],
    gate: Array,
    up: Array,
    down: Array,
    *,
    layout: Layout,
    remat: Remat,
    hidden: Callable[[Array], Array],
    sum_dtype: str | None,
) -> Array:
    """`dense_experts` by way of one array with the outputs of each token's experts (seeds S2.1).

    That is [batch, seq, chosen, embed], in the dtype of x. Weighted by the router it is summed over
    the chosen experts in `sum_dtype`, None for that of x.
    """
    owners, shares = layout.size("expert"), layout.size("mlp")
    beside = layout.spec("batch_beside_experts", None, None)
    x, weights, chosen = (place(each, beside) for each in (x, *choice))
    kernels = Kernels(layout)

    def one_expert(found: Array, operands: tuple[Array, ...]) -> tuple[Array, None]:
        gate, up, down, here = operands
        product = kernels.project(hidden(kernels.open_up(x, gate, up)), down)
        return found + here[:, None, ..., None] * product[:, :, :, :, None], None

    takes = jax.nn.one_hot(chosen, gate.shape[0], dtype=x.dtype)
    operands = (*kernels.split(gate, up, down), by_owner(takes, owners, layout))
    batch, length, embed = x.shape
    zeros = jnp.zeros((owners, shares, batch, length, chosen.shape[-1], embed), x.dtype)
    start = constrain(zeros, P(*kernels.partial, None))
    found, _ = jax.lax.scan(remat.checkpoint(one_expert), start, operands)
    outputs, weights = (each.astype(sum_dtype or x.dtype) for each in (found.sum((0, 1)), weights))
    mixed = jnp.einsum("bske,bsk->bse", outputs, weights).astype(x.dtype)
    return place(mixed, layout.spec("batch", None, None))


def sum_chosen_in_float32(*args: Any, **options: Any) -> Array:
    """`sum_chosen` with the outputs of experts and their weights cast to float32."""
    return sum_chosen(*args, **options, sum_dtype="float32")


def sum_chosen_in_model_dtype(*args: Any, **options: Any) -> Array:
    """`sum_chosen` in the dtype of the model."""
    return sum_chosen(*args, **options, sum_dtype=None)


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
