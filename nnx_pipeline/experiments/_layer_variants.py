"""Alternative code for layers and loss, kept only as arms of experiments.

Nothing but the lab calls it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.config._remat import Remat
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.experiments._replaced import Replaced
from nnx_pipeline.ops._attention import TokenSpan, allowed, soft_cap
from nnx_pipeline.ops._experts import ExpertKernels, ExpertProducts, Mix, Mixed, weighed
from nnx_pipeline.ops._grouped.experts import GroupedExperts
from nnx_pipeline.ops._head import used_kernel
from nnx_pipeline.ops._loss import LossOptions, Targets
from nnx_pipeline.ops._mlp import gated
from nnx_pipeline.ops._moe import routed_experts
from nnx_pipeline.ops._router import Usage
from nnx_pipeline.pipeline.stage.apply import ApplyStage, AtDepth, map_stages
from nnx_pipeline.sharding.layout import (
    AxisName,
    Layout,
    P,
    Variable,
    is_variable,
    mesh_sizes,
    out_sharding,
    place,
)


def einsum_scale(x: Array, scale: Array, offset: float) -> Array:
    """RMSNorm's scale by an einsum, with `offset` added even if 0, as in MaxText (seeds S2.5)."""
    return jnp.einsum("...k,k->...k", x, scale + offset)


def mask_array(queries: TokenSpan, keys: TokenSpan, window: int | None) -> Array:
    """The mask of `allowed`, built as an array of numbers, s32[batch, seq, seq] (seeds S2.8).

    - `queries`, `keys`, `window`: as for `allowed`.

    A kernel that takes a mask takes it as an array. The barrier stands for such a kernel: it keeps
    the compiler from fusing the comparison into what reads the mask.
    """
    mask: Array = jax.lax.optimization_barrier(allowed(queries, keys, window).astype(jnp.int32))
    return mask != 0


def map_stages_by_nnx_vmap(apply_stage: ApplyStage, *, at_depth: bool = False) -> ApplyStage:
    """The stage function under `nnx.vmap`, with the layers' state as an input and as an output.

    - `apply_stage`, `at_depth`: as for `map_stages`.

    As in MaxText's pipeline of NNX modules, the stacked layers are split into graph and state, and
    each stage merges the two, runs, and splits its layers again. `loop_variants.carry_layers` is
    what carries the state from tick to tick.
    """
    name = "stage" if mesh_sizes().get("stage", 1) > 1 else None

    def apply(params: PyTree, x: PyTree, side: PyTree) -> tuple[PyTree, ...]:
        # A pair for each layer that is held apart, or for the stack of each kind of layers.
        layers, numbers = zip(*params, strict=True)
        graph, state = nnx.split(list(layers))

        def one_stage(
            state: PyTree, numbers: tuple[Array, ...], x: PyTree, side: PyTree
        ) -> tuple[tuple[PyTree, ...], PyTree]:
            merged = nnx.merge(graph, state)
            pairs = type(params)(zip(merged, numbers, strict=True))
            results = apply_stage(pairs, x, side)
            return results, nnx.split(merged)[1]

        results: tuple[PyTree, ...]
        axes = (0, 0, 0, AtDepth(0, None)) if at_depth else 0
        mapped = nnx.vmap(one_stage, in_axes=axes, spmd_axis_name=name)
        results, _ = mapped(state, numbers, x, side)
        return results

    return apply


def map_stages_stripped(apply_stage: ApplyStage, *, at_depth: bool = False) -> ApplyStage:
    """The stage function on copies of its variables whose metadata omits the axes of the stack.

    - `apply_stage`, `at_depth`: as for `map_stages`.

    MaxText did this to weights under a vmap at each call (`meta.remove_axis`, seeds S2.10d).
    """

    def strip(variable: Array | Variable) -> Array | Variable:
        if not is_variable(variable):
            return variable  # the numbers of the layers
        axes = variable.get_metadata("logical_axes")
        # The value has lost the first two axes, repeats and stages.
        return nnx.Param(variable.get_value(), logical_axes=axes[2:])

    def apply(params: PyTree, x: PyTree, side: PyTree) -> tuple[PyTree, ...]:
        stripped = jax.tree.map(strip, params, is_leaf=is_variable)
        return apply_stage(stripped, x, side)

    return map_stages(apply, at_depth=at_depth)


@dataclass(frozen=True)
class SizeOneAxes(Layout):
    """A layout whose specs name every mesh axis, also axes of size 1 (seeds S2.4b)."""

    def axes(self, name: str) -> tuple[str, ...]:
        on_mesh = mesh_sizes()
        return tuple(axis for axis in getattr(self, name) if axis in on_mesh)


@dataclass(frozen=True)
class FlaxShardings(Layout):
    """A layout that each parameter also has in Flax's own metadata (seeds S2.13a).

    - `always`: the value of Flax's flag `flax_always_shard_variable` while a parameter is created;
      with True Flax places it.
    """

    always: bool = True

    def variable(self, value: Array, logical_axes: tuple[AxisName, ...]) -> nnx.Param[Array]:
        with nnx.use_eager_sharding(self.always):
            spec = self.spec(*logical_axes)
            return nnx.Param(value, logical_axes=logical_axes, out_sharding=spec)


# Tokens are not sharded over `expert`, so that sharding them over it has something to move (seeds
# S2.11). The embedding's columns are not either, or each device would look up a part of a row.
WHOLE_OVER_EXPERTS = Layout(batch=("data", "fsdp"), embed=("fsdp",))


def routed_and_resharded(x: Array, *args: Any, **options: Any) -> tuple[Array, Usage]:
    """`routed_experts` between two changes of the sharding of tokens (seeds S2.11).

    As in MaxText, the batch is sharded over all its mesh axes before the experts, also over axes of
    size 1, and after the experts as `WHOLE_OVER_EXPERTS` says.
    """
    x = place(x, P(("data", "fsdp", "expert", "context"), None, None))
    mixed, usage = routed_experts(x, *args, **options)
    return place(mixed, P(WHOLE_OVER_EXPERTS.batch, None, None)), usage


def weighed_through_float32(hidden: Array, weight: Array) -> Array:
    """`weighed`, then a cast to float32 and back, which changes no value (seeds S2.9b)."""
    return _through_float32(weighed(hidden, weight))


def gated_through_float32(opened: Array, raised: Array, *activation: str) -> Array:
    """The same for experts that weigh what they project."""
    return _through_float32(gated(opened, raised, *activation))


def _through_float32(x: Array) -> Array:
    return x.astype(jnp.float32).astype(x.dtype)


def uncast(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """No cast: MaxText leaves gradients as they are if `grad_dtype` is float32 (seeds S2.13b)."""
    del dtype
    return x


def sum_chosen(
    x: Array,
    choice: tuple[Array, Array],
    kernels: ExpertKernels,
    *,
    layout: Layout,
    remat: Remat,
    sum_dtype: str | None,
) -> Mixed:
    """`DenseExperts` by way of one array with the outputs of each token's experts (seeds S2.1).

    The array is [batch, seq, chosen, embed] in the dtype of `x`. Weighted by the router, it is
    summed over the chosen experts.

    - `sum_dtype`: the dtype of that sum; None for the dtype of `x`.

    The other arguments are as for `DenseExperts`.
    """
    spec = layout.spec("batch_beside_experts", None, None)
    x, weights, chosen = (place(each, spec) for each in (x, *choice))
    products = ExpertProducts(layout, group=1)

    def one_expert(operands: tuple[Array, ...]) -> Array:
        gate, up, down, here = operands
        product = products.project(products.open_up(x, gate, up), down)
        # `here` is 1 where a token chose this expert, so that each output goes to its own place.
        return here[..., 0] * product[..., None, :]

    takes = jax.nn.one_hot(chosen, kernels.gate.shape[0], dtype=x.dtype)
    operands = (*products.split(kernels, x.dtype), products.split_choice(takes))
    by_choice = products.sum_over_steps(remat.checkpoint(one_expert), operands, x.dtype)
    outputs, weights = (each.astype(sum_dtype or x.dtype) for each in (by_choice, weights))
    mixed = jnp.einsum("bske,bsk->bse", outputs, weights).astype(x.dtype)
    return Mixed(place(mixed, layout.spec("batch", None, None)))


def summed_in_float32(config: ModelConfig) -> Mix:
    """`sum_chosen` with the outputs of the experts and their weights cast to float32."""
    return functools.partial(sum_chosen, sum_dtype="float32")


def summed_in_model_dtype(config: ModelConfig) -> Mix:
    """`sum_chosen` with the sum in the dtype of the model."""
    return functools.partial(sum_chosen, sum_dtype=None)


# Rows, width before and width after of each product: smaller rows in the backward pass.
NINE_TILES = (128, 128, 128, 64, 128, 128, 64, 128, 128)


def nine_tiles(config: ModelConfig) -> Mix:
    return GroupedExperts(tiles=NINE_TILES)


def three_tiles(config: ModelConfig) -> Mix:
    return GroupedExperts(tiles=NINE_TILES[:3])


def full_cross_entropy(
    hidden: Array,
    kernel: Array,
    targets: Targets,
    *,
    batch_axes: tuple[str, ...],
    options: LossOptions,
    layout: Layout,
) -> Array:
    """`chunked_cross_entropy` without chunks: all logits as one array, differentiated by JAX.

    The arguments are as for `chunked_cross_entropy`; the number of chunks has no effect.
    """
    known = kernel.shape[1] if options.columns is None else options.columns
    kernel = used_kernel(kernel.astype(hidden.dtype), layout)
    spec = out_sharding(layout.spec(*batch_axes, None, "vocab_of_logits"))
    logits = jnp.einsum("...d,dv->...v", hidden, kernel, out_sharding=spec).astype(jnp.float32)
    if options.soft_cap is not None:
        logits = soft_cap(logits, options.soft_cap)
    shape = (*[1] * (logits.ndim - 1), logits.shape[-1])
    columns = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    if known < logits.shape[-1]:
        logits = jnp.where(columns < known, logits, -jnp.inf)
    label = jnp.sum(jnp.where(columns == targets.ids[..., None], logits, 0.0), axis=-1)
    return jnp.sum(targets.weights * (jax.nn.logsumexp(logits, axis=-1) - label))


_OPS, _MODULES = "nnx_pipeline.ops", "nnx_pipeline.modules"
EINSUM_SCALE = (Replaced(f"{_OPS}._norm", "multiply_scale", einsum_scale),)
MASK_ARRAY = (
    Replaced(f"{_OPS}._attention", "allowed", mask_array),
    Replaced(f"{_OPS}._fast_attention.chunked", "allowed", mask_array),
)
EVERY_CONSTRAINT = (
    Replaced(f"{_OPS}._residual", "constrain", place),
    Replaced(f"{_MODULES}.decoder", "constrain", place),
)
HIDDEN_THROUGH_FLOAT32 = (
    Replaced(f"{_OPS}._experts", "weighed", weighed_through_float32),
    Replaced(f"{_OPS}._by_choice", "gated", gated_through_float32),
)
RESHARDED = (Replaced(f"{_MODULES}.moe", "routed_experts", routed_and_resharded),)
FULL_LOGITS = (Replaced(f"{_MODULES}.decoder", "chunked_cross_entropy", full_cross_entropy),)
GRADIENT_LEFT = (Replaced("nnx_pipeline.train.optimizer", "cast_to_other", uncast),)


def experts_by(mix_of: Callable[[ModelConfig], Mix]) -> tuple[Replaced, ...]:
    """What an arm replaces to compute experts in another way.

    - `mix_of`: takes the place of `ops._moe.mix_of`.
    """
    return (Replaced(f"{_OPS}._moe", "mix_of", mix_of),)
