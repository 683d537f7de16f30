"""Creates the stacked layers of a pipeline, and assembles their side inputs."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline.stage.checks import check_no_sharing
from nnx_pipeline.sharding import Layout, place, portable_key

MakeLayer = Callable[[nnx.Rngs], nnx.Module]


def make_layers(
    make_layer: MakeLayer, stack: tuple[int, int, int], *, rngs: nnx.Rngs, layout: Layout
) -> Any:
    """One module that holds all layers: each parameter is `[repeats, stages, layers, …]`.

    - `make_layer`: makes one layer from random streams.
    - `stack`: the sizes of the first three axes: (repeats, stages, layers per stage).
    - `rngs`: whose `params` stream gives each layer a key of its own, which does not depend on the
      mesh.
    - `layout`: where the parameters are created.

    Raises InputError when a layer holds a variable that is not a parameter, or holds one variable
    in two places.
    """
    repeats, stages, layers = stack
    keys = jax.random.split(portable_key(rngs.params()), repeats * stages * layers).reshape(stack)
    # With the keys sharded over the stages, each stage computes the values of its own layers.
    keys = place(keys, layout.spec(None, "stage", None))

    def make(key: Array) -> nnx.Module:
        # A default stream, so that a layer can make a variable that is not a parameter: the check
        # below then refuses it by the name of its type.
        layer = make_layer(nnx.Rngs(jax.random.fold_in(key, 0), params=key))
        check_no_sharing(layer)
        return layer

    stage = "stage" if stages > 1 else None
    # From outside to inside: over repeats, over stages and over the layers of a stage.
    made = jax.vmap(jax.vmap(jax.vmap(make), spmd_axis_name=stage))(keys)
    return jax.tree.map(
        lambda variable: _stacked(variable, layout),
        made,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )


def with_keys(side: dict[str, Array | None], keys: Array | None) -> dict[str, Array | None]:
    """The side inputs of a layer, with the keys for dropout added as `keys`.

    - `side`: what a layer reads beside the activations, by the names of its arguments.
    - `keys`: `[batch, words]`, one row per sequence (`ops.dropout`); None adds nothing.

    Raises InputError for a side input named `key` or `keys`, which are the names for dropout.
    """
    for name in ("key", "keys"):
        if name in side:
            raise InputError(
                f"a side input is called {name!r}, a name that a pipeline reserves for the key of "
                "dropout; give it another name, or for dropout give the pipeline a key"
            )
    return side if keys is None else {**side, "keys": keys}


def _stacked(variable: nnx.Variable, layout: Layout) -> nnx.Variable:
    """The parameter, its logical axes preceded by those of the stack."""
    if not isinstance(variable, nnx.Param):
        raise InputError(
            f"a layer holds a variable of type {type(variable).__name__}; in a pipeline it may "
            "hold parameters (nnx.Param) only, as its state would be lost between microbatches; "
            "for random numbers call the pipeline with a key"
        )
    value = variable.get_value()
    own = variable.get_metadata().get("logical_axes", (None,) * (value.ndim - 3))
    return layout.variable(value, (None, "stage", None, *own))
