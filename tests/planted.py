"""Programs with a fault in them if asked for; the marked lines are those that ask for memory."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

MICROBATCHES, ROWS, WIDTH, HIDDEN = 4, 8192, 512, 4096
WEIGHT = jax.ShapeDtypeStruct((WIDTH, HIDDEN), "bfloat16")
BATCHES = jax.ShapeDtypeStruct((MICROBATCHES, ROWS, WIDTH), "bfloat16")
SPREAD = jax.ShapeDtypeStruct((HIDDEN, HIDDEN), "bfloat16")
FEW = jax.ShapeDtypeStruct((64, HIDDEN), "bfloat16")


def keeping(weight: Array, batches: Array, fault: bool = False) -> Array:
    """The gradient over microbatches; the fault keeps 64 MB of each for the backward pass."""

    def loss(weight: Array) -> Array:
        def microbatch(total: Array, x: Array) -> tuple[Array, None]:
            hidden = jnp.tanh(x @ weight)  # planted: keeping
            return total + jnp.sum(hidden @ weight.T, dtype=jnp.float32), None

        turn = microbatch if fault else jax.checkpoint(microbatch)
        return jax.lax.scan(turn, jnp.zeros(()), batches)[0]

    return jax.grad(loss)(weight)


def upcast(weight: Array, batches: Array, fault: bool = False) -> Array:
    """The gradient behind a function whose result is kept; the fault keeps it in float32."""
    dtype = jnp.float32 if fault else jnp.bfloat16

    def loss(weight: Array) -> Array:
        def microbatch(total: Array, x: Array) -> tuple[Array, None]:
            hidden = x @ weight
            hidden = jnp.tanh(hidden.astype(dtype)).astype(x.dtype)  # planted: upcast
            return total + jnp.sum(hidden @ weight.T, dtype=jnp.float32), None

        return jax.lax.scan(microbatch, jnp.zeros(()), batches)[0]

    return jax.grad(loss)(weight)


def gathering(weight: Array, x: Array, fault: bool = False) -> Array:
    """Three products with a weight that is spread over fsdp; the fault gathers it again."""

    def local(part: Array, x: Array) -> Array:
        whole = jax.lax.all_gather(part, "fsdp", tiled=True)
        hidden = jnp.tanh(x @ whole)
        turned = whole.T
        if fault:
            turned = jax.lax.all_gather(part.T, "fsdp", axis=1, tiled=True)  # planted: gathering
        return jnp.tanh(hidden @ turned) @ whole

    gathered = jax.shard_map(
        local, in_specs=(P("fsdp"), P()), out_specs=P(), axis_names={"fsdp"}, check_vma=False
    )
    return gathered(weight, x)
