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


@dataclass(frozen=True)
class LayersInTurn:
    """Applies a stack of layers one after the other, by a scan if there are several.

    - `number`: the number of layers.
    - `remat`: what to keep of each layer for the backward pass.
    - `in_ticks`: whether a tick of a loop applies them, which has a checkpoint of its own.
    """

    number: int
    remat: Remat
    in_ticks: bool

    def __call__(self, apply: ApplyLayer, stack: Any, x: Array) -> tuple[Array, PyTree]:
        """Applies all layers to x; returns the result, and the metrics of each, `[layers, …]`.

        - `apply`: (x, layer) to (x, metrics).
        - `stack`: the layers, `[layers, …]`.
        """
        if not self._alone:  # a single layer in a tick has the checkpoint of the tick
            apply = self.remat.checkpoint(apply, in_scan=not self._unrolled)

        def body(x: Array, layer: Any) -> tuple[Array, PyTree]:
            x, metrics = apply(named(x, LAYER_INPUT), layer)
            return x, jax.tree.map(lambda leaf: named(leaf, LAYER_METRICS), metrics)

        if not self._unrolled:
            return jax.lax.scan(body, x, stack)
        found = []
        for index in range(self.number):
            x, metrics = body(x, jax.tree.map(lambda leaf, at=index: leaf[at], stack))
            found.append(metrics)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    @property
    def _alone(self) -> bool:
        return self.in_ticks and self.number == 1

    @property
    def _unrolled(self) -> bool:
        """Whether the layers are unrolled instead of scanned.

        A single layer in a tick needs no scan. Several are unrolled if some of what they compute is
        offloaded, because no compiler sends a value from a loop inside another loop to the host.
        """
        return self._alone or (self.in_ticks and bool(self.remat.offloaded))


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
