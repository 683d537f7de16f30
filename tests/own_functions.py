"""A module as a user might have one: functions of their own, and what they take."""

import jax
import jax.numpy as jnp

SHAPES = ((1024,), "float32"), ((512, 1024), "bfloat16")


def scaled(scale: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x * scale)


def talkative(scale: jax.Array, x: jax.Array) -> jax.Array:
    print("a word while it is traced")
    return scaled(scale, x)


def lean(scale: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x * scale.astype(x.dtype))


jitted = jax.jit(lean)


def tall(scale: jax.Array, x: jax.Array) -> jax.Array:
    product = (x * scale.astype(x.dtype)).T @ x
    return jnp.sort(product, axis=0) @ product


def broken(scale: jax.Array, x: jax.Array) -> jax.Array:
    return x @ scale[:3]


def inputs() -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(*shape) for shape in SHAPES)


not_a_function = 3
