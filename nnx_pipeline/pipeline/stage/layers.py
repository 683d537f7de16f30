"""Applies the layers of one stage, one after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.ops.dropout import fold_in
from nnx_pipeline.pipeline.metrics import declared
from nnx_pipeline.pipeline.stage.checks import unchanged
from nnx_pipeline.remat import LAYER_INPUT, LAYER_METRICS, Remat, named

Side = dict[str, Array | None]  # what a layer reads beside x, by the names of its arguments
ApplyLayer = Callable[[Array, Any], tuple[Array, PyTree]]


# Up to so many layers of a stage are unrolled, and held as arrays of their own.
UNROLLED = 4


@dataclass(frozen=True)
class LayersInTurn:
    """Applies several layers one after the other.

    - `number`: the number of layers.
    - `remat`: what to keep of each layer for the backward pass.
    - `in_ticks`: whether a tick of a loop applies them, which has a checkpoint of its own.
    """

    number: int
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

        Any number is unrolled if some of what the layers compute is offloaded, because no compiler
        sends a value from a loop inside another loop to the host.
        """
        few = self.number <= UNROLLED or bool(self.remat.offloaded)
        return self.in_ticks and self.number > 1 and few

    def __call__(self, apply: ApplyLayer, layers: Any, x: Array) -> tuple[Array, PyTree]:
        """Applies all layers to x; returns the result, and the metrics of each, `[layers, …]`.

        - `apply`: (x, layer) to (x, metrics).
        - `layers`: a list of the layers if they are held `apart`, else their stack `[layers, …]`.
        """

        def body(x: Array, layer: Any) -> tuple[Array, PyTree]:
            x, metrics = apply(named(x, LAYER_INPUT), layer)
            return x, jax.tree.map(lambda leaf: named(leaf, LAYER_METRICS), metrics)

        if self.in_ticks and self.number == 1:  # it has the checkpoint of the tick
            x, metrics = body(x, jax.tree.map(lambda leaf: leaf[0], layers))
            return x, jax.tree.map(lambda leaf: leaf[None], metrics)
        apply = self.remat.checkpoint(apply, in_scan=not self.apart)
        if not self.apart:
            return jax.lax.scan(body, x, layers)
        found = []
        for layer in layers:
            x, metrics = body(*gradients_in_turn(x, layer))
            found.append(metrics)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)


@jax.custom_vjp
def gradients_in_turn(x: PyTree, layer: PyTree) -> tuple[PyTree, PyTree]:
    """Returns its arguments, and makes the backward pass wait for the gradient of `layer`.

    The layers before it get their cotangent only when that gradient is complete. A compiler may
    otherwise put off the gradients of all layers, and hold everything that they are made of: with 4
    layers of a dense MLP per stage, the temp on a TPU v5p (libtpu 0.0.42.1) is 317 MB with it and
    467 without, for 2 % more compute.
    """
    return x, layer


def _in_turn_forward(x: PyTree, layer: PyTree) -> tuple[tuple[PyTree, PyTree], None]:
    return (x, layer), None


def _in_turn_backward(_: None, cotangents: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    leaves, tree = jax.tree.flatten(cotangents)
    floats = [at for at, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    barred = jax.lax.optimization_barrier([leaves[at] for at in floats])
    for at, leaf in zip(floats, barred, strict=True):
        leaves[at] = leaf
    return jax.tree.unflatten(tree, leaves)


gradients_in_turn.defvjp(_in_turn_forward, _in_turn_backward)


def call_layer(
    numbered: tuple[Any, Array], x: Array, side: Side, *, microbatches: int = 1
) -> tuple[Array, PyTree]:
    """Applies one layer; returns its activations, and its metrics as `declared` prepares them.

    - `numbered`: the layer, and its number in the model. The layer's keys for dropout are made from
      those of the batch and this number.
    - `x`: `[batch, …]`.
    - `side`: what the layer reads besides x, `[batch, …]` each; `keys` are those for dropout.
    - `microbatches`: how many microbatches x holds.
    """
    layer, number = numbered
    keys = side.get("keys")
    own = {} if keys is None else {"keys": fold_in(keys, number)}
    with unchanged(layer):
        y, metrics = layer(x, **{**side, **own})
    return y, declared(metrics, microbatches=microbatches)
