"""Metrics that layers report besides activations, and how a pipeline combines their values.

Only the layer knows how the values of its visits and copies combine, so it wraps each in a class
that says so. The result and its gradient are then the same on every mesh and with every schedule
and option.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.pipeline._exchange import over_stage, stage_axis, where
from nnx_pipeline.sharding._gradients import no_gradient_of
from nnx_pipeline.sharding.layout import P, is_explicit, place

_register = partial(jax.tree_util.register_dataclass)


@_register
@dataclass(frozen=True)
class Sum:
    """A metric that is summed over layers, microbatches and copies of the batch.

    - `value`: a floating array of any shape: a sum over the sequences that the layer was called
      with, so that the total does not depend on how the batch is cut.
    """

    value: Array


@_register
@dataclass(frozen=True)
class Mean:
    """A metric that is averaged over layers, microbatches and copies of the batch.

    - `value`: a floating array of any shape: a mean over the sequences that the layer was called
      with. Every microbatch and copy has the same number of sequences.
    """

    value: Array


@_register
@dataclass(frozen=True)
class Max:
    """A metric whose largest value is taken over layers, microbatches and copies of the batch.

    - `value`: a floating array of any shape, whose entries are compared one by one.

    It has no gradient, on any mesh and with any schedule; asking for one raises InputError.
    """

    value: Array


@_register
@dataclass(frozen=True)
class MicrobatchMean:
    """A function of one whole microbatch in one layer, averaged over layers and microbatches.

    If the function is not linear, as for the load balance of a router, it must see exactly one
    microbatch: not the part that a copy has, and not several microbatches at once. So the layer
    gives the function's input per sequence, and the pipeline calls the function.

    - `rows`: any pytree of floating `[batch, …]`, one row per sequence; the function gets their
      mean over the sequences of a microbatch.
    - `function`: from that pytree without its batch axis to a floating array of any shape.
    """

    rows: PyTree
    function: Callable[[PyTree], Array] = field(metadata={"static": True})


Metric = Sum | Mean | Max
Declared = Metric | MicrobatchMean  # before the metrics of several layers are combined
_REDUCTIONS: dict[type, Callable[..., Array]] = {Sum: jnp.sum, Max: jnp.max}


def is_metric(leaf: object) -> bool:
    """Whether a leaf is a wrapped metric, at which a tree traversal should stop."""
    return isinstance(leaf, Declared)


_map = partial(jax.tree.map, is_leaf=is_metric)


def declared(metrics: PyTree, *, microbatches: int = 1) -> PyTree:
    """The metrics of one layer call in float32 or wider, without a gradient of each `Max`."""

    # The rows of each `MicrobatchMean` are averaged per microbatch, `[microbatches, …]`.
    def checked(path: tuple[object, ...], metric: object) -> Declared:
        name = f"the metric {jax.tree_util.keystr(path)}" if path else "the metric"
        if not isinstance(metric, Declared):
            raise InputError(
                f"{name} of a layer is {_type(metric)}, and nothing says how to combine it over "
                "layers and microbatches; wrap it, as Sum(x) if it adds up over the sequences of a "
                "batch, as Mean(x) if it is a mean over them, or as Max(x) (from nnx_pipeline)"
            )
        if isinstance(metric, MicrobatchMean):
            rows = jax.tree.map(partial(_rows, name), metric.rows)
            means = jax.tree.map(partial(_mean_of_rows, microbatches), rows)
            return MicrobatchMean(means, metric.function)
        value = _floating(name, metric.value)
        return Max(jax.lax.stop_gradient(value)) if isinstance(metric, Max) else type(metric)(value)

    return jax.tree_util.tree_map_with_path(checked, metrics, is_leaf=is_metric)


def of_visit(metrics: PyTree) -> PyTree:
    """The metrics of a stage function as `Sum`, `Mean` and `Max` only."""
    stacked = jax.tree.map(lambda leaf: leaf[None], declared(metrics))
    return over_layers(stacked)


def over_layers(metrics: PyTree, *, copies: int | None = None) -> PyTree:
    """Combines metrics `[layers, …]`, perhaps with an axis of copies."""
    # Copies first: the function of a `MicrobatchMean` must see the mean of a whole microbatch.
    if copies is not None:
        metrics = _fold(metrics, copies)
    return _fold(_map(_finished, metrics), 0)


def over_kinds(
    of_kinds: Sequence[PyTree],
    real: Sequence[Array | None],
    *,
    counts: Sequence[float],
    copies: int | None = None,
) -> PyTree:
    """Combines the metrics of layers of several kinds; a kind without metrics takes no part."""
    # `real` is for each kind bool `[layers]`, False where a layer is padding; None without padding.
    # `counts` are the layers of each kind in a call, in the mean over all calls.
    if len(of_kinds) == 1 and real[0] is None:
        return over_layers(of_kinds[0], copies=copies)
    reporting = [kind for kind, metrics in enumerate(of_kinds) if jax.tree.leaves(metrics)]
    if not reporting:
        return of_kinds[0]
    layers = sum(counts[kind] for kind in reporting)

    def total(kind: int) -> PyTree:
        metrics, counted = of_kinds[kind], real[kind]
        if copies is not None:
            metrics = _fold(metrics, copies)
            counted = None if counted is None else jnp.any(counted, axis=copies)
        return _map(lambda metric: _added(_finished(metric), counted, layers), metrics)

    totals = [total(kind) for kind in reporting]
    _check_alike(totals)
    return _map(lambda *metrics: reduce(_joined, metrics), *totals)


def over_ticks(metrics: PyTree, active: np.ndarray) -> PyTree:
    """Combines metrics `[ticks, stages, …]` of all visits; bubbles do not count."""

    def masked(metric: Metric) -> Metric:
        spec = P(None, stage_axis())
        if is_explicit():
            spec = P(*jax.typeof(metric.value).sharding.spec[:2])
        nothing = jnp.full_like(metric.value, identity(metric))
        return type(metric)(where(place(jnp.asarray(active), spec), metric.value, nothing))

    visits = int(active.sum())
    return _map(lambda metric: _total(metric, (0, 1), visits), _map(masked, metrics))


def include(active: Array, totals: PyTree, new: PyTree) -> PyTree:
    """Combines the metrics `[stages, …]` of a tick with the totals; bubbles do not count."""

    def joined(total: Metric, metric: Metric) -> Metric:
        return _joined(total, _masked(type(metric)(over_stage(metric.value)), active))

    return _map(joined, totals, new)


def over_all_stages(totals: PyTree, visits: int) -> PyTree:
    """Combines totals `[stages, …]`, into which `visits` visits of all stages went."""
    return _map(lambda total: _total(total, 0, visits), totals)


def identity(metric: Metric) -> float:
    """The value that changes nothing when it is combined with others."""
    return -math.inf if isinstance(metric, Max) else 0.0


def values(metrics: PyTree) -> PyTree:
    return _map(lambda metric: metric.value, metrics)


def guarded_values(metrics: PyTree, besides: PyTree) -> PyTree:
    """The arrays of the metrics; asking for the gradient of a `Max` raises InputError."""

    def guarded(metric: Metric) -> Array:
        value: Array = metric.value
        return no_gradient_of(_MAX_HAS_NONE, value, besides) if isinstance(metric, Max) else value

    return _map(guarded, metrics)


_MAX_HAS_NONE = (
    "a pipeline was asked for the gradient of a metric wrapped in Max, which has none; use "
    "jax.lax.stop_gradient on it, or a metric wrapped in Sum or Mean"
)


def weights_like(weights: PyTree, metrics: PyTree) -> PyTree:
    """The weight of each metric in the loss: one for all, or a tree, None for 0."""
    weights = jax.tree.map(lambda w: 0.0 if w is None else w, weights, is_leaf=lambda w: w is None)
    try:
        return jax.tree.map(
            lambda weight, below: _map(partial(_checked_weight, weight), below), weights, metrics
        )
    except InputError:
        raise
    except ValueError as error:
        names = _map(lambda metric: type(metric).__name__, metrics)
        raise InputError(
            f"metric_weights={weights} does not have the tree structure of the metrics, {names}; "
            "give one number for all of them, or one for each in the same tree"
        ) from error


def objective(loss: Array, metrics: PyTree, weights: PyTree) -> tuple[Array, tuple[Array, PyTree]]:
    """The loss to minimise, and its two parts: the loss alone, and the values of the metrics."""

    def share(weight: float | Array, metric: Metric) -> Array:
        weighed = jnp.asarray(weight, metric.value.dtype) * metric.value
        return jnp.sum(weighed).astype(jnp.float32) if counts(weight) else jnp.float32(0)

    shares = jax.tree.map(share, weights_like(weights, metrics), metrics)
    return jax.tree.reduce(jnp.add, shares, loss), (loss, values(metrics))


def only_counted(weights: PyTree, metrics: PyTree) -> PyTree:
    """Metrics without a gradient where their weight in the loss is 0."""
    # Where a derivative is infinite, 0 times that would be NaN.
    return jax.tree.map(
        lambda weight, metric: metric if counts(weight) else jax.lax.stop_gradient(metric),
        weights_like(weights, metrics),
        metrics,
    )


def counts(weight: float | Array) -> bool:
    return isinstance(weight, jax.core.Tracer) or bool(np.any(weight))


def _checked_weight(weight: float | Array, metric: Metric) -> float | Array:
    if isinstance(metric, Max) and counts(weight):
        raise InputError(
            f"metric_weights give {weight} to a metric wrapped in Max, which has no gradient; give "
            "it 0.0, or wrap the metric in Sum or Mean"
        )
    return weight


def _fold(metrics: PyTree, axis: int) -> PyTree:
    def folded(metric: Declared) -> PyTree:
        return jax.tree.map(partial(_REDUCTIONS.get(type(metric), jnp.mean), axis=axis), metric)

    return _map(folded, metrics)


def _added(metric: Metric, real: Array | None, layers: float) -> Metric:
    """The share of the layers of one kind, `[layers, …]`, in a metric of all `layers`."""
    return _total(metric if real is None else _masked(metric, real), 0, layers)


def _masked(metric: Metric, counted: Array) -> Metric:
    nothing = jnp.full_like(metric.value, identity(metric))
    return type(metric)(where(counted, metric.value, nothing))


def _joined(first: Metric, second: Metric) -> Metric:
    add = jnp.maximum if isinstance(first, Max) else jnp.add
    return type(first)(add(first.value, second.value))


def _total(metric: Metric, axes: int | tuple[int, ...], number: float) -> Metric:
    total = _REDUCTIONS.get(type(metric), jnp.sum)(metric.value, axis=axes)
    return type(metric)(total / number if isinstance(metric, Mean) else total)


def _check_alike(totals: Sequence[PyTree]) -> None:
    named = partial(_map, lambda metric: f"{type(metric).__name__} of {_type(metric.value)}")
    said = [str(named(metrics)) for metrics in totals]
    for other in said[1:]:
        if other != said[0]:
            raise InputError(
                f"layers of one kind report the metrics {said[0]}, and layers of another kind "
                f"{other}; let each kind report the same metrics, or None"
            )


def _finished(metric: Declared) -> Metric:
    if not isinstance(metric, MicrobatchMean):
        return metric
    values = jax.vmap(jax.vmap(metric.function))(metric.rows)  # [layers, microbatches, …]
    return Mean(jnp.mean(_floating("the result of MicrobatchMean", values), axis=1))


def _mean_of_rows(microbatches: int, rows: Array) -> Array:
    """`[batch, …]` to `[microbatches, …]`, whole on every device of the mesh, or of a stage."""
    rows = place(rows, P(*[None] * rows.ndim))
    return jnp.mean(rows.reshape(microbatches, -1, *rows.shape[1:]), axis=1)


def _rows(name: str, value: Array) -> Array:
    if not jnp.ndim(value):
        raise InputError(
            f"{name} of a layer is a MicrobatchMean of {_type(value)}; its rows must have the axis "
            "of the batch first, one row per sequence"
        )
    return _floating(name, value)


def _floating(name: str, value: Array) -> Array:
    """The value in float32 or wider; raises InputError unless it is one floating array."""
    if not _is_array(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise InputError(
            f"{name} of a layer is {_type(value)}; it must be one floating array, such as "
            "metric.astype('float32')"
        )
    dtype = jnp.result_type(value)
    wide = dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32
    return jax.lax.convert_element_type(value, wide)


def _is_array(value: object) -> TypeGuard[ArrayLike]:
    return isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex)


def _type(leaf: object) -> str:
    if not _is_array(leaf):
        return type(leaf).__name__
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
