"""Mixture-of-experts layers in Flax NNX that dispatch by a mask [tokens, experts, capacity]."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

WIDTH, HIDDEN, EXPERTS, TOP, LAYERS, TOKENS = 1024, 2048, 16, 2, 2, 8192
CAPACITY = 2 * TOP * TOKENS // EXPERTS // 2
CURE = r"scatter|gather|index|sort|ragged"


class MoE(nnx.Module):
    def __init__(self, masks: bool, rngs: nnx.Rngs):
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        make = lambda *s: nnx.Param(jax.random.normal(rngs.params(), s, jnp.bfloat16) * 0.02)
        self.up, self.down = make(EXPERTS, WIDTH, HIDDEN), make(EXPERTS, HIDDEN, WIDTH)
        self.masks = masks

    def experts(self, slots):
        h = nnx.silu(jnp.einsum("ecd,edh->ech", slots, self.up[...]))
        return jnp.einsum("ech,ehd->ecd", h, self.down[...])

    def __call__(self, x):
        probs = nnx.softmax(self.router(x.astype(jnp.float32)))
        weights, chosen = jax.lax.top_k(probs, TOP)
        mask = jax.nn.one_hot(chosen.T.reshape(-1), EXPERTS, dtype=jnp.int32)
        position = (jnp.cumsum(mask, axis=0) * mask).sum(-1).reshape(TOP, TOKENS).T - 1
        if self.masks:
            return self.by_masks(x, weights, chosen, position)  # caller
        return self.by_index(x, weights, chosen, position)

    def by_masks(self, x, weights, chosen, position):
        where = jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)
        slot = jax.nn.one_hot(position, CAPACITY, dtype=x.dtype)
        combine = jnp.einsum("tk,tke,tkc->tec", weights.astype(x.dtype), where, slot)  # planted
        dispatch = (combine > 0).astype(x.dtype)
        out = self.experts(jnp.einsum("tec,td->ecd", dispatch, x))
        return x + jnp.einsum("tec,ecd->td", combine, out)

    def by_index(self, x, weights, chosen, position):
        fits = position < CAPACITY
        row = jnp.where(fits, chosen * CAPACITY + position, EXPERTS * CAPACITY)
        slots = jnp.zeros((EXPERTS * CAPACITY, WIDTH), x.dtype)
        for k in range(TOP):
            slots = slots.at[row[:, k]].set(x, mode="drop")
        out = self.experts(slots.reshape(EXPERTS, CAPACITY, WIDTH)).reshape(-1, WIDTH)
        for k in range(TOP):
            taken = out.at[row[:, k]].get(mode="fill", fill_value=0)
            x = x + weights[:, k, None].astype(x.dtype) * taken
        return x


class Model(nnx.Module):
    def __init__(self, masks: bool, rngs: nnx.Rngs):
        self.layers = nnx.List([MoE(masks, rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return jnp.mean((model(x) - y).astype(jnp.float32) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


step = good = train_step


def inputs(masks=True):
    def make():
        model = Model(masks, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adafactor(1e-3), wrt=nnx.Param)

    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
    return *nnx.eval_shape(make), x, x


def good_inputs():
    return inputs(masks=False)
