"""Functions of what one device holds, inside layers that are mapped over stages and copies.

A kernel that no compiler can shard runs under a `shard_map` over the whole mesh. The mesh axes of
the maps around it have to be among those of the `shard_map`, and the kernel must not see an axis of
length 1 in front of its arguments, because few kernels can be mapped themselves.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.sharding.layout import P, is_explicit, mesh_sizes, place

OfDevice = TypeVar("OfDevice", bound=PyTree)
_Saved = tuple[tuple[Array, ...], tuple[Array, ...]]  # arguments, and what the derivative keeps


def per_device(
    function: Callable[..., OfDevice],
    in_specs: Sequence[P],
    out_specs: Sequence[P],
    *,
    refusal: str,
) -> Callable[..., OfDevice]:
    """A function of whole arrays that calls `function` on each device with its own shards.

    `function` may use collectives over all axes of the mesh, and returns a tuple. Arguments are
    moved to `in_specs`; a result that is a tuple of arrays has one spec for all of them. The result
    may be mapped by `jax.vmap` over an axis that is sharded over a mesh axis which the specs do not
    name. It cannot be differentiated: give it a derivative of its own, by `jax.custom_vjp`. Second
    derivatives then raise InputError, `refusal`.
    """

    def call(*args: Array) -> OfDevice:
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
def _refuse(refusal: str, primals: PyTree, tangents: PyTree) -> NoReturn:
    raise InputError(refusal)


def _sharded(
    function: Callable[..., OfDevice], in_specs: tuple[P, ...], out_specs: tuple[P, ...]
) -> Callable[..., OfDevice]:
    whole: Callable[..., OfDevice] = jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    if not is_explicit():
        # In auto mode the map of a `shard_map` is sharded as `spmd_axis_name` says.
        return whole
    # In explicit mode it gathers the mapped axis (JAX 0.10 and 0.12). The types say how that axis
    # is sharded, so the rule for the map is a `shard_map` that names its mesh axes too.
    mapped = custom_vmap(whole)

    @mapped.def_vmap
    def _rule(size: int, batched: list[bool], *args: Array) -> tuple[OfDevice, PyTree]:
        del size
        over = next(
            jax.typeof(arg).sharding.spec[0] for arg, yes in zip(args, batched, strict=True) if yes
        )
        each = jax.vmap(function, in_axes=[0 if yes else None for yes in batched])
        specs = tuple(
            P(over, *spec) if yes else spec for spec, yes in zip(in_specs, batched, strict=True)
        )
        outs = tuple(P(over, *spec) for spec in out_specs)
        return _all_mapped(_sharded(each, specs, outs)(*args))

    return mapped


def _all_mapped(results: OfDevice) -> tuple[OfDevice, PyTree]:
    """What the rule of a `custom_vmap` returns if each of its results has the mapped axis."""
    return results, jax.tree.map(lambda _: True, results)


def one_by_one(function: Callable[..., OfDevice]) -> Callable[..., OfDevice]:
    """The function, which under `jax.vmap` is called for one entry after the other."""
    # It sees no axis of a map: where a device holds one entry, as of stages, its axis is taken
    # away, and more entries are a loop.
    call = custom_vmap(function)

    @call.def_vmap
    def _rule(size: int, batched: list[bool], *args: Array) -> tuple[OfDevice, PyTree]:
        def at(entries: tuple[Array, ...]) -> OfDevice:
            values = iter(entries)
            rest = [next(values) if yes else arg for arg, yes in zip(args, batched, strict=True)]
            results: OfDevice = call(*rest)
            return results

        entries = tuple(arg for arg, yes in zip(args, batched, strict=True) if yes)
        if size == 1:
            results = at(tuple(jax.lax.squeeze(entry, (0,)) for entry in entries))
            return _all_mapped(jax.tree.map(lambda result: result[None], results))
        return _all_mapped(jax.lax.map(at, entries))

    return call


def differentiable(
    function: Callable[..., Array],
    in_specs: Sequence[P],
    out_spec: P,
    *,
    shards: tuple[str, ...],
    refusal: str,
) -> Callable[..., Array]:
    """`per_device` of a function to one array with a derivative: a kernel that brings its own."""
    # What its derivative keeps is known to JAX alone. Each device hands it over as it is, as its
    # own part of arrays with a leading axis of devices. Along `shards` devices have different
    # arguments or results. It sees no axis of a map.
    on_devices = P(shards or None)

    def forward_of(*args: Array) -> tuple[Array, PyTree]:
        """The result, and the function from its cotangent to the cotangents of the floats."""
        floats, put = _floats_of(args)
        return jax.vjp(lambda *floats: function(*put(floats)), *floats)

    @jax.custom_vjp
    def call(*args: Array) -> Array:
        local = one_by_one(lambda *args: (function(*args),))
        return per_device(local, in_specs, (out_spec,), refusal=refusal)(*args)[0]

    def forward(*args: Array) -> tuple[Array, _Saved]:
        def local(*args: Array) -> tuple[Array, tuple[Array, ...]]:
            result, pull_back = forward_of(*args)
            return result, tuple(leaf[None] for leaf in jax.tree.leaves(pull_back))

        outs = (out_spec, on_devices)
        result, residuals = per_device(one_by_one(local), in_specs, outs, refusal=refusal)(*args)
        return result, (args, residuals)

    def backward(saved: _Saved, cotangent: Array) -> tuple[Array | None, ...]:
        args, residuals = saved
        put = _floats_of(args)[1]

        def local(cotangent: Array, *rest: Array) -> tuple[Array, ...]:
            args, residuals = rest[: len(in_specs)], rest[len(in_specs) :]
            # Tracing the forward pass again, for shapes alone, gives the same structure of leaves.
            structure = jax.tree.structure(
                jax.eval_shape(lambda *args: forward_of(*args)[1], *args)
            )
            pull_back: Callable[[Array], tuple[Array, ...]] = jax.tree.unflatten(
                structure, [leaf[0] for leaf in residuals]
            )
            return pull_back(cotangent)

        ins = (out_spec, *in_specs, *(on_devices for _ in residuals))
        outs = tuple(spec for spec, arg in zip(in_specs, args, strict=True) if _is_float(arg))
        gradients = per_device(one_by_one(local), ins, outs, refusal=refusal)(
            cotangent, *args, *residuals
        )
        return put(gradients, others=None)

    call.defvjp(forward, backward)
    return call


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _floats_of(args: Sequence[Array]) -> tuple[tuple[Array, ...], Callable[..., tuple[Any, ...]]]:
    """The floating-point arguments, and a function that puts others into their places."""
    # The places of integers then hold what they held, or `others` where that is given.
    keep = object()

    def put(floats: Sequence[Any], others: Any = keep) -> tuple[Any, ...]:
        values = iter(floats)
        return tuple(
            next(values) if _is_float(arg) else arg if others is keep else others for arg in args
        )

    return tuple(arg for arg in args if _is_float(arg)), put
