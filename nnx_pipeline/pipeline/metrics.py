"""What layers report beside activations, and how a pipeline makes one value of each of them.

A layer reports one value per visit: for each microbatch, or for the whole batch at once where there
is no pipeline, and for each copy where the batch is cut into copies (`Layout.copy`). Only the layer
knows what these values are together, so it says so by the class that it wraps each of them in. The
result is then the same on every mesh, schedule and option, and so is its gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError
from nnx_pipeline.ops.gradients import no_gradient_of
from nnx_pipeline.pipeline.buffers import over_stage, stage_axis, where
from nnx_pipeline.sharding import P, is_explicit, place

_register = partial(jax.tree_util.register_dataclass)


@_register
@dataclass(frozen=True)
class Sum:
    """A metric that adds up over layers, microbatches and copies of the batch.

    value: a floating array of any shape; a sum over the sequences that the layer was called with,
    so that it does not matter in which pieces they come.
    """

    value: Any


@_register
@dataclass(frozen=True)
class Mean:
    """A metric whose mean is taken over layers, microbatches and copies of the batch.

    value: a floating array of any shape; a mean over the sequences that the layer was called with,
    of which there are as many in every microbatch and copy.
    """

    value: Any


@_register
@dataclass(frozen=True)
class Max:
    """A metric whose largest value is taken over layers, microbatches and copies of the batch.

    It has no gradient, on any mesh and in any schedule; asking for one is an InputError.

    value: a floating array of any shape, whose entries are compared one by one.
    """

    value: Any


@_register
@dataclass(frozen=True)
class MicrobatchMean:
    """A function of what a whole microbatch did in a layer; its mean over layers and microbatches.

    Where the function is not linear, as in the load balance of a router, it matters that it sees a
    microbatch, and neither the part of one that a copy has nor several at once. So the layer gives
    what the function reads sequence by sequence, and the pipeline calls it.

    rows: any pytree of floating `[batch, …]`, a row per sequence; the function gets their mean over
        the sequences of a microbatch. function: of the same pytree without the batch, to a floating
        array of any shape.
    """

    rows: Any
    function: Callable[[Any], Array] = field(metadata={"static": True})


Metric = Sum | Mean | Max
Declared = Metric | MicrobatchMean  # before the metrics of several layers are put together
_REDUCTIONS: dict[type, Callable[..., Array]] = {Sum: jnp.sum, Max: jnp.max}


def is_metric(leaf: Any) -> bool:
    """Whether a tree traversal should stop here."""
    return isinstance(leaf, Declared)


def declared(metrics: PyTree, *, microbatches: int = 1) -> PyTree:
    """The metrics that a call of a layer gave, fit to be put together with those of others.

    They are in float32 or wider, those that have no gradient without one, and the rows of
    `MicrobatchMean` are means over microbatches, `[microbatches, …]`. microbatches: how many the
    call saw. Raises InputError for a metric that does not say what it is, or is not floating.
    """

    def one(path: Any, metric: Any) -> Declared:
        name = f"the metric {jax.tree_util.keystr(path)}" if path else "the metric"
        if not isinstance(metric, Declared):
            raise InputError(
                f"{name} of a layer is {_type(metric)}, and nothing says what it is over all "
                "layers and microbatches; wrap it, as Sum(x) if it adds up over the sequences of a "
                "batch, as Mean(x) if it is a mean over them, or as Max(x) (from nnx_pipeline)"
            )
        if isinstance(metric, MicrobatchMean):
            rows = jax.tree.map(partial(_floating, name), metric.rows)
            means = jax.tree.map(partial(_mean_of_rows, microbatches), rows)
            return MicrobatchMean(means, metric.function)
        value = _floating(name, metric.value)
        return Max(jax.lax.stop_gradient(value)) if isinstance(metric, Max) else type(metric)(value)

    return jax.tree_util.tree_map_with_path(one, metrics, is_leaf=is_metric)


def of_visit(metrics: PyTree) -> PyTree:
    """What the function of a stage gave, as `Sum`, `Mean` and `Max` alone; see `declared`."""
    stacked = jax.tree.map(lambda leaf: leaf[None], declared(metrics))
    return over_layers(stacked)


def over_layers(metrics: PyTree, *, copies: int | None = None) -> PyTree:
    """The metrics of several layers, `[layers, …]`, as `Sum`, `Mean` and `Max` of all of them.

    copies: the place of an axis of copies, if there is one beside that of the layers.
    """
    if copies is not None:
        metrics = _fold(metrics, copies)
    return _fold(jax.tree.map(_finished, metrics, is_leaf=is_metric), 0)


def over_ticks(metrics: PyTree, active: np.ndarray) -> PyTree:
    """The metrics of all visits put together.

    metrics: `[ticks, stages, …]`. active: bool `[ticks, stages]`, False in a bubble, whose metrics
    do not count.
    """

    def one(metric: Metric) -> Metric:
        spec = P(None, stage_axis())
        if is_explicit():
            spec = P(*jax.typeof(metric.value).sharding.spec[:2])
        nothing = jnp.full_like(metric.value, identity(metric))
        return type(metric)(where(place(jnp.asarray(active), spec), metric.value, nothing))

    masked = jax.tree.map(one, metrics, is_leaf=is_metric)
    return _total(masked, axes=(0, 1), visits=int(active.sum()))


def include(active: Array, totals: PyTree, new: PyTree) -> PyTree:
    """Puts the metrics of a tick, `[stages, …]`, to those of the ticks before.

    active: bool `[stages]`, False in a bubble. totals: `identity` of each metric before the first.
    """

    def one(total: Metric, metric: Metric) -> Metric:
        value = over_stage(metric.value)
        value = where(active, value, jnp.full_like(value, identity(metric)))
        add = jnp.maximum if isinstance(metric, Max) else jnp.add
        return type(metric)(add(total.value, value))

    return jax.tree.map(one, totals, new, is_leaf=is_metric)


def over_all_stages(totals: PyTree, visits: int) -> PyTree:
    """What `include` has put together on each stage, `[stages, …]`, put together over them.

    visits: how often metrics were put in, over all stages.
    """
    return _total(totals, axes=(0,), visits=visits)


def identity(metric: Metric) -> float:
    """What changes nothing when it is put to other values of the metric."""
    return -math.inf if isinstance(metric, Max) else 0.0


def values(metrics: PyTree) -> PyTree:
    """The arrays in the place of what they are wrapped in."""
    return jax.tree.map(lambda metric: metric.value, metrics, is_leaf=is_metric)


def given_out(metrics: PyTree, beside: PyTree) -> PyTree:
    """The same, where the array of a `Max` refuses its gradient.

    beside: the activations that came with them.
    """

    def one(metric: Metric) -> Array:
        value: Array = metric.value
        return no_gradient_of(_MAX_HAS_NONE, value, beside) if isinstance(metric, Max) else value

    return jax.tree.map(one, metrics, is_leaf=is_metric)


_MAX_HAS_NONE = (
    "a pipeline was asked for the gradient of a metric wrapped in Max, which has none; use "
    "jax.lax.stop_gradient on it, or a metric wrapped in Sum or Mean"
)


def weights_like(weights: PyTree, metrics: PyTree) -> PyTree:
    """What each metric counts in the loss: the tree of the metrics with a weight for each.

    weights: a number for all of them, or a tree of them like that of the metrics; None is 0 in it.
    Raises InputError for another tree, and for a weight on a `Max`.
    """

    def spread(weight: Any, below: PyTree) -> PyTree:
        return jax.tree.map(partial(_checked_weight, weight), below, is_leaf=is_metric)

    weights = jax.tree.map(lambda w: 0.0 if w is None else w, weights, is_leaf=lambda w: w is None)
    try:
        return jax.tree.map(spread, weights, metrics)
    except InputError:
        raise
    except ValueError as error:
        names = jax.tree.map(lambda metric: type(metric).__name__, metrics, is_leaf=is_metric)
        raise InputError(
            f"metric_weights={weights} is no tree like that of the metrics, {names}; give one "
            "number for all of them, or one for each in the same tree"
        ) from error


def counts(weight: Any) -> bool:
    """Whether a weight is anything but a zero that is known while the loop is traced."""
    return isinstance(weight, jax.core.Tracer) or bool(np.any(weight))


def _checked_weight(weight: Any, metric: Metric) -> Any:
    if isinstance(metric, Max) and counts(weight):
        raise InputError(
            f"metric_weights give {weight} to a metric wrapped in Max, which has no gradient; give "
            "it 0.0, or wrap the metric in Sum or Mean"
        )
    return weight


def _fold(metrics: PyTree, axis: int) -> PyTree:
    """Puts together what lies along an axis."""

    def one(metric: Declared) -> Declared:
        how = _REDUCTIONS.get(type(metric), jnp.mean)
        return jax.tree.map(lambda leaf: how(leaf, axis=axis), metric)

    return jax.tree.map(one, metrics, is_leaf=is_metric)


def _finished(metric: Declared) -> Metric:
    """`[layers, …]` of what `declared` gave, without `MicrobatchMean`."""
    if not isinstance(metric, MicrobatchMean):
        return metric
    values = jax.vmap(jax.vmap(metric.function))(metric.rows)  # [layers, microbatches, …]
    return Mean(jnp.mean(_floating("the result of MicrobatchMean", values), axis=1))


def _total(metrics: PyTree, *, axes: tuple[int, ...], visits: int) -> PyTree:
    def one(metric: Metric) -> Metric:
        total = _REDUCTIONS.get(type(metric), jnp.sum)(metric.value, axis=axes)
        return type(metric)(total / visits if isinstance(metric, Mean) else total)

    return jax.tree.map(one, metrics, is_leaf=is_metric)


def _mean_of_rows(microbatches: int, rows: Array) -> Array:
    """`[batch, …]` to `[microbatches, …]`, whole on every device of the mesh (or of a stage)."""
    rows = place(rows, P(*[None] * rows.ndim))
    return jnp.mean(rows.reshape(microbatches, -1, *rows.shape[1:]), axis=1)


def _floating(name: str, value: Any) -> Array:
    """The value in float32 or wider."""
    leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(value))
    if not leaf or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise InputError(
            f"{name} of a layer is {_type(value)}; it must be one floating array, such as "
            "metric.astype('float32')"
        )
    dtype = jnp.result_type(value)
    wide = dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32
    return jax.lax.convert_element_type(value, wide)


def _type(leaf: Any) -> str:
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(leaf)):
        return type(leaf).__name__
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
