"""NeRF in plain JAX with optax; the step closes over the rays of all training images."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

IMAGES, SIZE, RAYS, SAMPLES, WIDTH = 60, 160, 1024, 64, 256
CURE = r"argument"
tx = optax.adam(5e-4)
dataset = np.zeros((IMAGES * SIZE * SIZE, 9), np.float32)  # origin, direction, color
bank = jnp.asarray(dataset)


def init():
    sizes = (63, *(WIDTH,) * 8, 4)
    params = [(jnp.zeros((a, b)), jnp.zeros(b)) for a, b in itertools.pairwise(sizes)]
    return params, tx.init(params)


def encode(x):
    freq = 2.0 ** jnp.arange(10)
    angles = (x[..., None] * freq).reshape(*x.shape[:-1], -1)
    return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], -1)


def field(params, x):
    h = encode(x)
    for w, b in params[:-1]:
        h = jax.nn.relu(h @ w + b)
    w, b = params[-1]
    return h @ w + b


def render(params, origin, direction, key):
    near, far = 2.0, 6.0
    t = near + (far - near) * (jnp.arange(SAMPLES) + jax.random.uniform(key, (SAMPLES,))) / SAMPLES
    raw = field(params, origin + t[:, None] * direction)
    alpha = 1 - jnp.exp(-jax.nn.relu(raw[:, 3]) * (far - near) / SAMPLES)
    trans = jnp.cumprod(jnp.concatenate([jnp.ones(1), 1 - alpha[:-1] + 1e-10]))
    return ((alpha * trans)[:, None] * jax.nn.sigmoid(raw[:, :3])).sum(0)


def update(params, opt_state, rays, key):
    def loss_fn(params):
        keys = jax.random.split(key, RAYS)
        rgb = jax.vmap(render, in_axes=(None, 0, 0, 0))(params, rays[:, :3], rays[:, 3:6], keys)
        return jnp.mean((rgb - rays[:, 6:]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train_step(params, opt_state, key):
    rows = jax.random.randint(key, (RAYS,), 0, bank.shape[0])
    return update(params, opt_state, bank[rows], key)  # planted


def given_rays(params, opt_state, key, bank):
    rows = jax.random.randint(key, (RAYS,), 0, bank.shape[0])
    return update(params, opt_state, bank[rows], key)


step = jax.jit(train_step, donate_argnums=(0, 1))
good = jax.jit(given_rays, donate_argnums=(0, 1))


def inputs():
    return *jax.eval_shape(init), jax.eval_shape(lambda: jax.random.key(0))


def good_inputs():
    return *inputs(), jax.ShapeDtypeStruct(dataset.shape, jnp.float32)
