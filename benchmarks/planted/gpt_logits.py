"""A GPT in plain JAX with its own training loop; the loss keeps all logits in float32."""

import jax
import jax.numpy as jnp

VOCAB, WIDTH, LAYERS, HEADS, BATCH, LENGTH = 50304, 768, 4, 12, 16, 1024
CURE = "chunk|part|block"


def init(key):
    k = iter(jax.random.split(key, 8))
    dense = lambda *shape: 0.02 * jax.random.normal(next(k), shape, jnp.bfloat16)
    layer = {
        "ln1": jnp.ones((LAYERS, WIDTH), jnp.bfloat16),
        "ln2": jnp.ones((LAYERS, WIDTH), jnp.bfloat16),
        "qkv": dense(LAYERS, WIDTH, 3 * WIDTH),
        "proj": dense(LAYERS, WIDTH, WIDTH),
        "fc": dense(LAYERS, WIDTH, 4 * WIDTH),
        "out": dense(LAYERS, 4 * WIDTH, WIDTH),
    }
    return {"wte": dense(VOCAB, WIDTH), "wpe": dense(LENGTH, WIDTH), "layers": layer}


def norm(x, g):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * g


@jax.checkpoint
def block(x, p):
    h = norm(x, p["ln1"]) @ p["qkv"]
    q, k, v = jnp.split(h.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + a.reshape(x.shape) @ p["proj"]
    return x + jax.nn.gelu(norm(x, p["ln2"]) @ p["fc"]) @ p["out"], None


def xent(wte, h, targets):
    logits = h @ wte.T
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))  # planted
    return -jnp.take_along_axis(logp, targets[..., None], -1).sum()


def whole(wte, h, targets):
    return xent(wte, h, targets)  # caller


def chunked(wte, h, targets):
    add = jax.checkpoint(lambda total, part: (total + xent(wte, *part), None))
    parts = h.reshape(32, -1, WIDTH), targets.reshape(32, -1)
    return jax.lax.scan(add, jnp.float32(0), parts)[0]


def train(head):
    def loss_fn(params, tokens):
        x = params["wte"][tokens[:, :-1]] + params["wpe"]
        x, _ = jax.lax.scan(block, x, params["layers"])
        return head(params["wte"], x, tokens[:, 1:]) / (BATCH * LENGTH)

    def train_step(params, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), loss

    return jax.jit(train_step, donate_argnums=0)


step, good = train(whole), train(chunked)


def inputs():
    params = jax.eval_shape(init, jax.random.key(0))
    return params, jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
