"""What comes before the first stage and after the last one, and its derivatives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.one_f_one_b._state import WithCaptured
from nnx_pipeline.pipeline.stage._vjp import add, none_for_integers, zero_gradients


class EndTotals(NamedTuple):
    """What adds up in `enter` and `leave`; gradients are None where only the loss is asked for."""

    loss: Array
    enter: PyTree
    leave: PyTree
    d_output: PyTree  # the cotangent of the last output that left


@dataclass(frozen=True)
class FirstAndLast:
    """The functions before and after the stages of a model.

    - `functions`: `enter` and `leave`, each with what it closes over as a first argument.
    - `weights`: of `enter` and of `leave`.
    - `inputs`: of `enter` and of `leave`, `[microbatches, …]`.
    - `differentiate`: whether gradients are computed.
    """

    functions: tuple[Callable[..., PyTree], Callable[..., Array]]
    weights: tuple[WithCaptured, WithCaptured]
    inputs: tuple[PyTree, PyTree]
    differentiate: bool

    def start(self, dtype: DTypeLike | None) -> EndTotals:
        """The totals before the first tick.

        - `dtype`: in which gradients add up, None for that of the weights.
        """
        loss = jnp.zeros((), jnp.float32)
        if not self.differentiate:
            return EndTotals(loss, None, None, None)
        enter, leave = zero_gradients(self.weights, self.weights, dtype)
        x = jax.eval_shape(self.enter, jnp.int32(0))
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), x)
        return EndTotals(loss, enter, leave, nothing)

    def enter(self, microbatch: ArrayLike) -> PyTree:
        """The activations of a microbatch."""
        return self._enter(self.weights[0], microbatch)

    def leave(self, totals: EndTotals, microbatch: ArrayLike, y: PyTree) -> EndTotals:
        """Adds the loss of a microbatch, and its gradients.

        - `y`: the output of the last stage.
        """
        inputs = row_at(self.inputs[1], microbatch)

        def loss_of(end: WithCaptured, y: PyTree) -> Array:
            return self.functions[1](end.captured, end.weights, y, inputs)

        if not self.differentiate:
            return totals._replace(loss=totals.loss + loss_of(self.weights[1], y))
        loss, back = jax.vjp(loss_of, self.weights[1], y)
        d_end, d_y = back(jnp.ones_like(loss))
        return totals._replace(
            loss=totals.loss + loss,
            leave=add(totals.leave, none_for_integers(d_end)),
            d_output=d_y,
        )

    def back(self, totals: EndTotals, microbatch: ArrayLike, d_x: PyTree) -> EndTotals:
        """Adds the gradient of `enter` for a microbatch.

        - `d_x`: the cotangent of its activations.
        """
        _, back = jax.vjp(lambda end: self._enter(end, microbatch), self.weights[0])
        (d_end,) = back(d_x)
        return totals._replace(enter=add(totals.enter, none_for_integers(d_end)))

    def _enter(self, end: WithCaptured, microbatch: ArrayLike) -> PyTree:
        return self.functions[0](end.captured, end.weights, row_at(self.inputs[0], microbatch))


def row_at(tree: PyTree, index: ArrayLike) -> PyTree:
    """Entry `index` of the first axis of each array."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree
    )
