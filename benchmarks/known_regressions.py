"""Regressions of memory that others reported between versions of JAX, found again.

    nnx-pipeline compare --with jax==0.12.0.1 benchmarks/known_regressions.py:donated \
        --inputs benchmarks/known_regressions.py:donated_inputs --platform cuda:h100:1
    python benchmarks/known_regressions.py donated cpu
    python benchmarks/known_regressions.py experts cuda

The first compares two versions that this project runs with. The others need JAX alone, so that they
run in an environment with an older one, and print what its compiler says. There the plugin for CUDA
asks for cuDNN unless JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 is set.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

SIZE = 1 << 27  # of float32: 512 MiB
# As of marin#5394, per device: two sequences of 4,096 tokens, and each token goes to 4 experts.
LAYERS, TOKENS, PER_TOKEN, WIDTH, HIDDEN, EXPERTS = 11, 8192, 4, 1024, 512, 64


def read_between(x):
    """openxla/xla#45912: a donated array is updated, read by a loop, and updated again."""
    first = jnp.exp(x)
    read = jax.lax.fori_loop(0, 8, lambda i, total: total + first[i * (SIZE // 8)], 0.0)
    return first * read


donated = jax.jit(read_between, donate_argnums=0)


def donated_inputs():
    return (jax.ShapeDtypeStruct((SIZE,), "float32"),)


@jax.custom_vjp
def product(x, w, sizes):
    """marin#5394: only the backward pass is made of `ragged_dot_general`. Forward a plain product
    stands for the Triton kernel of that project."""
    return x @ w[0]


def forward(x, w, sizes):
    return product(x, w, sizes), (x, w, sizes)


def backward(saved, gradient):
    x, w, sizes = saved
    general, numbers = jax.lax.ragged_dot_general, jax.lax.RaggedDotDimensionNumbers
    of_x = numbers((((1,), (2,)), ((), ())), [0], [0])
    of_w = numbers((((0,), (0,)), ((), ())), [0], [])
    return general(gradient, w, sizes, of_x), general(x, gradient, sizes, of_w), None


product.defvjp(forward, backward)


def experts_of_a_device(x, up, down, sizes):
    order = jnp.argsort(jnp.zeros(TOKENS * PER_TOKEN, "int32") + sizes[0])
    rows = order // PER_TOKEN
    gate, value = jnp.split(product(x[rows], up, sizes), 2, axis=-1)
    out = product(jax.nn.silu(gate) * value, down, sizes)
    return x + jnp.zeros_like(x).at[rows].add(out)


def experts_on(mesh):
    specs = (P("data"), P(), P(), P("data"))
    layer = jax.shard_map(
        experts_of_a_device, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False
    )
    recomputed = jax.checkpoint(lambda x, up, down, sizes: layer(x, up, down, sizes))

    def loss(weights, x, sizes):
        for up, down in weights:
            x = recomputed(x, up, down, sizes)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss))


def experts_inputs(mesh):
    def array(dtype, shape, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    up = array("bfloat16", (EXPERTS, WIDTH, 2 * HIDDEN), None, "data")
    down = array("bfloat16", (EXPERTS, HIDDEN, WIDTH), None, None, "data")
    x = array("bfloat16", (8 * TOKENS, WIDTH), "data")
    return [(up, down)] * LAYERS, x, array("int32", (8 * EXPERTS,), "data")


experts = experts_on(None)


def abstract_experts_inputs():
    return experts_inputs(AbstractMesh((8,), ("data",)))


def gpus(number):
    from nnx_pipeline.lab.compile import _gpus  # of a checkout on PYTHONPATH; it needs no JAX

    text = _gpus.description("cuda", "h100")
    topology = f"1x1x{number}"
    described = topologies.get_topology_desc(platform="cuda", target_config=text, topology=topology)
    return described.devices


def main(name, kind):
    jax.config.update("jax_platforms", "cpu")
    # With no GPU nothing can be tried.
    settings = {"xla_gpu_autotune_level": 0} if kind == "cuda" else {}
    if name == "experts":
        mesh = Mesh(np.array(gpus(8)), ("data",))
        lowered = experts_on(mesh).lower(*experts_inputs(mesh))
    else:
        (x,) = donated_inputs()
        if kind == "cuda":
            sharding = SingleDeviceSharding(gpus(1)[0])
            x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        lowered = donated.lower(x)
    memory = lowered.compile(compiler_options=settings).memory_analysis()
    print(
        f"JAX {jax.__version__}, {name}, {kind}: temp {memory.temp_size_in_bytes / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
