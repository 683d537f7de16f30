"""What XLA's latency-hiding scheduler holds on 8 × H100, for layers unrolled and scanned.

    python benchmarks/latency_hiding.py

Each layer is two products whose weights are sharded over fsdp and gathered where they are used, and
is recomputed for the backward pass. Run it with each version of JAX to compare them.
"""

import jax
import jax.numpy as jnp
from jax import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline import lab
from nnx_pipeline.lab.compile._places import mesh_on

LAYERS, EMBED, MLP, BATCH, SEQUENCE = 16, 4096, 14336, 8, 4096
PLATFORM, SETTING = "cuda:h100:8", "xla_gpu_enable_latency_hiding_scheduler=false"
SHARDED = P("fsdp")


@jax.checkpoint
def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    up, down = (weight.astype(x.dtype) for weight in weights)
    hidden = jax.lax.with_sharding_constraint(x @ up, SHARDED)
    return x + jax.lax.with_sharding_constraint(jax.nn.silu(hidden) @ down, SHARDED)


def unrolled(weights, x):
    def loss(weights):
        y = x
        for each in weights:
            y = layer(y, each)
        return jnp.mean(y.astype("float32") ** 2)

    return jax.lax.with_sharding_constraint(jax.grad(loss)(weights), SHARDED)


def scanned(weights, x):
    def loss(weights):
        y, _ = jax.lax.scan(lambda y, each: (layer(y, each), None), x, weights)
        return jnp.mean(y.astype("float32") ** 2)

    return jax.lax.with_sharding_constraint(jax.grad(loss)(weights), P(None, "fsdp"))


def main() -> None:
    platform = lab.Platform.parse(PLATFORM)
    mesh = mesh_on("fsdp=8", platform.devices(1))

    def array(dtype: str, *shape: int, spec: P = SHARDED) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    sizes = ((EMBED, MLP), (MLP, EMBED))
    apart = [tuple(array("float32", *size) for size in sizes)] * LAYERS
    stacked = tuple(array("float32", LAYERS, *size, spec=P(None, "fsdp")) for size in sizes)
    x = array("bfloat16", BATCH, SEQUENCE, EMBED)
    pair = platform, lab.Platform.parse(PLATFORM, SETTING)
    print(f"{LAYERS} layers on {PLATFORM}, JAX {jax.__version__}, MB of heap per device\n")
    print("| | with the scheduler | without |\n|---|--:|--:|")
    for function, weights in ((unrolled, apart), (scanned, stacked)):
        found = lab.compare(function, function, weights, x, mesh=mesh, platform=pair)
        before, after = (f"{size / 1e6:,.1f}" for size in found.bytes_of("heap"))
        print(f"| {function.__name__} | {before} | {after} |")


if __name__ == "__main__":
    main()
