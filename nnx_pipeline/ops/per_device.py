"""Functions of what one device holds, inside layers that are mapped over stages and copies.

A kernel that no compiler can shard runs under a `shard_map` over the whole mesh. The layers around
it are mapped by `jax.vmap` over stages, and over copies of the weights, which leaves two things to
do: the mesh axes of these maps have to be among those of the `shard_map`, and the kernel must not
see an axis of length 1 in front of its arguments, because few kernels can be mapped themselves.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from nnx_pipeline.errors import InputError
from nnx_pipeline.sharding import P, is_explicit, mesh_sizes, place

Arrays = tuple[Array, ...]


def per_device(
    function: Callable[..., Arrays], in_specs: Sequence[P], out_specs: Sequence[P], *, refusal: str
) -> Callable[..., Arrays]:
    """A function of whole arrays that calls `function` on each device with its own shards.

    - `function`: of the shards of one device; it may use collectives over all axes of the mesh. It
      returns a tuple.
    - `in_specs`, `out_specs`: the sharding of each argument, to which it is moved, and of each
      result. An argument that is not sharded over a mesh axis is the same on all devices along it,
      and a result must be so.

    - `refusal`: the text of the error for a derivative.

    The result may be mapped by `jax.vmap` over an axis that is sharded over a mesh axis which the
    specs do not name. Without a mesh it is `function` itself. It cannot be differentiated: give it
    a derivative of its own, by `jax.custom_vjp`. Second derivatives then raise InputError.
    """

    def call(*args: Array) -> Arrays:
        args = tuple(_undifferentiated(refusal, arg) for arg in args)
        if not mesh_sizes():
            return function(*args)
        args = tuple(map(place, args, in_specs))
        return _sharded(function, tuple(in_specs), tuple(out_specs))(*args)

    return call


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _undifferentiated(refusal: str, x: Array) -> Array:
    del refusal
    return x


@_undifferentiated.defjvp
def _refuse(refusal: str, primals: Any, tangents: Any) -> Any:
    raise InputError(refusal)


def _sharded(
    function: Callable[..., Arrays], in_specs: tuple[P, ...], out_specs: tuple[P, ...]
) -> Callable[..., Arrays]:
    whole = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if not is_explicit():
        # In auto mode the map of a `shard_map` is sharded as `spmd_axis_name` says.
        return whole
    # In explicit mode it gathers the mapped axis (JAX 0.10 and 0.12). The types say how that axis
    # is sharded, so the rule for the map is a `shard_map` that names its mesh axes too.
    mapped = custom_vmap(whole)

    @mapped.def_vmap
    def _rule(size: int, batched: list[bool], *args: Array) -> tuple[Arrays, Any]:
        del size
        over = next(
            jax.typeof(arg).sharding.spec[0] for arg, yes in zip(args, batched, strict=True) if yes
        )
        each = jax.vmap(function, in_axes=[0 if yes else None for yes in batched])
        specs = tuple(
            P(over, *spec) if yes else spec for spec, yes in zip(in_specs, batched, strict=True)
        )
        outs = tuple(P(over, *spec) for spec in out_specs)
        return _sharded(each, specs, outs)(*args), tuple(True for _ in outs)

    return mapped


def one_by_one(function: Callable[..., Array]) -> Callable[..., Array]:
    """The function, which under `jax.vmap` is called for one entry after the other.

    - `function`: of arrays to one array. It sees no axis of a map: where a device holds one entry,
      as of stages, its axis is taken away, and more entries are a loop.
    """
    call = custom_vmap(function)

    @call.def_vmap
    def _rule(size: int, batched: list[bool], *args: Array) -> tuple[Array, bool]:
        def at(entries: tuple[Array, ...]) -> Array:
            own = iter(entries)
            rest = [next(own) if yes else arg for arg, yes in zip(args, batched, strict=True)]
            return call(*rest)

        entries = tuple(arg for arg, yes in zip(args, batched, strict=True) if yes)
        if size == 1:
            return at(tuple(jax.lax.squeeze(entry, (0,)) for entry in entries))[None], True
        return jax.lax.map(at, entries), True

    return call
