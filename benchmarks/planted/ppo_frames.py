"""PPO on frames in one file; the whole rollout is made float32 before it is cut in minibatches."""

import jax
import jax.numpy as jnp
import optax

STEPS, ENVS, ACTIONS, EPOCHS, MINIBATCHES = 128, 64, 18, 2, 32
CURE = r"minibatch|slice|part|inside|uint8|dtype"
tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))


def init():
    kernels = {"c1": (8, 8, 4, 32), "c2": (4, 4, 32, 64), "c3": (3, 3, 64, 64), "fc": (7744, 512)}
    params = {name: jnp.zeros(shape) for name, shape in kernels.items()}
    params |= {"pi": jnp.zeros((512, ACTIONS)), "v": jnp.zeros((512, 1))}
    return params, tx.init(params)


def network(params, frames):
    x = frames
    for name, stride in (("c1", 4), ("c2", 2), ("c3", 1)):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, params[name], (stride, stride), "SAME", dimension_numbers=dims
        )
        x = jax.nn.relu(x)
    x = jax.nn.relu(x.reshape(x.shape[0], -1) @ params["fc"])
    return x @ params["pi"], (x @ params["v"])[:, 0]


def ppo_loss(params, batch):
    logits, value = network(params, batch["obs"].astype(jnp.float32) / 255)
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["action"][:, None], -1)[:, 0]
    ratio = jnp.exp(logp - batch["logp"])
    clipped = jnp.clip(ratio, 0.8, 1.2)
    surrogate = jnp.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
    return -surrogate.mean() + 0.5 * jnp.mean((value - batch["return"]) ** 2)


def learner(early):
    def update(params, opt_state, rollout, key):
        if early:
            rollout = dict(rollout, obs=rollout["obs"].astype(jnp.float32))  # planted
        flat = jax.tree.map(lambda x: x.reshape(STEPS * ENVS, *x.shape[2:]), rollout)

        def epoch(carry, key):
            order = jax.random.permutation(key, STEPS * ENVS)

            def minibatch(carry, rows):
                params, opt_state = carry
                batch = jax.tree.map(lambda x: x[rows], flat)
                loss, grads = jax.value_and_grad(ppo_loss)(params, batch)
                updates, opt_state = tx.update(grads, opt_state, params)
                return (optax.apply_updates(params, updates), opt_state), loss

            return jax.lax.scan(minibatch, carry, order.reshape(MINIBATCHES, -1))

        return jax.lax.scan(epoch, (params, opt_state), jax.random.split(key, EPOCHS))

    return jax.jit(update, donate_argnums=(0, 1))


step, good = learner(True), learner(False)


def inputs():
    params, opt_state = jax.eval_shape(init)
    of = lambda dtype, *shape: jax.ShapeDtypeStruct((STEPS, ENVS, *shape), dtype)
    rollout = {name: of(jnp.float32) for name in ("logp", "advantage", "return")}
    rollout |= {"obs": of(jnp.uint8, 84, 84, 4), "action": of(jnp.int32)}
    return params, opt_state, rollout, jax.eval_shape(lambda: jax.random.key(0))
