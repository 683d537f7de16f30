"""The three kinds of variables of a layer: parameters, state that visits write, and the rest.

The rest is read alone, such as a table or a weight that is not trained; the loops treat it as a
parameter without a gradient.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError, one_of
from nnx_pipeline.pipeline.stage.state import PerMicrobatch, WithState
from nnx_pipeline.sharding._gradients import no_gradient_to
from nnx_pipeline.sharding.layout import Variable, is_explicit, is_variable, place


class LayerState(nnx.Variable[Array]):
    """State of a layer: a call may set it, and the layer's next call reads what it set.

    In a pipeline the next call is that for the next microbatch. Subclass it for a kind of state of
    your own. Flax's running statistics and counters of random numbers are state too, and so are
    caches, of which each microbatch has its own.
    """


STATE = (nnx.BatchStat, nnx.Cache, nnx.RngCount, LayerState)
OVER_MICROBATCHES = "over_microbatches"  # the metadata of state: "mean", or "last" as without it
_STORED = "stored"  # the metadata of a variable that is read alone: the dtype of its array


def is_state(leaf: object) -> bool:
    return isinstance(leaf, STATE)


def is_per_microbatch(leaf: object) -> bool:
    return isinstance(leaf, nnx.Cache)


def is_averaged(variable: Variable) -> bool:
    """Whether all microbatches read what was before the first, and the mean of theirs is left."""
    said = variable.get_metadata().get(OVER_MICROBATCHES, "last")
    one_of(OVER_MICROBATCHES, said, ("last", "mean"))
    kind = variable.get_value().dtype
    if said == "mean" and not jnp.issubdtype(kind, jnp.floating):
        raise InputError(
            f"a variable of type {type(variable).__name__} has {OVER_MICROBATCHES}='mean' and "
            f"holds {kind}, which has no mean; leave it at 'last'"
        )
    return bool(said == "mean")


def split_state(layers: PyTree, microbatches: int) -> PyTree:
    """Layers as the loops read them: `WithState` where they have state, else the layers alone.

    A variable that is read alone holds the bits of its array as integers, so that a loop makes no
    gradient for it. The state is a list of arrays in the order of its variables; that of a cache,
    and what is averaged over microbatches, is `PerMicrobatch`, `[repeats, stages, microbatches,
    layers per stage, …]`.
    """
    if _only_params(layers):
        return layers

    def stripped(variable: PyTree) -> PyTree:
        if not is_variable(variable) or isinstance(variable, nnx.Param):
            return variable
        return variable.replace(None) if is_state(variable) else _as_bits(variable)

    def value(variable: Variable) -> Array | PerMicrobatch:
        stored = variable.get_value()
        if is_per_microbatch(variable):
            return PerMicrobatch(jnp.moveaxis(stored, 3, 2))
        if is_averaged(variable):
            return PerMicrobatch(jnp.repeat(stored[:, :, None], microbatches, axis=2))
        return stored

    state = list(map(value, _states(layers)))
    without = jax.tree.map(stripped, layers, is_leaf=is_variable)
    return WithState(without, state) if state else without


def join_state(layers: PyTree, state: Sequence[Array | None]) -> PyTree:
    """The inverse of `split_state`, for a stack or one layer; None leaves a state empty."""
    if _only_params(layers):
        return layers
    values = iter(state)

    def restored(variable: PyTree) -> PyTree:
        if is_state(variable):
            return variable.replace(next(values))
        return _from_bits(variable) if is_variable(variable) else variable

    return jax.tree.map(restored, layers, is_leaf=is_variable)


def state_of_kinds(kinds: Sequence[PyTree], state: list[Array] | None) -> list[list[Array]]:
    values = iter(state or [])
    return [list(itertools.islice(values, len(_states(layer)))) for layer in kinds]


def state_after(layer: PyTree, before: list[Array]) -> list[Array]:
    after = [variable.get_value() for variable in _states(layer)]
    if not is_explicit() or len(after) != len(before):
        return after
    return [
        place(new, jax.typeof(old).sharding.spec) if jnp.shape(new) == jnp.shape(old) else new
        for new, old in zip(after, before, strict=True)
    ]


def write_state(layers: PyTree, state: Sequence[Array | PerMicrobatch]) -> None:
    for variable, value in zip(_states(layers), state, strict=True):
        if isinstance(value, PerMicrobatch):
            cache, stored = is_per_microbatch(variable), value.value
            value = jnp.moveaxis(stored, 2, 3) if cache else jnp.mean(stored, axis=2)
        variable.set_value(value)


def _states(tree: PyTree) -> list[Variable]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_variable) if is_state(leaf)]


def _only_params(tree: PyTree) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=is_variable)
    return all(isinstance(leaf, nnx.Param) for leaf in leaves if is_variable(leaf))


def _as_bits(variable: Variable) -> Variable:
    value = variable.get_value()
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        stored = variable.replace(jax.random.key_data(value))
        stored.set_metadata(_STORED, jax.random.key_impl(value))
        return stored
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return variable
    value = no_gradient_to(
        f"a gradient was asked for with respect to a variable of type {type(variable).__name__}, "
        "which a pipeline only reads; make it an nnx.Param, or differentiate the parameters alone "
        "(nnx.grad does)",
        value,
    )
    bits = jnp.dtype(f"int{jnp.finfo(value.dtype).bits}")
    stored = variable.replace(jax.lax.bitcast_convert_type(value, bits))
    stored.set_metadata(_STORED, value.dtype)
    return stored


def _from_bits(variable: Variable) -> Variable:
    stored, value = variable.get_metadata().get(_STORED), variable.get_value()
    if stored is None:
        return variable
    if isinstance(stored, jnp.dtype):
        return variable.replace(jax.lax.bitcast_convert_type(value, stored))
    return variable.replace(jax.random.wrap_key_data(value, impl=stored))
