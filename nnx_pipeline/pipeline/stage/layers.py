"""Applies the layers of one stage, one after the other."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.ops.dropout import fold_in
from nnx_pipeline.pipeline.exchange.buffers import where
from nnx_pipeline.pipeline.metrics import declared
from nnx_pipeline.pipeline.stack import Stack
from nnx_pipeline.pipeline.stage.checks import (
    arrays_of,
    call_explained,
    check_attributes,
    check_unchanged,
    passed_on,
    plain_attributes,
)
from nnx_pipeline.pipeline.stage.split import BatchSplit
from nnx_pipeline.pipeline.stage.state import check_written, without_gradient
from nnx_pipeline.pipeline.stage.variables import is_state, joined, state_of
from nnx_pipeline.remat import LAYER_INPUT, LAYER_METRICS, Remat, named
from nnx_pipeline.sharding import AxisName, Layout, P, gather_weight, is_explicit

Side = dict[str, Any]  # what a layer reads beside x, by the names of its arguments
ApplyLayer = Callable[[PyTree, Any], tuple[PyTree, PyTree]]


AXES_OF_BATCH = Layout().batch  # the mesh axes over which the activations of layers are sharded

# Up to so many layers of a stage are unrolled, and held as arrays of their own.
UNROLLED = 4


@dataclass(frozen=True)
class LayersInTurn:
    """Applies several layers one after the other.

    - `number`: the number of layers.
    - `kinds`: how many kinds of layers take turns.
    - `remat`: what to keep of each layer for the backward pass.
    - `in_ticks`: whether a tick of a loop applies them, which has a checkpoint of its own.
    """

    number: int
    kinds: int
    remat: Remat
    in_ticks: bool

    @property
    def apart(self) -> bool:
        """Whether the layers are held apart and unrolled, instead of stacked and scanned.

        A tick unrolls a few layers; one alone is read from its stack. A scan would slice the
        weights of each out of the stack, and put its gradient into a stack of the visit, which
        stands beside the accumulators until the visit is over. Of layers apart each gradient is
        added as soon as it is complete. The cost is that compile time grows with the number of
        layers. For `mixtral-small` on a TPU v5p (libtpu
        0.0.42.1) with 2 layers per stage, scanned and apart: temp 354 and 258 MB, 23.3 and 20.5 ms
        of compute.

        Any number is unrolled if each is of a kind of its own, and if some of what the layers
        compute is offloaded, because no compiler sends a value from a loop inside another loop to
        the host.
        """
        few = self.number <= UNROLLED or bool(self.remat.offloaded) or self.number == self.kinds
        return self.in_ticks and self.number > 1 and few

    def __call__(
        self, apply: ApplyLayer, layers: Sequence[Any], x: PyTree
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Applies all layers to x; returns the result, and the metrics of each.

        The metrics are a tuple with an entry `[layers of the kind, …]` for each kind.

        - `apply`: (x, layer) to (x, metrics).
        - `layers`: all of them if they are held `apart`, else the stack of each kind, `[layers of
          the kind, …]`.
        """

        def of_named(apply: ApplyLayer) -> ApplyLayer:
            return lambda x, layer: apply(
                jax.tree.map(lambda leaf: named(leaf, LAYER_INPUT), x), layer
            )

        def body(x: PyTree, layer: Any) -> tuple[PyTree, PyTree]:
            x, metrics = apply(x, layer)
            return x, jax.tree.map(lambda leaf: named(leaf, LAYER_METRICS), metrics)

        def one_of_each_kind(x: PyTree, layers: Any) -> tuple[PyTree, PyTree]:
            found = []
            for layer in layers:
                x, metrics = body(x, layer)
                found.append(metrics)
            return x, tuple(found)

        if self.in_ticks and self.number == 1:  # it has the checkpoint of the tick
            apply = of_named(apply)
            x, found = one_of_each_kind(x, jax.tree.map(lambda leaf: leaf[0], layers))
            return x, jax.tree.map(lambda leaf: leaf[None], found)
        # A scan over one layer is no loop to a compiler, which would merge what is computed again.
        in_scan = not self.apart and self.number > 1
        # A checkpoint decides over the names within it: that of a tick over the inputs of all its
        # layers, else that of a layer over its own.
        if self.in_ticks:
            apply = of_named(self.remat.checkpoint(apply, in_scan=in_scan))
        else:
            apply = self.remat.checkpoint(of_named(apply), in_scan=in_scan)
        if not self.apart:
            return jax.lax.scan(one_of_each_kind, x, layers)
        found = []
        for layer in layers:
            x, metrics = body(*gradients_in_turn(x, layer))
            found.append(metrics)
        of_kinds = [found[kind :: self.kinds] for kind in range(self.kinds)]
        return x, tuple(map(_stacked, of_kinds))


def _stacked(trees: Sequence[PyTree]) -> PyTree:
    """Trees of the same kind of layer as one.

    The functions in them, as of a `MicrobatchMean`, may be made anew at each call, and those of the
    first are taken, as a scan does.
    """
    leaves = zip(*map(jax.tree.leaves, trees), strict=True)
    return jax.tree.unflatten(jax.tree.structure(trees[0]), [jnp.stack(each) for each in leaves])


@jax.custom_jvp
def gradients_in_turn(x: PyTree, layer: PyTree) -> tuple[PyTree, PyTree]:
    """Returns its arguments, and makes the backward pass wait for the gradient of `layer`.

    The layers before it get their cotangent only when that gradient is complete. A compiler may
    otherwise put off the gradients of all layers, and hold everything that they are made of: with 4
    layers of a dense MLP per stage, the temp on a TPU v5p (libtpu 0.0.42.1) is 317 MB with it and
    467 without, for 2 % more compute.
    """
    return x, layer


def _in_turn_tangents(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    """A barrier over the tangents, whose transpose is one over the cotangents."""
    leaves, tree = jax.tree.flatten(tangents, is_leaf=_is_zero_tangent)
    there = [at for at, leaf in enumerate(leaves) if not _is_zero_tangent(leaf)]
    barred = jax.lax.optimization_barrier([leaves[at] for at in there])
    for at, leaf in zip(there, barred, strict=True):
        leaves[at] = leaf
    return primals, jax.tree.unflatten(tree, leaves)


def _is_zero_tangent(leaf: Any) -> bool:
    return isinstance(leaf, jax.custom_derivatives.SymbolicZero)


gradients_in_turn.defjvp(_in_turn_tangents, symbolic_zeros=True)


class LayerPlace(NamedTuple):
    """Where a layer is in its model, for layers that depend on it; int32 scalars from 0.

    The numbers are traced: choose by them with `jnp.where` or `jax.lax.select`, not with `if`.
    """

    layer: Array  # among all layers of the model
    stage: Array  # 0 on a mesh without stages
    repeat: Array

    @classmethod
    def of(cls, layer: Array, stack: Stack) -> "LayerPlace":
        """The place of a layer by its number.

        - `layer`: its number, an int32 scalar. Padding is told that it is the last layer of its
          kind: of a number that the model does not have, a layer may make what is infinite, as by
          1 / (layers - number), and then even a discarded result makes a gradient NaN.
        - `stack`: which layer is where.
        """
        each, stages = stack.per_stage, stack.stages
        real = layer
        if stack.padding:
            beyond = jnp.maximum(layer - (stack.layers - 1), 0)
            real = jnp.maximum(layer - -(-beyond // stack.kinds) * stack.kinds, 0)
        return cls(real, layer // each % stages, layer // (each * stages))


def gathered_for_use(layer: Any) -> Any:
    """The layer with weights whole along the mesh axes that shard the batch, in explicit mode.

    It is for layers that know nothing of the mesh and whose weights are sharded by Flax's metadata.
    Types would not let them multiply activations and weights that are sharded over the same mesh
    axis. In auto mode the compiler gathers such weights. Other layers gather their own.
    """
    if not is_explicit() or not isinstance(layer, nnx.Module):
        return layer

    def one(variable: nnx.Variable) -> nnx.Variable:
        if not variable.get_metadata().get("gather_at_use"):
            return variable
        spec = jax.typeof(variable.get_value()).sharding.spec
        used = P(*(_without(entry, AXES_OF_BATCH) for entry in spec))
        return variable.replace(gather_weight(variable.get_value(), spec, used))

    return jax.tree.map(one, layer, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _without(entry: AxisName, axes: tuple[str, ...]) -> AxisName:
    if not isinstance(entry, tuple):
        return None if entry in axes else entry
    return tuple(name for name in entry if name not in axes) or None


def takes_place(layer: Any) -> bool:
    """Whether a layer's call has an argument `place`; one that wraps another says so itself."""
    said = getattr(layer, "takes_place", None)
    return _takes(layer, "place") if said is None else said


def _takes(layer: Any, name: str) -> bool:
    return name in inspect.signature(layer).parameters


def call_layer(
    numbered: tuple[Any, Array, list[Array]],
    x: PyTree,
    side: Side,
    *,
    stack: Stack,
    microbatches: int = 1,
    split: BatchSplit | None = None,
) -> tuple[PyTree, tuple[PyTree, Array | None, list[Array]]]:
    """Applies one layer; returns its activations, and its prepared metrics beside two more.

    These are whether it is not padding, a bool scalar or None without padding, and its state.

    - `numbered`: the layer as `split_state` gives it, its number in the model, and its state. The
      layer's keys for dropout are made from those of the batch and this number, and so is its
      `place`, if it takes one.
    - `x`: `[batch, …]`, or a pytree of such arrays.
    - `side`: what the layer reads besides x, `[batch, …]` each; `keys` are those for dropout.
    - `stack`: which layer is where.
    - `microbatches`: how many microbatches x holds.
    - `split`: how the batch is cut into parts; None computes it at once.

    A layer that is padding leaves activations and state as they are; its metrics mean nothing.
    """
    layer, number, state = numbered
    keys = side.get("keys")
    own: dict[str, Any] = {} if keys is None else {"keys": fold_in(keys, number)}
    if takes_place(layer):
        own["place"] = LayerPlace.of(number, stack)
    layer, everything = gathered_for_use(joined(layer, without_gradient(state))), {**side, **own}
    rule = f"a layer, {type(layer).__name__}, is called with x and {[*everything] or 'no more'}"
    if keys is None and _takes(layer, "keys"):
        rule += " (it gets `keys` where the pipeline is called with a key: key=jax.random.key(0))"
    before, attributes = arrays_of(layer, is_state), plain_attributes(layer)
    with call_explained(layer, (x,), everything, rule):
        result = layer(x, **everything) if split is None else split(layer, x, **everything)
    check_unchanged(before, layer, lambda layer: layer(x, **everything), is_state)
    check_attributes(attributes, layer)
    y, metrics = passed_on(result, x, f"a layer, {type(layer).__name__},", "layer")
    written = without_gradient(state_of(layer, state))
    check_written(state, written)
    real = None
    if stack.padding:
        real = number < stack.layers
        y, written = where(real, (y, written), (x, state))
    return y, (declared(metrics, microbatches=microbatches), real, written)
