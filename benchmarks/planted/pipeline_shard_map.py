"""GPipe by shard_map with FSDP in each stage; a stage gathers all its layers before it begins."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

STAGES, FSDP, LAYERS, WIDTH, HIDDEN, MICRO, ROWS = 4, 2, 32, 2048, 8192, 8, 256
MESH = "pp=4,fsdp=2"
CURE = r"one layer|each layer|inside|loop"


def layer(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def gather(w):
    up = lax.all_gather(w["up"], "fsdp", axis=w["up"].ndim - 2, tiled=True)
    return {
        "up": up,
        "down": lax.all_gather(w["down"], "fsdp", axis=w["down"].ndim - 1, tiled=True),
    }


def stage_early(weights, x):
    return lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, weights)[0]


def stage_late(weights, x):
    return lax.scan(jax.checkpoint(lambda x, w: (layer(x, gather(w)), None)), x, weights)[0]


def pipelined(early, weights, xs):
    stage, last = lax.axis_index("pp"), STAGES - 1
    if early:
        weights = jax.tree.map(lambda w: w, gather(weights))  # planted
    run = stage_early if early else stage_late

    def tick(carry, t):
        state, outputs = carry
        state = jnp.where(stage == 0, xs[jnp.minimum(t, MICRO - 1)], state)
        state = run(weights, state)
        done = jnp.clip(t - last, 0, MICRO - 1)
        outputs = outputs.at[done].set(jnp.where(stage == last, state, 0))
        return (
            lax.ppermute(state, "pp", [(i, (i + 1) % STAGES) for i in range(STAGES)]),
            outputs,
        ), None

    start = jnp.zeros_like(xs[0]), jnp.zeros_like(xs)
    (_, outputs), _ = lax.scan(jax.checkpoint(tick), start, jnp.arange(MICRO + last))
    return lax.psum(outputs, "pp")


def train(early):
    specs = {"up": P("pp", "fsdp", None), "down": P("pp", None, "fsdp")}
    data = P(None, "fsdp")
    mapped = partial(jax.shard_map, in_specs=(specs, data), out_specs=data, check_vma=False)

    def loss_fn(weights, xs, ys):
        out = mapped(partial(pipelined, early))(weights, xs)
        return jnp.mean((out - ys).astype(jnp.float32) ** 2)

    def train_step(weights, xs, ys):
        loss, grads = jax.value_and_grad(loss_fn)(weights, xs, ys)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, grads), loss

    return jax.jit(train_step, donate_argnums=0)


step, good = train(True), train(False)


def inputs():
    mesh = jax.sharding.get_mesh()

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    up = array(P("pp", "fsdp", None), LAYERS, WIDTH, HIDDEN)
    down = array(P("pp", None, "fsdp"), LAYERS, HIDDEN, WIDTH)
    data = array(P(None, "fsdp"), MICRO, ROWS, WIDTH)
    return {"up": up, "down": down}, data, data
