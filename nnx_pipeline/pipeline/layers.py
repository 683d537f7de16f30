"""The stacked layers of a pipeline: how they are made, and how one of them is called."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError
from nnx_pipeline.ops.dropout import fold_in
from nnx_pipeline.pipeline.checks import check_no_sharing, unchanged
from nnx_pipeline.pipeline.metrics import declared
from nnx_pipeline.sharding import Layout, place, portable_key

MakeLayer = Callable[[nnx.Rngs], nnx.Module]


def make_layers(
    make_layer: MakeLayer, stack: tuple[int, int, int], *, rngs: nnx.Rngs, layout: Layout
) -> Any:
    """One module with every parameter `[repeats, stages, layers per stage, …]`, born in its place.

    stack: these three numbers. Each layer has a key of its own, whatever the mesh. Raises
    InputError when a layer holds a variable that is not a parameter, or one in two places.
    """
    repeats, stages, layers = stack
    keys = jax.random.split(portable_key(rngs.params()), repeats * stages * layers).reshape(stack)
    keys = place(keys, layout.spec(None, "stage", None))

    def make(key: Array) -> nnx.Module:
        # What is no parameter finds a key too, and is then refused by its name.
        layer = make_layer(nnx.Rngs(jax.random.fold_in(key, 0), params=key))
        check_no_sharing(layer)
        return layer

    stage = "stage" if stages > 1 else None
    made = jax.vmap(jax.vmap(jax.vmap(make), spmd_axis_name=stage))(keys)
    return jax.tree.map(
        lambda variable: _stacked(variable, layout),
        made,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )


def with_keys(side: dict[str, Array | None], keys: Array | None) -> dict[str, Array | None]:
    """What a layer reads beside the activations, with the words for dropout among it.

    keys: `[batch, words]`, one row per sequence (`ops.dropout`), or None. Raises InputError for a
    side input of a name that means dropout.
    """
    for name in ("key", "keys"):
        if name in side:
            raise InputError(
                f"a side input is called {name!r}, which in a pipeline is what dropout draws from; "
                "give it another name, or for dropout give the pipeline a key"
            )
    return side if keys is None else {**side, "keys": keys}


def call_layer(
    numbered: tuple[Any, Array],
    x: Array,
    side: dict[str, Array | None],
    *,
    microbatches: int = 1,
) -> tuple[Array, PyTree]:
    """One layer, with keys of its own if the batch has keys, and its metrics as `declared` has it.

    microbatches: how many are in x.
    """
    layer, number = numbered
    keys = side.get("keys")
    own = {} if keys is None else {"keys": fold_in(keys, number)}
    with unchanged(layer):
        y, metrics = layer(x, **{**side, **own})
    return y, declared(metrics, microbatches=microbatches)


def _stacked(variable: nnx.Variable, layout: Layout) -> nnx.Variable:
    """The parameter with the axes of the stack before its own."""
    if not isinstance(variable, nnx.Param):
        raise InputError(
            f"a layer holds a variable of type {type(variable).__name__}; in a pipeline it may "
            "hold parameters (nnx.Param) only, as its state would be lost between microbatches; "
            "for random numbers call the pipeline with a key"
        )
    value = variable.get_value()
    own = variable.get_metadata().get("logical_axes", (None,) * (value.ndim - 3))
    return layout.variable(value, (None, "stage", None, *own))
