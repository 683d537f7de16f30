"""Applies the layers of one stage, one after the other."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.config._remat import LAYER_INPUT, LAYER_METRICS, Remat, named
from nnx_pipeline.pipeline._exchange import where
from nnx_pipeline.pipeline._stack import Stack
from nnx_pipeline.pipeline.metrics import declared, over_kinds
from nnx_pipeline.pipeline.stage import _checks as checks
from nnx_pipeline.pipeline.stage._split import BatchSplit
from nnx_pipeline.pipeline.stage.state import check_written, without_gradient
from nnx_pipeline.pipeline.stage.variables import is_state, join_state, state_after, state_of_kinds
from nnx_pipeline.sharding.dropout import fold_in
from nnx_pipeline.sharding.layout import (
    AxisName,
    Layout,
    P,
    Variable,
    gather_weight,
    is_explicit,
    is_variable,
    with_layout,
)

Side = dict[str, PyTree]  # what a layer reads besides x, by the names of its arguments
ApplyLayer = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


AXES_OF_BATCH = Layout().batch  # the mesh axes over which the activations of layers are sharded

# Up to so many layers of a stage are unrolled, each with arrays of its own.
UNROLLED = 4


@dataclass(frozen=True)
class LayerSequence:
    """Applies `number` layers of `kinds` kinds, in a tick within the checkpoint of the tick."""

    number: int
    kinds: int
    remat: Remat
    in_ticks: bool

    @property
    def unrolled(self) -> bool:
        """Whether the layers are separate arrays and unrolled, instead of stacked and scanned."""
        # A tick unrolls a few layers; one alone is read from its stack. A scan would slice the
        # weights of each out of the stack, and put its gradient into a stack of the visit, which is
        # stored next to the accumulators until the visit is over. Of layers apart each gradient is
        # added as soon as it is complete; compile time grows with their number. For `mixtral-small`
        # on a TPU v5p (libtpu 0.0.42.1) with 2 layers per stage, scanned and apart: temp 354 and
        # 258 MB, 23.3 and 20.5 ms of compute. Any number is unrolled if each is of a kind of its
        # own, and if some of what the layers compute is offloaded, because no compiler sends a
        # value from a loop inside another loop to the host.
        few = self.number <= UNROLLED or bool(self.remat.offloaded) or self.number == self.kinds
        return self.in_ticks and self.number > 1 and few

    def __call__(
        self, apply: ApplyLayer, layers: Sequence[PyTree], x: PyTree
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Applies all layers, if `unrolled`, or the stack of each kind; metrics by kind."""

        def each_kind(x: PyTree, layers: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
            results = []
            for layer in layers:
                x, metrics = call(_named(x, LAYER_INPUT) if self.in_ticks else x, layer)
                results.append(_named(metrics, LAYER_METRICS))
            return x, tuple(results)

        # A checkpoint decides over the names within it: a tick's checkpoint over the inputs of all
        # its layers, else a layer's over its own.
        call = apply if self.in_ticks else lambda x, layer: apply(_named(x, LAYER_INPUT), layer)
        if self.in_ticks and self.number == 1:  # it has the checkpoint of the tick
            x, results = each_kind(x, jax.tree.map(lambda leaf: leaf[0], layers))
            return x, jax.tree.map(lambda leaf: leaf[None], results)
        # A scan over one layer is no loop to a compiler, which would merge what is computed again.
        in_scan = not self.unrolled and self.number > 1
        call = self.remat.checkpoint(call, in_scan=in_scan)
        if not self.unrolled:
            return jax.lax.scan(each_kind, x, layers)
        each = []
        for layer in layers:
            x, layer = await_gradient(x, layer)
            x, metrics = call(_named(x, LAYER_INPUT), layer)
            each.append(_named(metrics, LAYER_METRICS))
        of_kinds = [each[kind :: self.kinds] for kind in range(self.kinds)]
        return x, tuple(map(_stacked, of_kinds))


def _named(tree: PyTree, name: str) -> PyTree:
    return jax.tree.map(lambda leaf: named(leaf, name), tree)


def _stacked(trees: Sequence[PyTree]) -> PyTree:
    """Trees of the same kind of layer as one."""
    # The functions in them, as of a `MicrobatchMean`, may be made anew at each call, and those of
    # the first are taken, as a scan does.
    leaves = zip(*map(jax.tree.leaves, trees), strict=True)
    return jax.tree.unflatten(jax.tree.structure(trees[0]), [jnp.stack(each) for each in leaves])


@jax.custom_jvp
def await_gradient(x: PyTree, layer: PyTree) -> tuple[PyTree, PyTree]:
    """Returns its arguments, and makes the backward pass wait for the gradient of `layer`."""
    # A compiler may otherwise put off the gradients of all layers, and hold everything that they
    # are made of: with 4 layers of a dense MLP per stage, the temp on a TPU v5p (libtpu 0.0.42.1)
    # is 317 MB with it and 467 without, for 2 % more compute.
    return x, layer


def _await_gradient_jvp(
    primals: tuple[PyTree, PyTree], tangents: tuple[PyTree, PyTree]
) -> tuple[PyTree, PyTree]:
    """A barrier over the tangents, whose transpose is one over the cotangents."""
    leaves, tree = jax.tree.flatten(tangents, is_leaf=_is_zero_tangent)
    there = [at for at, leaf in enumerate(leaves) if not _is_zero_tangent(leaf)]
    barred = jax.lax.optimization_barrier([leaves[at] for at in there])
    for at, leaf in zip(there, barred, strict=True):
        leaves[at] = leaf
    return primals, jax.tree.unflatten(tree, leaves)


def _is_zero_tangent(leaf: object) -> bool:
    return isinstance(leaf, jax.custom_derivatives.SymbolicZero)


await_gradient.defjvp(_await_gradient_jvp, symbolic_zeros=True)


class LayerPlace(NamedTuple):
    """Where a layer is in its model, for layers that depend on it; int32 scalars from 0.

    The numbers are traced: choose by them with `jnp.where` or `jax.lax.select`, not with `if`.
    """

    layer: Array  # among all layers of the model
    stage: Array  # 0 on a mesh without stages
    repeat: Array

    @classmethod
    def of(cls, layer: Array, stack: Stack) -> "LayerPlace":
        """The place of a layer by its number, an int32 scalar."""
        # Padding is told that it is the last layer of its kind: of a number that the model does not
        # have, a layer may make what is infinite, as by 1 / (layers - number), and then even a
        # discarded result makes a gradient NaN.
        each, stages = stack.per_stage, stack.stages
        real = layer
        if stack.padding:
            beyond = jnp.maximum(layer - (stack.layers - 1), 0)
            real = jnp.maximum(layer - -(-beyond // stack.kinds) * stack.kinds, 0)
        return cls(real, layer // each % stages, layer // (each * stages))


def gathered_for_use(layer: PyTree) -> PyTree:
    """The layer with weights whole along the mesh axes that shard the batch, in explicit mode."""
    # It is for layers that know nothing of the mesh and whose weights are sharded by Flax's
    # metadata. Types would not let them multiply activations and weights that are sharded over the
    # same mesh axis. In auto mode the compiler gathers such weights. Other layers gather their own.
    if not is_explicit() or not isinstance(layer, nnx.Module):
        return layer

    def gathered(variable: Variable) -> Variable:
        if not variable.get_metadata().get("gather_at_use"):
            return variable
        spec = jax.typeof(variable.get_value()).sharding.spec
        used = P(*(_without(entry, AXES_OF_BATCH) for entry in spec))
        return variable.replace(gather_weight(variable.get_value(), spec, used))

    return jax.tree.map(gathered, layer, is_leaf=is_variable)


def _without(entry: AxisName, axes: tuple[str, ...]) -> AxisName:
    if not isinstance(entry, tuple):
        return None if entry in axes else entry
    return tuple(name for name in entry if name not in axes) or None


def takes_place(layer: PyTree) -> bool:
    """Whether a layer's call has an argument `place`; one that wraps another says so itself."""
    said = getattr(layer, "takes_place", None)
    return _takes(layer, "place") if said is None else said


def _takes(layer: PyTree, name: str) -> bool:
    return name in inspect.signature(layer).parameters


class NumberedLayer(NamedTuple):
    """One layer, or the stack of some: `[layers, …]` each."""

    layer: PyTree  # as `split_state` gives it
    number: Array  # in the model
    state: list[Array]


class LayerResult(NamedTuple):
    """What a call of a layer gives besides its activations."""

    metrics: PyTree  # as `declared` gives them
    real: Array | None  # bool, False for padding; None where there is no padding
    state: list[Array]


def call_layer(
    x: PyTree,
    numbered: NumberedLayer,
    side: Side,
    *,
    stack: Stack,
    microbatches: int = 1,
    split: BatchSplit | None = None,
) -> tuple[PyTree, LayerResult]:
    """Applies one layer to `[batch, …]`, which holds so many microbatches."""
    # A layer that is padding leaves activations and state as they are; its metrics mean nothing.
    layer, number, state = numbered
    keys = side.get("keys")
    extra: Side = {} if keys is None else {"keys": fold_in(keys, number)}
    if takes_place(layer):
        extra["place"] = LayerPlace.of(number, stack)
    layer = gathered_for_use(join_state(layer, without_gradient(state)))
    everything = {**side, **extra}
    rule = f"a layer, {type(layer).__name__}, is called with x and {[*everything] or 'no more'}"
    if keys is None and _takes(layer, "keys"):
        rule += " (it gets `keys` where the pipeline is called with a key: key=jax.random.key(0))"
    before, attributes = checks.arrays_of(layer, is_state), checks.plain_attributes(layer)
    with checks.call_explained(layer, (x,), everything, rule):
        result = layer(x, **everything) if split is None else split(layer, x, **everything)
    checks.check_unchanged(before, layer, lambda layer: layer(x, **everything), is_state)
    checks.check_attributes(attributes, layer)
    y, metrics = checks.check_passed_on(result, x, f"a layer, {type(layer).__name__},", "layer")
    written = without_gradient(state_after(layer, state))
    check_written(state, written)
    real = None
    if stack.padding:
        real = number < stack.layers
        y, written = where(real, (y, written), (x, state))
    return y, LayerResult(declared(metrics, microbatches=microbatches), real, written)


@dataclass(frozen=True)
class StageLayers:
    """The function of a stage: applies its layers to a microbatch, once per copy of the weights."""

    stack: Stack
    sequence: LayerSequence
    layout: Layout
    split: BatchSplit | None
    shared: Side
    microbatches: int = 1

    def __call__(
        self, stack: PyTree, x: PyTree, side: Side, state: list[Array] | None = None
    ) -> tuple[PyTree, ...]:
        """As for `run_pipeline`; each state is `[layers per stage, …]`."""
        kinds = self.stack.kinds
        states = state_of_kinds([layer for layer, _ in stack[:kinds]], state)
        if self.sequence.unrolled:
            of_layers = [divmod(at, kinds) for at in range(len(stack))]
            states = [[leaf[at] for leaf in states[kind]] for at, kind in of_layers]
        layers = tuple(
            NumberedLayer(with_layout(layer, self.layout), number, state)
            for (layer, number), state in zip(stack, states, strict=True)
        )
        call = functools.partial(call_layer, stack=self.stack, split=self.split)
        copies = self.layout.axes("copy")
        if not copies:
            apply = functools.partial(call, side={**side, **self.shared})
            x, results = self.sequence(apply, layers, x)
            metrics, written = of_all_kinds(results, self.stack)
            return (x, metrics, *([] if state is None else [written]))

        def one_copy(
            layers: PyTree, x: PyTree, side: Side
        ) -> tuple[PyTree, tuple[LayerResult, ...]]:
            return self.sequence(functools.partial(call, side={**side, **self.shared}), layers, x)

        x, results = jax.vmap(one_copy, spmd_axis_name=copies)(layers, x, side)
        metrics, _ = of_all_kinds(results, self.stack, copies=0)
        return x, metrics


def of_all_kinds(
    results: Sequence[LayerResult],
    stack: Stack,
    *,
    copies: int | None = None,
    calls: int | None = None,
) -> tuple[PyTree, list[Array]]:
    """Metrics and state of all layers of a stage, in `calls` calls or the visits of a loop."""
    calls = calls or stack.visits
    metrics = over_kinds(
        [result.metrics for result in results],
        [result.real for result in results],
        counts=[stack.count(kind) / calls for kind in range(stack.kinds)],
        copies=copies,
    )
    return metrics, [leaf for result in results for leaf in result.state]
