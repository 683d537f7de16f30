"""A neural ODE in Equinox with a solver of its own; all of its steps are kept for the gradient."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

DIM, HIDDEN, BATCH, STEPS = 128, 512, 2048, 64
CURE = r"checkpoint|remat"
optim = optax.adabelief(1e-3)


class Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, t, y):
        return self.mlp(jnp.append(y, t))


class NeuralODE(eqx.Module):
    field: Field
    checkpoint: bool = eqx.field(static=True)

    def __call__(self, ts, y0):
        f = jax.vmap(self.field, in_axes=(None, 0))

        def rk4(y, t):
            h = ts[1] - ts[0]
            k1 = f(t, y)
            k2 = f(t + h / 2, y + h / 2 * k1)
            k3 = f(t + h / 2, y + h / 2 * k2)
            k4 = f(t + h, y + h * k3)
            return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        body = jax.checkpoint(rk4) if self.checkpoint else rk4
        return jax.lax.scan(body, y0, ts[:-1])[0]  # planted


@eqx.filter_jit(donate="all-except-first")
def make_step(batch, model, opt_state):
    @eqx.filter_value_and_grad
    def loss_fn(model):
        ts, y0, y1 = batch
        return jnp.mean((model(ts, y0) - y1) ** 2)  # caller

    loss, grads = loss_fn(model)
    updates, opt_state = optim.update(grads, opt_state)
    return loss, eqx.apply_updates(model, updates), opt_state


step = good = make_step


def inputs(checkpoint=False):
    def make():
        mlp = eqx.nn.MLP(DIM + 1, DIM, HIDDEN, 2, jnp.tanh, key=jax.random.key(0))
        model = NeuralODE(Field(mlp), checkpoint)
        return model, optim.init(eqx.filter(model, eqx.is_inexact_array))

    y = jax.ShapeDtypeStruct((BATCH, DIM), jnp.float32)
    times = jax.ShapeDtypeStruct((STEPS + 1,), jnp.float32)
    return (times, y, y), *eqx.filter_eval_shape(make)


def good_inputs():
    return inputs(checkpoint=True)
