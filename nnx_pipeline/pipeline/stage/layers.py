"""Applies the layers of one stage, one after the other."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.config._remat import LAYER_INPUT, LAYER_METRICS, Remat, named, of_group
from nnx_pipeline.lab.errors import is_divisor
from nnx_pipeline.pipeline._exchange import where
from nnx_pipeline.pipeline._stack import Stack
from nnx_pipeline.pipeline.metrics import declared, over_kinds
from nnx_pipeline.pipeline.stage import _checks as checks
from nnx_pipeline.pipeline.stage._split import BatchSplit
from nnx_pipeline.pipeline.stage._sums import Carried, WithSums, adding, placed
from nnx_pipeline.pipeline.stage.apply import AtDepth
from nnx_pipeline.pipeline.stage.state import check_written, without_gradient
from nnx_pipeline.pipeline.stage.variables import is_state, join_state, state_after, state_of_kinds
from nnx_pipeline.sharding._cast import reading_slices
from nnx_pipeline.sharding.dropout import fold_in
from nnx_pipeline.sharding.layout import (
    AxisName,
    Layout,
    P,
    Variable,
    gather_weight,
    is_explicit,
    is_variable,
    place,
    with_layout,
)

Side = dict[str, PyTree]  # what a layer reads besides x, by the names of its arguments
ApplyLayer = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


AXES_OF_BATCH = Layout().batch  # the mesh axes over which the activations of layers are sharded


@dataclass(frozen=True)
class LayerSequence:
    """Applies `number` layers of `kinds` kinds, in a tick within the checkpoint of the tick.

    - `groups`: of layers whose named values are told apart; a layer of each in turn.
    """

    number: int
    kinds: int
    remat: Remat
    in_ticks: bool
    most_unrolled: int
    groups: int = 1

    def __post_init__(self) -> None:
        of_kind = self.number // self.kinds
        rule = f"pipeline.remat_groups={self.groups} does not divide {of_kind} layers of a stage"
        is_divisor(self.groups, of_kind, rule=rule)

    @property
    def unrolled(self) -> bool:
        """Whether the layers are separate arrays and unrolled, instead of stacked and scanned."""
        # A tick unrolls a few layers; one alone is read from its stack. A scan slices the weights
        # of each out of the stack, and reads and writes its accumulators there. For `mixtral-small`
        # with 8 layers per stage on a TPU v5p (libtpu 0.0.42.1), scanned and apart: heap 425 and
        # 572 MB, 88.4 and 76.3 ms of compute, 85 and 151 s to compile on a shared core. Any number
        # is unrolled if each is of a kind of its own, and if some of what the layers compute is
        # offloaded, because no compiler sends a value from a loop inside another loop to the host.
        offloads, of_kinds = bool(self.remat.offloaded), self.number == self.kinds
        few = self.number <= self.most_unrolled or offloads or of_kinds
        return self.in_ticks and self.number > 1 and few

    def __call__(
        self, apply: ApplyLayer, layers: Sequence[PyTree], x: PyTree
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Applies all layers, if `unrolled`, or the stack of each kind; metrics by kind."""
        # A checkpoint decides over the names within it: a tick's checkpoint over the inputs of all
        # its layers, else a layer's over its own.
        call = apply if self.in_ticks else lambda x, layer: apply(_named(x, LAYER_INPUT), layer)
        if self.in_ticks and self.number == 1:  # it has the checkpoint of the tick
            x, results = self._each_kind(call, x, jax.tree.map(lambda leaf: leaf[0], layers))
            return x, jax.tree.map(lambda leaf: leaf[None], results)
        if not self.unrolled:
            return self._scan(call, layers, x)
        calls = self._checkpointed(call)
        each = []
        for number, layer in enumerate(layers):
            x, layer = await_gradient(x, layer)
            of_layer = calls[number // self.kinds % self.groups]
            x, metrics = of_layer(_named(x, LAYER_INPUT), layer)
            each.append(_named(metrics, LAYER_METRICS))
        of_kinds = [each[kind :: self.kinds] for kind in range(self.kinds)]
        return x, tuple(map(_stacked, of_kinds))

    def _checkpointed(self, call: ApplyLayer, *, in_scan: bool = False) -> list[ApplyLayer]:
        """The function of a layer of each group."""
        if self.groups == 1:
            return [self.remat.checkpoint(call, in_scan=in_scan)]
        numbers = range(1, self.groups + 1)
        return [self.remat.checkpoint(of_group(call, at), in_scan=in_scan) for at in numbers]

    def _each_kind(
        self, call: ApplyLayer, x: PyTree, layers: Sequence[PyTree]
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """A layer of each kind, one after the other."""
        results = []
        for layer in layers:
            x, metrics = call(_named(x, LAYER_INPUT) if self.in_ticks else x, layer)
            results.append(_named(metrics, LAYER_METRICS))
        return x, tuple(results)

    def _scan(
        self, call: ApplyLayer, layers: Sequence[PyTree], x: PyTree
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        # A scan over one layer is no loop to a compiler, which would merge what is computed again.
        # The whole batch goes through the layers of all repeats in one scan.
        in_scan = jax.tree.leaves(layers)[0].shape[0] > 1
        calls = self._checkpointed(call, in_scan=in_scan)

        def each_group(x: PyTree, layers: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
            results = []
            for group, of_layer in enumerate(calls):
                at_group = jax.tree.map(lambda leaf, group=group: leaf[group], layers)
                x, result = self._each_kind(of_layer, x, at_group)
                results.append(result)
            return x, _stacked(results)

        with reading_slices(once=not self.in_ticks) if in_scan else contextlib.nullcontext():
            if len(calls) == 1:
                return jax.lax.scan(functools.partial(self._each_kind, calls[0]), x, layers)
            by_group = jax.tree.map(
                lambda leaf: leaf.reshape(-1, self.groups, *leaf.shape[1:]), layers
            )
            x, results = jax.lax.scan(each_group, x, by_group)
            return x, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)


def _named(tree: PyTree, name: str) -> PyTree:
    if isinstance(tree, Carried):
        return Carried(_named(tree.x, name), tree.sums)
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
        if not stack.padding:
            visit = layer // stack.per_stage
            return cls(layer, visit % stack.stages, visit // stack.stages)
        # Padding is told that it is the last layer of its kind: of a number that the model does not
        # have, a layer may make what is infinite, as by 1 / (layers - number), and then even a
        # discarded result makes a gradient NaN.
        place = layer - stack.first_padding
        kinds, last = stack.kinds, stack.layers - 1
        own = jnp.maximum(last - (last - place) % kinds, 0)
        visit = jnp.sum(layer >= jnp.asarray(stack.starts[1:], jnp.int32), dtype=jnp.int32)
        is_real = layer < stack.layers
        visit = jnp.where(is_real, visit, place // stack.per_stage)
        return cls(jnp.where(is_real, layer, own), visit % stack.stages, visit // stack.stages)


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
    runs: Array | None = None  # bool: whether some stage has a layer in this place; None if so


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
    layer, number, state, _ = numbered
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


def where_needed(apply: ApplyLayer) -> ApplyLayer:
    """The function of one layer, which leaves it out where it does not run."""

    def run_or_not(x: PyTree, numbered: NumberedLayer) -> tuple[PyTree, LayerResult]:
        if numbered.runs is None:
            return apply(x, numbered)
        # Every stage makes the same choice, so that none waits for another. The results go through
        # the condition as leaves: the functions in metrics may be made anew at each call.
        y_and_result = jax.eval_shape(apply, x, numbered)

        def leave_out(x: PyTree, numbered: NumberedLayer) -> list[Array]:
            nothing = jax.tree.map(_zeros, y_and_result[1])
            return jax.tree.leaves((x, nothing._replace(state=numbered.state)))

        def run(x: PyTree, numbered: NumberedLayer) -> list[Array]:
            return jax.tree.leaves(apply(x, numbered))

        leaves = jax.lax.cond(numbered.runs, run, leave_out, x, numbered)
        y, result = jax.tree.unflatten(jax.tree.structure(y_and_result), leaves)
        return y, result

    return run_or_not


def _zeros(like: jax.ShapeDtypeStruct) -> Array:
    zeros = jnp.zeros(like.shape, like.dtype)
    return place(zeros, like.sharding.spec) if is_explicit() else zeros


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
        side, depth = side if isinstance(side, AtDepth) else (side, None)
        # With accumulators of the gradients of its weights, it returns these last.
        with_sums, stack = stack, getattr(stack, "weights", stack)
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
        adds = isinstance(with_sums, WithSums)
        x = Carried(x, with_sums.of_kinds()) if adds else x

        def with_side(side: Side) -> ApplyLayer:
            apply: ApplyLayer = functools.partial(call, side={**side, **self.shared})
            apply = apply if depth is None else where_needed(apply)
            return adding(apply, with_sums.repeat) if adds else apply

        def one_copy(layers: PyTree, x: PyTree, side: Side) -> tuple[PyTree, tuple[PyTree, ...]]:
            layers = self._at_depth(layers, depth)
            return self.sequence(with_side(side), placed(layers) if adds else layers, x)

        copies = self.layout.axes("copy")
        if copies:
            x, results = jax.vmap(one_copy, spmd_axis_name=copies)(layers, x, side)
        else:
            layers = self._at_depth(layers, depth)
            x, results = self.sequence(with_side(side), placed(layers) if adds else layers, x)
        metrics, written = of_all_kinds(results, self.stack, copies=0 if copies else None)
        more = [] if state is None else [written]
        if adds:
            return (x.x, metrics, *more, with_sums.replaced(x.sums))
        return (x, metrics, *more)

    def _at_depth(
        self, layers: tuple[NumberedLayer, ...], depth: Array | None
    ) -> tuple[NumberedLayer, ...]:
        """The layers, which run only in places below `depth`."""
        if depth is None:
            return layers
        kinds = self.stack.kinds
        if not self.sequence.unrolled:
            return tuple(
                layer._replace(runs=jnp.arange(kind, self.stack.per_stage, kinds) < depth)
                for kind, layer in enumerate(layers)
            )
        always = min(self.stack.depths)
        return tuple(
            layer if at < always else layer._replace(runs=at < depth)
            for at, layer in enumerate(layers)
        )


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
