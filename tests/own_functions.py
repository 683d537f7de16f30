"""A module as a user might have one: functions of their own, and what they take."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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


def computed_inputs() -> tuple[jax.Array, jax.ShapeDtypeStruct]:
    key = jax.random.key(0)
    return jnp.ones(1024), jax.eval_shape(
        lambda: jax.random.normal(key, SHAPES[1][0], SHAPES[1][1])
    )


def placed_inputs() -> tuple[jax.Array, jax.Array]:
    x = jnp.ones(*SHAPES[1])
    return jnp.ones(1024), jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), P("data")))


not_a_function = 3
