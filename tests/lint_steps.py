"""Programs in the styles of other projects, with one fault each, beside a good twin.

The line that a finding should name ends in the words `# here`, as in `lint_examples`.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from helpers import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lint_examples import SIZE, Example, array, half

Jitted = Callable[..., Any]
FSDP = "fsdp=8"
ROWS, LAYERS, LENGTH, VOCAB = 256, 8, 2048, 16384


def on(spec: P, *shape: int, dtype: Any = jnp.float32, mode: str = "auto") -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh_of(FSDP, mode), spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype=jnp.int32)


# Training steps: donation.


def mlp_loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"]).astype(jnp.float32) ** 2)


def momentum(params: Any, velocity: Any, x: jax.Array) -> Any:  # here
    gradient = jax.grad(mlp_loss)(params, x)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
    return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity


def average(slow: Any, params: Any) -> Any:  # here
    return jax.tree.map(lambda s, p: 0.999 * s + 0.001 * p, slow, params)


def nnx_update(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:  # here
    loss, gradient = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradient)
    return loss


def nnx_state() -> tuple[nnx.Linear, nnx.Optimizer]:
    model = nnx.Linear(SIZE, SIZE, use_bias=False, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def equinox_update(weights: Any, x: jax.Array) -> Any:  # here
    gradient = eqx.filter_grad(mlp_loss)(weights, x)
    return eqx.apply_updates(weights, jax.tree.map(lambda g: -0.1 * g, gradient))


def written(cache: jax.Array, keys: jax.Array, place: jax.Array) -> jax.Array:  # here
    return cache.at[:, place].set(keys)


def promoted(params: Any, x: jax.Array, rate: jax.Array) -> Any:
    gradient = jax.grad(mlp_loss)(params, x)
    wide = jax.tree.map(lambda g: g.astype(rate.dtype), gradient)
    return jax.tree.map(lambda p, g: p.astype(rate.dtype) - rate * g, params, wide)  # here


def cast_back(params: Any, x: jax.Array, rate: jax.Array) -> Any:
    gradient = jax.grad(mlp_loss)(params, x)
    return {n: (params[n] - rate * gradient[n]).astype(params[n].dtype) for n in params}


def returned_as(spec: P) -> Jitted:
    def update(w: jax.Array, x: jax.Array) -> jax.Array:
        new = w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return jax.lax.with_sharding_constraint(new, spec)  # here

    return jax.jit(update, donate_argnums=0)


# Decoders: caches.


def decoder(keep: Jitted) -> Jitted:
    def step(weights: jax.Array, cache: jax.Array, x: jax.Array, place: jax.Array) -> Any:
        cache = keep(cache, x @ weights, place)
        scores = jnp.einsum("bd,btd->bt", x, cache)
        return jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), cache), cache

    return jax.jit(step, donate_argnums=1)


def appended(cache: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
    return jnp.concatenate([cache, new[:, None]], axis=1)  # here


def copied(cache: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
    longer = jnp.zeros((cache.shape[0], cache.shape[1] + 1, SIZE), cache.dtype)  # here
    return longer.at[:, :-1].set(cache).at[:, -1].set(new)


def rolled(cache: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
    return jnp.concatenate([cache[:, 1:], new[:, None]], axis=1)  # here


def updated(cache: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(cache, new[:, None], (0, place, 0))


# Layers: residuals, scores, logits, states, dispatch.


STATES = (2, 512, 256, 32)  # batch, positions, width, state
STATES_BYTES = 4 * math.prod(STATES)
INPUTS = (array(*STATES[:3]), array(*STATES[:2], STATES[3]))


def combined(
    left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return left[0] * right[0], left[1] * right[0] + right[1]


def states_of(u: jax.Array, c: jax.Array) -> jax.Array:
    drive = jnp.sin(u)[..., None] * c[..., None, :]
    return jax.lax.associative_scan(combined, (jnp.cos(drive), drive), axis=1)[1]  # here


def by_product(u: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.einsum("bldn,bln->bld", states_of(u, c), c)


def in_chunks(u: jax.Array, c: jax.Array) -> jax.Array:
    cut = [jnp.moveaxis(x.reshape(STATES[0], 8, -1, x.shape[-1]), 1, 0) for x in (u, c)]
    one = jax.checkpoint(lambda none, parts: (none, by_product(*parts)))
    return jax.lax.scan(one, None, tuple(cut))[1]


def gated(x: jax.Array, weights: Any) -> Any:
    hidden = jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])
    return x + hidden @ weights["down"], None


def scanned(layer: Jitted) -> Jitted:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(layer, x, weights)  # here
        return jnp.mean(x**2)

    return jax.jit(jax.grad(loss))


class Block(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> Any:
        hidden = linen.gelu(linen.Dense(4 * 128, name="up")(linen.LayerNorm(name="norm")(x)))
        return x + linen.Dense(128, name="down")(hidden), None


def linen_stack(block: Any) -> Jitted:
    class Stack(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return linen.scan(block, length=LAYERS, **options)(name="layers")(x, None)[0]  # here

    return jax.jit(jax.grad(lambda params, x: jnp.sum(Stack().apply(params, x) ** 2)))


def linen_params() -> Any:
    shapes = {
        "up": {"kernel": array(LAYERS, 128, 512), "bias": array(LAYERS, 512)},
        "down": {"kernel": array(LAYERS, 512, 128), "bias": array(LAYERS, 128)},
        "norm": {"scale": array(LAYERS, 128), "bias": array(LAYERS, 128)},
    }
    return {"params": {"layers": shapes}}


def causal(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -1e9)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = q @ k.swapaxes(-2, -1) / 8.0  # here
    return jax.nn.softmax(causal(scores), axis=-1) @ v


def attention_by_hand(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)  # here
    weights = jnp.exp(scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v)


def attention_online(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """In blocks as long as the limit on sequences, which adds up its sums before it divides."""

    def blocks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:2], 2, -1, x.shape[-1]), 2, 0)

    def of_queries(q: jax.Array) -> jax.Array:
        def add(carry: Any, block: Any) -> Any:
            total, most, norm = carry
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, block[0])
            more = jnp.maximum(most, scores.max(-1))
            weights, scale = jnp.exp(scores - more[..., None]), jnp.exp(most - more)
            total = total * scale[..., None] + jnp.einsum("bhqk,bhkd->bhqd", weights, block[1])
            return (total, more, norm * scale + weights.sum(-1)), None

        zeros = jnp.zeros(q.shape[:-1])
        start = (jnp.zeros_like(q), zeros - 1e9, zeros)
        (total, _, norm), _ = jax.lax.scan(jax.checkpoint(add), start, (blocks(k), blocks(v)))
        return total / norm[..., None]

    return jnp.moveaxis(jax.lax.map(of_queries, blocks(q)), 0, 2).reshape(q.shape)


def token_loss(table: jax.Array, hidden: jax.Array, labels: jax.Array) -> jax.Array:
    logits = (hidden @ table.T).astype(jnp.float32)  # here
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def log_softmax_loss(table: jax.Array, hidden: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.einsum("td,vd->tv", hidden, table, preferred_element_type=jnp.float32)  # here
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1))


def chunked_loss(table: jax.Array, hidden: jax.Array, labels: jax.Array) -> jax.Array:
    @jax.checkpoint
    def add(total: jax.Array, part: Any) -> Any:
        return total + token_loss(table, *part), None

    parts = hidden.reshape(16, -1, hidden.shape[-1]), labels.reshape(16, -1)
    return jax.lax.scan(add, jnp.float32(0), parts)[0]


def places_of(experts: jax.Array, count: int) -> jax.Array:
    chosen = jax.nn.one_hot(experts, count, dtype=jnp.int32)
    return jnp.cumsum(chosen, axis=0) * chosen - 1


def switch(x: jax.Array, router: jax.Array) -> jax.Array:
    experts = jnp.argmax(x @ router, axis=-1)
    places = places_of(experts, router.shape[1])
    capacity = 2 * len(x) // router.shape[1]
    dispatch = jax.nn.one_hot(places, capacity, dtype=x.dtype)  # here
    return jnp.einsum("tec,td->ecd", dispatch, x)


def two_masks(x: jax.Array, router: jax.Array) -> jax.Array:
    experts, count = jnp.argmax(x @ router, axis=-1), router.shape[1]
    place = jnp.max(places_of(experts, count), axis=-1)
    chosen = jax.nn.one_hot(experts, count, dtype=x.dtype)
    slots = jax.nn.one_hot(place, 2 * len(x) // count, dtype=x.dtype)
    return jnp.einsum("tec,td->ecd", chosen[:, :, None] * slots[:, None], x)  # here


def scattered(x: jax.Array, router: jax.Array) -> jax.Array:
    experts, count = jnp.argmax(x @ router, axis=-1), router.shape[1]
    capacity = 2 * len(x) // count
    place = jnp.max(places_of(experts, count), axis=-1)
    slot = jnp.where(place < capacity, experts * capacity + place, count * capacity)
    buffers = jnp.zeros((count * capacity, x.shape[1]), x.dtype).at[slot].set(x, mode="drop")
    return buffers.reshape(count, capacity, -1)


# Sharded weights.


def gathered(w: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(w, P())


def dense(x: jax.Array, w: jax.Array) -> Any:
    return jnp.tanh(x @ w), None


def all_at_once(weights: jax.Array, x: jax.Array) -> jax.Array:
    whole = jax.lax.with_sharding_constraint(weights, P())  # here
    return jax.lax.scan(dense, x, whole)[0]


def one_by_one(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: dense(x, gathered(w)), x, weights)[0]


def all_at_once_unrolled(weights: jax.Array, x: jax.Array) -> jax.Array:
    whole = jax.lax.with_sharding_constraint(weights.astype(jnp.bfloat16), P())  # here
    for layer in range(len(whole)):
        x = jnp.tanh(x @ whole[layer].astype(x.dtype))
    return x


def one_by_one_unrolled(weights: jax.Array, x: jax.Array) -> jax.Array:
    for layer in range(len(weights)):
        x = jnp.tanh(x @ gathered(weights[layer].astype(jnp.bfloat16)).astype(x.dtype))
    return x


def by_shard_map(layer: Jitted, first: Jitted) -> Jitted:
    def run(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, x, first(weights))[0]

    axes = {"in_specs": (P(None, "fsdp"), P("fsdp")), "out_specs": P("fsdp")}
    return jax.jit(lambda *given: jax.shard_map(run, **axes)(*given))


def gather_stack(weights: jax.Array) -> jax.Array:
    return jax.lax.all_gather(weights, "fsdp", axis=1, tiled=True)  # here


def gather_layer(x: jax.Array, w: jax.Array) -> Any:
    return dense(x, jax.lax.all_gather(w, "fsdp", axis=0, tiled=True))


def tied(w: jax.Array, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ gathered(w))
    back = jax.lax.with_sharding_constraint(w, P())  # here
    return hidden @ back.T


def tied_once(w: jax.Array, x: jax.Array) -> jax.Array:
    whole = gathered(w)
    return jnp.tanh(x @ whole) @ whole.T


def batch_first(x: jax.Array, params: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"]) ** 2)  # here

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def turns(first: Jitted) -> Jitted:
    def run(weights: jax.Array, xs: jax.Array) -> jax.Array:
        layer = dense if first is gather_stack else gather_layer
        whole = first(weights)
        return jax.lax.map(lambda x: jax.lax.scan(layer, x, whole)[0], xs)

    axes = {"in_specs": (P(None, "fsdp"), P(None, "fsdp")), "out_specs": P(None, "fsdp")}
    return jax.jit(lambda *given: jax.shard_map(run, **axes)(*given))


def looked_up(params: Any, ids: jax.Array) -> jax.Array:
    rows = params["table"][ids]  # here
    return jnp.tanh(rows @ params["in"]) @ params["out"]


# Constants, and operands in float32.


def frames_early(w: jax.Array, frames: jax.Array) -> jax.Array:
    wide = frames.astype(jnp.float32) / 255  # here
    return jax.lax.map(lambda part: jnp.mean(part @ w), wide)


def frames_late(w: jax.Array, frames: jax.Array) -> jax.Array:
    return jax.lax.map(lambda part: jnp.mean(part.astype(jnp.float32) / 255 @ w), frames)


class Tables:
    """Arrays of this module, which exist before a function is traced."""

    jax = jnp.ones((SIZE, SIZE))
    layer = nnx.Linear(SIZE, SIZE, use_bias=False, rngs=nnx.Rngs(0))


def holds(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ Tables.jax)  # here


def holds_a_layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(Tables.layer(x))  # here


def is_given(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def noisy(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.tanh(x + jax.random.normal(key, x.shape))  # here


def noisy_in_half(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.tanh(x + jax.random.normal(key, x.shape, x.dtype))


def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(key, 0.9, x.shape).astype(jnp.float32)
    return x * kept  # here


def dropped_by_choice(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def into_zeros(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.full(x.shape, 0.1, jnp.float32), x)  # here


def into_zeros_in_half(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.full(x.shape, 0.1, x.dtype), x)


def steps() -> dict[str, Example]:
    """All of them, by what they do."""
    square, layer = 4 * SIZE**2, {"in": array(SIZE, SIZE), "out": array(SIZE, SIZE)}
    rows = array(ROWS, SIZE)

    def donated(function: Jitted, *numbers: int) -> Jitted:
        return jax.jit(function, donate_argnums=numbers)

    return {
        "momentum": Example(
            "not-donated",
            "momentum",
            jax.jit(momentum),
            donated(momentum, 0, 1),
            (layer, layer, rows),
            4 * square,
        ),
        "half of it": Example(
            "not-donated",
            "momentum",
            donated(momentum, 1),
            donated(momentum, 0, 1),
            (layer, layer, rows),
            2 * square,
        ),
        "plain": Example(
            "not-donated", "average", average, donated(average, 0), (layer, layer), 2 * square
        ),
        "nnx": Example(
            "not-donated",
            "nnx_update",
            nnx.jit(nnx_update),
            nnx.jit(nnx_update, donate_argnames=("model", "optimizer")),
            (*nnx.eval_shape(nnx_state), rows),
            2 * square + 4,  # with the count of steps
        ),
        "equinox": Example(
            "not-donated",
            "equinox_update",
            eqx.filter_jit(equinox_update),
            eqx.filter_jit(equinox_update, donate="all"),
            (layer, rows),
            2 * square,
        ),
        "cache": Example(
            "not-donated",
            "written",
            jax.jit(written),
            donated(written, 0),
            (half(8, LENGTH, SIZE), half(8, SIZE), tokens()),
            2 * 8 * LENGTH * SIZE,
        ),
        "promoted": Example(
            "donation-lost",
            "<lambda>",
            donated(promoted, 0),
            donated(cast_back, 0),
            ({name: half(SIZE, SIZE) for name in layer}, half(ROWS, SIZE), array()),
            square // 2,
        ),
        "returned whole": Example(
            "donation-lost",
            "update",
            returned_as(P()),
            returned_as(P("fsdp")),
            (on(P("fsdp"), 4 * SIZE, SIZE), on(P("fsdp"), ROWS, 4 * SIZE)),
            square // 2,
            FSDP,
        ),
        **caches(),
        **activations(),
        **sharded(),
        **operands(),
    }


def caches() -> dict[str, Example]:
    size = 2 * 8 * LENGTH * SIZE

    def arguments(length: int) -> Any:
        return half(SIZE, SIZE), half(8, length, SIZE), half(8, SIZE), tokens()

    def rebuilt(keep: Jitted, length: int) -> Example:
        twin = decoder(updated)
        name, given = keep.__name__, arguments(length)
        return Example("cache-rebuilt", name, decoder(keep), twin, given, size)

    return {
        "appended": rebuilt(appended, LENGTH - 1),
        "copied": rebuilt(copied, LENGTH - 1),
        "rolled": rebuilt(rolled, LENGTH),
    }


def activations() -> dict[str, Example]:
    names = {"gate": (128, 512), "up": (128, 512), "down": (512, 128)}
    stack = {name: array(LAYERS, *shape) for name, shape in names.items()}
    heads, scores = (array(2, 8, LENGTH, 64),) * 3, 4 * 2 * 8 * LENGTH**2
    loss = (array(VOCAB, 64), array(4096, 64), tokens(4096))
    routed, dispatch = (array(4096, 64), array(64, 16)), 4 * 4096 * 16 * 512
    layer, block = 4 * LAYERS * 4096, Block
    return {
        "scanned": Example(
            "residuals-stacked",
            "loss",
            scanned(gated),
            scanned(jax.checkpoint(gated)),
            (stack, array(4096, 128)),
            # The input; of the gate: it, its sigmoid, one less that, their product; the rest.
            layer * (128 + 6 * 512),
        ),
        "linen scan": Example(
            "residuals-stacked",
            "__call__",
            linen_stack(block),
            linen_stack(linen.remat(block)),
            (linen_params(), array(4096, 128)),
            # Of the gelu and what it is given; of the norm, with its statistics and its scale.
            layer * (6 * 512 + 4 * 128 + 4) + 4 * LAYERS * 128,
        ),
        "attention": Example(
            "scores-stored", "attention", attention, attention_online, heads, scores
        ),
        "attention by hand": Example(
            "scores-stored", "attention_by_hand", attention_by_hand, attention_online, heads, scores
        ),
        "cross entropy": Example(
            "logits-stored", "token_loss", token_loss, chunked_loss, loss, 4 * 4096 * VOCAB
        ),
        "log softmax": Example(
            "logits-stored",
            "log_softmax_loss",
            jax.grad(log_softmax_loss),
            jax.grad(chunked_loss),
            loss,
            4 * 4096 * VOCAB,
        ),
        "selective": Example(
            "states-stored", "states_of", by_product, in_chunks, INPUTS, STATES_BYTES
        ),
        "switch": Example("dispatch-stored", "switch", switch, scattered, routed, dispatch),
        "two masks": Example(
            "dispatch-stored", "two_masks", two_masks, scattered, routed, dispatch
        ),
    }


def sharded() -> dict[str, Example]:
    square = 4 * SIZE**2
    split = on(P("fsdp"), ROWS, SIZE)
    stack = (on(P(None, "fsdp"), LAYERS, SIZE, SIZE), split)
    one = (on(P("fsdp"), SIZE, SIZE), split)
    params = {
        "table": on(P(), 4 * SIZE, SIZE),
        "in": on(P(None, "fsdp"), SIZE, SIZE),
        "out": on(P("fsdp"), SIZE, SIZE),
    }
    again, together = "gathered-twice", "layers-gathered"
    shard_map = (
        by_shard_map(dense, gather_stack),
        by_shard_map(gather_layer, lambda weights: weights),
    )
    trained = {name: params[name] for name in ("in", "out")}
    ids, whole = tokens(ROWS), {**params, "table": on(P("fsdp"), 4 * SIZE, SIZE)}
    return {
        "all at once": Example(
            together, "all_at_once", all_at_once, one_by_one, stack, LAYERS * square, FSDP
        ),
        "unrolled": Example(
            together,
            "all_at_once_unrolled",
            all_at_once_unrolled,
            one_by_one_unrolled,
            stack,
            LAYERS * square // 2,
            FSDP,
        ),
        "shard_map": Example(together, "gather_stack", *shard_map, stack, LAYERS * square, FSDP),
        "batch first": Example(
            "replicated-parameter",
            "loss",
            jax.jit(batch_first, donate_argnums=1),
            jax.jit(batch_first, donate_argnums=1),
            (split, {**trained, "out": on(P(), SIZE, SIZE)}),
            square,
            FSDP,
            (split, trained),
        ),
        "tied": Example(again, "tied", tied, tied_once, one, square, FSDP),
        "table": Example(
            "replicated-parameter",
            "looked_up",
            looked_up,
            looked_up,
            (params, ids),
            4 * square,
            FSDP,
            (whole, ids),
        ),
    }


def operands() -> dict[str, Example]:
    held, upcast = "captured-constant", "hidden-upcast"
    square, given = 4 * SIZE**2, (array(ROWS, SIZE), array(SIZE, SIZE))
    frames = array(16, 4096, SIZE // 4, dtype=jnp.uint8)
    wide, random = 4 * 512 * SIZE, (half(512, SIZE), array(2, dtype=jnp.uint32))
    return {
        "table of JAX": Example(held, "holds", holds, is_given, given, square),
        "layer": Example(held, "holds_a_layer", holds_a_layer, is_given, given, square),
        "frames": Example(
            "cast-before-loop",
            "frames_early",
            frames_early,
            frames_late,
            (array(SIZE // 4, 16), frames),
            4 * frames.size,
        ),
        "noise": Example(upcast, "noisy", noisy, noisy_in_half, random, wide),
        "dropout": Example(upcast, "dropped", dropped, dropped_by_choice, random, wide),
        "full": Example(upcast, "into_zeros", into_zeros, into_zeros_in_half, random, wide),
    }
