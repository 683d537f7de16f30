"""Bad examples for the linter, each beside a good twin that computes the same.

The line that a finding should name ends in the words `# here`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

SIZE, TURNS, STAGES, ROWS = 1024, 4, 2, 512


class Example(NamedTuple):
    """Two functions for the same arguments, and the finding that there should be in one of them.

    where: the function with the marked line; instead: other arguments for the good twin.
    """

    rule: str
    where: str
    bad: Callable[..., Any]
    good: Callable[..., Any]
    arguments: tuple[Any, ...]
    bytes: int
    mesh: str = ""
    instead: tuple[Any, ...] | None = None


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def half(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype=jnp.bfloat16)


WEIGHT, X = array(SIZE, SIZE), array(ROWS, SIZE)


def carried(w: jax.Array, x: jax.Array) -> jax.Array:
    def turn(carry: Any, _: None) -> Any:
        w, x = carry
        w = jax.lax.optimization_barrier(w)
        return (w, jnp.tanh(x @ w)), None

    (_, x), _ = jax.lax.scan(turn, (w, x), length=TURNS)  # here
    return x


def closed_over(w: jax.Array, x: jax.Array) -> jax.Array:
    def turn(x: Any, _: None) -> Any:
        return jnp.tanh(x @ jax.lax.optimization_barrier(w)), None

    return jax.lax.scan(turn, x, length=TURNS)[0]


def carried_by_while(w: jax.Array, x: jax.Array) -> jax.Array:
    def turn(carry: Any) -> Any:
        turns, w, x = carry
        return turns + 1, checkpoint_name(w, "w"), jnp.tanh(x @ w)

    start = (jnp.int32(0), w, x)
    return jax.lax.while_loop(lambda c: jnp.all(c[2] < 1), turn, start)[2]  # here


def closed_over_by_while(w: jax.Array, x: jax.Array) -> jax.Array:
    def turn(carry: Any) -> Any:
        turns, x = carry
        return turns + 1, jnp.tanh(x @ w)

    return jax.lax.while_loop(lambda c: jnp.all(c[1] < 1), turn, (jnp.int32(0), x))[1]


def stacked(w: jax.Array, x: jax.Array) -> Any:
    def layer(x: jax.Array, w: jax.Array) -> Any:
        used = w.astype(jnp.bfloat16)  # here
        return jnp.tanh(x @ used), used

    return jax.lax.scan(layer, x, w)


def not_stacked(w: jax.Array, x: jax.Array) -> Any:
    def layer(x: jax.Array, w: jax.Array) -> Any:
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

    return jax.lax.scan(layer, x, w)[0], w


def kept_per_tick(w: jax.Array, x: jax.Array) -> jax.Array:
    """The backward pass keeps the weights that each tick chose."""

    def tick(x: jax.Array, repeat: jax.Array) -> Any:
        chosen = jax.lax.dynamic_index_in_dim(w, repeat, keepdims=False)  # here
        return jnp.tanh(x @ chosen), None

    return jnp.sum(jax.lax.scan(tick, x, jnp.arange(TURNS, dtype=jnp.int32) // 2)[0])


def chosen_again(w: jax.Array, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def apply(w: jax.Array, x: jax.Array, repeat: jax.Array) -> jax.Array:
        return jnp.tanh(x @ jax.lax.dynamic_index_in_dim(w, repeat, keepdims=False))

    repeats = jnp.arange(TURNS, dtype=jnp.int32) // 2
    return jnp.sum(jax.lax.scan(lambda x, r: (apply(w, x, r), None), x, repeats)[0])


def over_stages(policy: Any) -> Callable[..., jax.Array]:
    """The loss of layers under `vmap` over stages, with a checkpoint of that policy."""

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        hidden = checkpoint_name(x @ w, "hidden")
        return jnp.sin(hidden) @ w

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def tick(x: jax.Array, w: jax.Array) -> Any:
            return jax.vmap(jax.checkpoint(layer, policy=policy))(w, x), None  # here

        return jnp.sum(jax.lax.scan(tick, x, w)[0])

    return loss


POLICIES = jax.checkpoint_policies
STACK = (array(TURNS, STAGES, SIZE, SIZE), array(STAGES, ROWS, SIZE))
BY_NAME = jax.grad(over_stages(POLICIES.save_only_these_names("hidden")))
TICK = STAGES * ROWS * SIZE * 4  # bytes of one value of all stages


def scaled(scale: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x * scale)  # here


def scaled_by_half(scale: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x * scale.astype(x.dtype))


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)  # here


def product_of_halves(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w.astype(x.dtype))


def chosen(default: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, default)  # here


def chosen_in_half(default: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, default.astype(x.dtype)).astype(jnp.float32)


def causal(scores: jax.Array) -> jax.Array:
    places = jnp.arange(SIZE)
    mask = (places[:, None] < places) * jnp.float32(-1e9)
    return jax.nn.softmax(scores + mask).astype(scores.dtype)  # here


def causal_in_half(scores: jax.Array) -> jax.Array:
    """A choice by the same comparison, whose numbers have no dtype of their own."""
    places = jnp.arange(SIZE)
    return jax.nn.softmax(jnp.where(places[:, None] < places, -1e9, scores))


def alibi(scores: jax.Array) -> jax.Array:
    slopes = 2.0 ** -jnp.arange(len(scores))[:, None, None]
    distance = jnp.abs(jnp.arange(SIZE)[:, None] - jnp.arange(SIZE))
    return jax.nn.softmax(scores - slopes * distance).astype(scores.dtype)  # here


def alibi_meant(scores: jax.Array) -> jax.Array:
    slopes = 2.0 ** -jnp.arange(len(scores))[:, None, None]
    distance = jnp.abs(jnp.arange(SIZE)[:, None] - jnp.arange(SIZE))
    wide = scores.astype(jnp.float32) - slopes * distance
    return jax.nn.softmax(wide).astype(scores.dtype)


def sinusoids(like: jax.Array) -> jax.Array:
    half = like.shape[-1] // 2
    angles = jnp.arange(like.shape[-2])[:, None] * 10000 ** (-jnp.arange(half) / half)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def with_places(x: jax.Array) -> jax.Array:
    return (x + sinusoids(x)).astype(x.dtype)  # here


def with_places_in_half(x: jax.Array) -> jax.Array:
    return x + sinusoids(x).astype(x.dtype)


def scaled_and_back(x: jax.Array) -> jax.Array:
    return (x * np.float32(0.125)).astype(x.dtype)  # here


def centred(x: jax.Array) -> jax.Array:
    """Statistics in float32, one of them over the entries that an iota chooses."""
    first = jnp.arange(x.shape[-1]) < 8
    mean = jnp.mean(x.astype(jnp.float32), axis=-1, keepdims=True)
    most = jnp.max(x.astype(jnp.float32) * first, axis=-1, keepdims=True)
    return ((x - mean) / most).astype(x.dtype)


def linear(layer: nnx.Linear, x: jax.Array) -> jax.Array:
    return layer(x)  # here


def linear_asked_for(layer: nnx.Linear, x: jax.Array) -> jax.Array:
    return layer(x.astype(jnp.float32))


def one_hot(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return jax.nn.one_hot(tokens, table.shape[0]) @ table  # here


def one_hot_by_hand(table: jax.Array, tokens: jax.Array) -> jax.Array:
    rows = tokens[:, None] == jnp.arange(table.shape[0])
    return rows.astype(jnp.float32) @ table  # here


def looked_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table[tokens]


def squares(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w) ** 2)


def one_by_one(w: jax.Array, microbatches: jax.Array) -> jax.Array:
    def step(_: None, x: jax.Array) -> Any:
        return None, jax.grad(squares)(w, x)

    _, gradients = jax.lax.scan(step, None, microbatches)  # here
    return w - 0.1 * jnp.mean(gradients, axis=0)


def squares_by_vmap(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w) ** 2)  # here


def side_by_side(w: jax.Array, microbatches: jax.Array) -> jax.Array:
    gradients = jax.vmap(jax.grad(squares_by_vmap), in_axes=(None, 0))(w, microbatches)
    return w - 0.1 * jnp.sum(gradients, axis=0)


def added_up(w: jax.Array, microbatches: jax.Array) -> jax.Array:
    def step(total: jax.Array, x: jax.Array) -> Any:
        return total + jax.grad(squares)(w, x), None

    total, _ = jax.lax.scan(step, jnp.zeros_like(w), microbatches)
    return w - 0.1 * total / len(microbatches)


def held_to_nothing(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x @ w, P(None, None))  # here


def held(w: jax.Array, x: jax.Array) -> jax.Array:
    """A constraint with content, and a gather: one that is followed by the opposite."""
    y = jax.lax.with_sharding_constraint(x @ w, P("data", None))
    return jax.lax.with_sharding_constraint(y.astype(jnp.bfloat16), P(None, None))


def layer() -> nnx.Linear:
    return nnx.eval_shape(lambda: nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0)))


def examples() -> dict[str, Example]:
    """All of them; what the tests are parametrised by."""
    square, rows = SIZE * SIZE * 4, ROWS * SIZE * 4
    halves, scores = half(ROWS, SIZE), half(8, SIZE, SIZE)
    stack, repeats = array(TURNS, SIZE, SIZE), array(2, SIZE, SIZE)
    tokens, table = array(2**16, dtype=jnp.int32), array(2**15, 8)
    microbatches = array(TURNS, ROWS, SIZE)
    in_loop, upcast, per_microbatch = (
        "parameter-in-loop",
        "hidden-upcast",
        "gradient-per-microbatch",
    )
    everything = POLICIES.save_anything_except_these_names("absent")
    return {
        "carried": Example(in_loop, "carried", carried, closed_over, (WEIGHT, X), square),
        "while": Example(
            in_loop, "carried_by_while", carried_by_while, closed_over_by_while, (WEIGHT, X), square
        ),
        "stacked": Example(
            in_loop, "layer", stacked, not_stacked, (stack, half(ROWS, SIZE)), TURNS * square // 2
        ),
        "kept": Example(
            in_loop,
            "tick",
            jax.grad(kept_per_tick, argnums=1),
            jax.grad(chosen_again, argnums=1),
            (repeats, X),
            TURNS * square,
        ),
        "no such name": Example(
            "remat-policy",
            "tick",
            jax.grad(over_stages(POLICIES.save_only_these_names("hiden"))),
            BY_NAME,
            STACK,
            3 * TICK,  # hidden, sin and cos of it
        ),
        "batch axes": Example(
            "remat-policy",
            "tick",
            jax.grad(over_stages(POLICIES.dots_with_no_batch_dims_saveable)),
            BY_NAME,
            STACK,
            3 * TICK,  # hidden, sin and cos of it
        ),
        "everything": Example(
            "remat-policy",
            "tick",
            jax.grad(over_stages(everything)),
            BY_NAME,
            STACK,
            2 * TURNS * TICK,
        ),
        "scale": Example(upcast, "scaled", scaled, scaled_by_half, (array(SIZE), halves), rows),
        "product": Example(upcast, "product", product, product_of_halves, (WEIGHT, halves), rows),
        "choice": Example(upcast, "chosen", chosen, chosen_in_half, (array(SIZE), halves), rows),
        "causal": Example(upcast, "causal", causal, causal_in_half, (scores,), 8 * square),
        "as large": Example(upcast, "causal", causal, causal_in_half, (half(SIZE, SIZE),), square),
        "alibi": Example(upcast, "alibi", alibi, alibi_meant, (scores,), 8 * square),
        "places": Example(
            upcast, "with_places", with_places, with_places_in_half, (half(ROWS, SIZE),), rows
        ),
        "number": Example(upcast, "scaled_and_back", scaled_and_back, centred, (halves,), rows),
        "linear": Example(upcast, "linear", linear, linear_asked_for, (layer(), halves), rows),
        "one-hot": Example("one-hot", "one_hot", one_hot, looked_up, (table, tokens), 2**33),
        "comparison": Example(
            "one-hot", "one_hot_by_hand", one_hot_by_hand, looked_up, (table, tokens), 2**33
        ),
        "scan": Example(
            per_microbatch,
            "one_by_one",
            jax.jit(one_by_one, donate_argnums=0),
            jax.jit(added_up, donate_argnums=0),
            (WEIGHT, microbatches),
            TURNS * square,
        ),
        "vmap": Example(
            per_microbatch,
            "squares_by_vmap",
            jax.jit(side_by_side, donate_argnums=0),
            jax.jit(added_up, donate_argnums=0),
            (WEIGHT, microbatches),
            TURNS * square,
        ),
        "constraint": Example(
            "trivial-constraint",
            "held_to_nothing",
            held_to_nothing,
            held,
            (WEIGHT, X),
            rows,
            "data=8",
        ),
    }
