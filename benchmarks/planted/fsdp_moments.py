"""FSDP by shardings of arguments with optax; the moments of the optimizer stay whole everywhere."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, HIDDEN, LAYERS, BATCH, VOCAB = 1024, 4096, 6, 8192, 32768
MESH = "fsdp=8"
CURE = r"fsdp"
tx = optax.adamw(1e-4, weight_decay=0.1)


def init():
    dense = lambda *shape: jnp.zeros(shape, jnp.float32)
    layer = {"up": dense(LAYERS, WIDTH, HIDDEN), "down": dense(LAYERS, HIDDEN, WIDTH)}
    return {"embed": dense(VOCAB, WIDTH), "mlp": layer}


def forward(params, ids):
    def body(x, w):
        w = jax.tree.map(lambda w: w.astype(jnp.bfloat16), w)
        return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

    x = params["embed"].astype(jnp.bfloat16)[ids]
    return jax.lax.scan(jax.checkpoint(body), x, params["mlp"])[0]


def loss_fn(params, batch):
    return jnp.mean(forward(params, batch["ids"]).astype(jnp.float32) ** 2)


def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)  # planted
    return optax.apply_updates(params, updates), opt_state, loss


step = good = jax.jit(train_step, donate_argnums=(0, 1))


def inputs(moments_sharded=False):
    mesh = jax.sharding.get_mesh()

    def placed(split):
        def place(leaf):
            spec = P(*(None,) * (leaf.ndim - 1), "fsdp") if split and leaf.ndim > 1 else P()
            sharding = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return place

    params = jax.eval_shape(init)
    opt_state = jax.tree.map(placed(moments_sharded), jax.eval_shape(tx.init, params))
    ids = jax.ShapeDtypeStruct((BATCH,), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))
    return jax.tree.map(placed(True), params), opt_state, {"ids": ids}


def good_inputs():
    return inputs(moments_sharded=True)
