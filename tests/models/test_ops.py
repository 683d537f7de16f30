"""The functions of `nnx_pipeline.ops`, and two modules that are little more than one of them."""

import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from helpers import (
    assert_close,
    assert_same_placement,
    equations,
    float_rows,
    mesh_of,
    replace,
    small_config,
)
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline import Embed, Layout, ModelConfig, RMSNorm, preset
from nnx_pipeline.config._remat import FULL
from nnx_pipeline.experiments._layer_variants import EINSUM_SCALE
from nnx_pipeline.experiments._replaced import replaced
from nnx_pipeline.lab.mesh import spec_axes
from nnx_pipeline.ops._attention import Options, TokenSpan, allowed, dot_product_attention
from nnx_pipeline.ops._embedding import uses_one_hot
from nnx_pipeline.ops._experts import DenseExperts, ExpertKernels, group_size
from nnx_pipeline.ops._norm import rms_norm
from nnx_pipeline.ops._router import (
    RouterMetrics,
    Routing,
    combine_weights,
    expert_usage,
    load_balance_loss,
    route,
    router_metrics,
)
from nnx_pipeline.ops._self_attention.rotary import rotary_of, timescales
from nnx_pipeline.sharding.layout import place

WHOLE = P(None, None, None, None, None)
EXPERTS, EMBED, MLP = 4, 8, 16  # of one layer of experts


def test_shapes_in_the_signatures_are_checked() -> None:
    """The import hook of conftest.py is at work, inside a trace too."""
    with pytest.raises(jaxtyping.TypeCheckError, match="scale"):
        jax.jit(lambda x, scale: rms_norm(x, scale, epsilon=0.1))(jnp.ones((2, 3)), jnp.ones(4))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset: float) -> None:
    x, scale = float_rows(3, 5, 8), float_rows(8, seed=1)
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-5) * (np.asarray(scale) + offset)
    for functions in ((), EINSUM_SCALE):
        with replaced(functions):
            got = rms_norm(x, scale, epsilon=1e-5, scale_offset=offset)
        assert_close(got, want, 1e-6)


def test_rms_norm_in_bfloat16_squares_in_float32() -> None:
    x = jnp.full((1, 4), 300.0, jnp.bfloat16) + jnp.arange(4, dtype=jnp.bfloat16)
    got = rms_norm(x, jnp.ones(4), epsilon=1e-5)
    wide = np.asarray(x, np.float32)
    want = (wide / np.sqrt(np.mean(wide**2) + 1e-5)).astype(jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got), want)


def test_scale_offset_of_a_new_norm() -> None:
    """A new norm scales by one, whatever offset its stored scale is around."""
    config, x = small_config(), float_rows(2, 16)
    for offset in (0.0, 1.0):
        norm = RMSNorm(replace(config, "model", norm_scale_offset=offset).model, rngs=nnx.Rngs(0))
        assert_close(norm.scale[...], jnp.full(16, 1.0 - offset), 0.0)
        assert_close(norm(x), rms_norm(x, jnp.ones(16), epsilon=1e-5), 1e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_layers_with_a_window_and_a_base_of_their_own_are_not_scaled(window: int | None) -> None:
    scaled = {"rope_scaling": "linear", "rope_factor": 4.0, "rope_amplitude": 1.5}
    of_window = {"sliding_window": window, "rope_window_theta": 100.0}
    config = small_config(model={**scaled, **of_window, "rope_theta": 1e4}).model
    x = float_rows(1, 3, 2, config.head_dim)
    positions = jnp.arange(3, dtype=jnp.int32)[None]
    plain = small_config(model={"rope_theta": 1e4 if window is None else 100.0}).model
    want = rotary_of(plain)(x, positions) * (1.0 if window else 1.5)
    assert_close(rotary_of(config)(x, positions if window else 4 * positions), want, 1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs(interleaved: bool) -> None:
    x, theta = float_rows(2, 3, 2, 6), 100.0
    positions = jnp.array([[0, 1, 2], [7, 5, 0]], jnp.int32)
    want = np.array(x, np.float64)
    for i in range(3):
        one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
        angle = np.asarray(positions, np.float64)[:, :, None] / theta ** (2 * i / 6)
        a, b = np.array(x[..., one], np.float64), np.array(x[..., other], np.float64)
        want[..., one] = a * np.cos(angle) - b * np.sin(angle)
        want[..., other] = b * np.cos(angle) + a * np.sin(angle)
    config = small_config(
        model={"head_dim": 6, "rope_theta": theta, "rope_interleaved": interleaved}
    )
    assert_close(rotary_of(config.model)(x, positions), want, 1e-6)


def test_rotary_scaling() -> None:
    """Wavelengths of Llama 3.1: kept, slowed by 8, and between; and all of them slowed by 3."""
    sizes = {"head_dim": 8, "rope_theta": 1e4}
    llama3 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_length": 600}
    limits = {"rope_low_frequency": 1.0, "rope_high_frequency": 4.0}
    wavelengths = 2 * np.pi * np.array([1, 10, 100, 1000])
    # Up to 600 / 4 they are kept, and above 600 slowed in full; here that is two and two.
    want = wavelengths * [1, 1, 8, 8]
    found = timescales(small_config(model={**sizes, **llama3, **limits}).model)
    np.testing.assert_allclose(2 * np.pi * found, want, rtol=1e-6)
    # With an original length of 1,500 the third is between the limits, as it turns 2.39 times.
    turns = 1500 / wavelengths[2]
    share = (turns - 1) / (4 - 1)
    want = 1 / (share / wavelengths[2] + (1 - share) / (8 * wavelengths[2]))
    between = {**sizes, **llama3, **limits, "rope_original_length": 1500}
    found = timescales(small_config(model=between).model)
    np.testing.assert_allclose(2 * np.pi * found[2], want, rtol=1e-6)
    linear = {"rope_scaling": "linear", "rope_factor": 3.0}
    found = timescales(small_config(model={**sizes, **linear}).model)
    np.testing.assert_allclose(2 * np.pi * found, 3 * wavelengths, rtol=1e-6)


def test_rotary_scaling_by_yarn() -> None:
    """Each pair turns 10 times less than the one before, so that a limit lies at a fraction."""
    sizes = {"head_dim": 12, "rope_theta": 1e6, "rope_scaling": "yarn", "rope_factor": 4.0}
    # The first pair turns 300 times in the original length, and pair i so often over 10^i: 30
    # turns are pair 1, and 0.5 are pair 2.78, rounded outwards 3. Between them is pair 2.
    limits = {"rope_low_frequency": 0.5, "rope_high_frequency": 29.9}
    length = {"rope_original_length": round(300 * 2 * np.pi)}
    found = timescales(small_config(model={**sizes, **limits, **length}).model)
    slowed = np.array([0, 0, 1 / 2, 1, 1, 1])
    want = 1 / (10.0 ** -np.arange(6) * (slowed / 4 + 1 - slowed))
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_allowed_reads_backwards_and_within_the_segment() -> None:
    segments = jnp.array([[1, 1, 2, 0, 0]], jnp.int32)
    want = np.array(
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [0, 0, 1, 0, 0],
            [0, 0, 0, 1, 0],
            [0, 0, 0, 1, 1],  # padding reads padding
        ],
        bool,
    )
    packed, whole = TokenSpan(0, 5, segments), TokenSpan(0, 5, None)
    np.testing.assert_array_equal(allowed(packed, packed)[0], want)
    np.testing.assert_array_equal(allowed(whole, whole)[0], np.tri(5, dtype=bool))


def test_attention_reads_the_kv_head_of_its_group() -> None:
    query, key = float_rows(1, 4, 6, 5), float_rows(1, 4, 2, 5, seed=1)
    value = float_rows(1, 4, 2, 5, seed=2)
    got = dot_product_attention(query, key, value, grouped=WHOLE, options=Options(scale=0.3))
    want = np.zeros(got.shape)
    for head in range(6):
        q, k, v = (
            np.asarray(x, np.float64)[0]
            for x in (query[:, :, head], key[:, :, head // 3], value[:, :, head // 3])
        )
        scores = np.where(np.tril(np.ones((4, 4))) > 0, 0.3 * q @ k.T, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want[0, :, head] = weights / weights.sum(-1, keepdims=True) @ v
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("block", [None, 3, 1])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_attention_and_its_derivative(
    dtype: str, tolerance: float, packed: bool, block: int | None
) -> None:
    """By hand and in blocks, against JAX's derivative of a plain softmax in float32."""
    query, key, value, wanted = (
        float_rows(2, 8, heads, 4, seed=seed) for seed, heads in enumerate((4, 2, 2, 4))
    )
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0], [1] * 8]) if packed else None

    def plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * 0.5
        scores = jnp.where(allowed(*[TokenSpan(0, 8, segments)] * 2)[:, None], scores, -jnp.inf)
        return jnp.sum(wanted * jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value))

    def by_hand(*arrays: jax.Array) -> jax.Array:
        options = Options(scale=0.5, block=block)
        mixed = dot_product_attention(*arrays, segments, grouped=WHOLE, options=options)
        return jnp.sum(wanted * mixed.astype(jnp.float32))

    expected = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(query, key, value)
    inputs = [x.astype(dtype) for x in (query, key, value)]
    loss, found = jax.jit(jax.value_and_grad(by_hand, (0, 1, 2)))(*inputs)
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    assert_close(
        [loss, *(x.astype(jnp.float32) for x in found)], jax.tree.leaves(expected), tolerance
    )


@pytest.mark.parametrize(("length", "block", "size"), [(8, 2, 2), (8, None, 8), (1536, None, 512)])
def test_scores_of_one_block_and_of_no_later_key(length: int, block: int | None, size: int) -> None:
    def loss(query: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.sum(
            dot_product_attention(query, key, key, grouped=WHOLE, options=Options(block=block))
        )

    head_dim = 3
    x = jax.ShapeDtypeStruct((1, length, 1, head_dim), jnp.float32)
    shapes = [
        equation.outvars[0].aval.shape
        for equation in equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, x).jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    # Of each block: the scores in either pass, and the gradient of the weights.
    scores = [(1, 1, size, 1, stop) for stop in range(size, length + 1, size)]
    found = [shape for shape in shapes if head_dim not in shape]
    assert sorted(found) == sorted(3 * scores)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_in_half_precision_masks_finitely(dtype: str) -> None:
    query, key, value = (float_rows(1, 3, 2, 4, seed=s).astype(dtype) for s in range(3))
    got = dot_product_attention(query, key, value, jnp.array([[1, 2, 0]]), grouped=WHOLE)
    assert got.dtype == jnp.dtype(dtype)
    assert_close(got, value, 1e-6)  # every place reads only itself


def test_the_router_takes_the_softmax_of_the_best() -> None:
    logits = jnp.array([[1.0, 4.0, 2.0, 3.0], [0.0, 0.0, -1.0, 5.0]])
    weights, experts = route(logits, Routing(2))
    np.testing.assert_array_equal(experts, [[1, 3], [3, 0]])
    share = np.exp([4.0, 3.0]) / np.exp([4.0, 3.0]).sum()
    assert_close(weights[0], share, 1e-6)
    combined = combine_weights(weights, experts, 4)
    assert_close(combined[0], np.array([0, share[0], 0, share[1]]), 1e-6)
    assert_close(jnp.sum(combined, axis=-1), jnp.ones(2), 1e-6)


@pytest.mark.parametrize(
    ("score", "normalize", "expected"),
    [
        ("softmax", True, (4 / 7, 3 / 7)),
        ("softmax", False, (4 / 10, 3 / 10)),
        ("sigmoid", True, (4 / 5 / 1.55, 3 / 4 / 1.55)),
        ("sigmoid", False, (4 / 5, 3 / 4)),
    ],
)
def test_weights_of_the_router(score: str, normalize: bool, expected: tuple[float, ...]) -> None:
    """Of scores whose exponentials are 1, 3, 2 and 4."""
    logits = jnp.log(jnp.array([[1.0, 3.0, 2.0, 4.0]]))
    weights, experts = route(logits, Routing(2, score, normalize, scale=2.5))
    assert experts.tolist() == [[3, 1]]
    assert_close(weights, 2.5 * np.array([expected], np.float32), 1e-6)


def test_a_bias_and_groups_choose_and_do_not_weigh() -> None:
    """Groups {0, 1}, {2, 3} and {4, 5}: the two best scores of a group count, and not its best."""
    scores = jnp.array([[0.9, 0.1, 0.6, 0.7, 0.2, 0.8]])
    logits, bias = jnp.log(scores / (1 - scores)), jnp.array([0.0, 0.0, 0.0, 0.0, 0.55, 0.0])
    of = functools.partial(Routing, 2, "sigmoid", False)
    assert route(logits, of())[1].tolist() == [[0, 5]]
    assert route(logits, of(groups=3))[1].tolist() == [[3, 2]]
    assert route(logits, of(groups=3, groups_per_token=2))[1].tolist() == [[0, 3]]
    weights, experts = route(logits, of(groups=3), bias)
    assert experts.tolist() == [[5, 4]]
    assert_close(weights, jnp.array([[0.8, 0.2]]), 1e-6)
    gradient = jax.grad(lambda bias: jnp.sum(route(logits, of(groups=3), bias)[0]))(bias)
    assert gradient.tolist() == [0.0] * 6


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_what_a_router_reports(score: str) -> None:
    """By its formulas in float64."""
    logits, dropped = 3 * float_rows(2, 5, 4), jnp.array([0.25, 0.0])
    usage = expert_usage(logits, jax.lax.top_k(logits, 2)[1], dropped, score=score)
    wide = np.asarray(logits, np.float64)
    scores = np.exp(wide) if score == "softmax" else 1 / (1 + np.exp(-wide))
    p = scores / scores.sum(axis=-1, keepdims=True)
    assert_close(usage.probability, p.mean(axis=1), 1e-5)
    assert_close(usage.entropy, -(p * np.log(p)).sum(axis=-1).mean(axis=1), 1e-5)
    squared = np.log(np.exp(wide).sum(axis=-1)) ** 2
    assert_close(usage.squared_log_sum, squared.mean(axis=1), 1e-5)
    mean = jax.tree.map(lambda each: each.mean(axis=0), usage)
    found = RouterMetrics.unpacked(router_metrics(mean))
    load = mean.chosen / 2
    expected = (load_balance_loss(mean), mean.squared_log_sum, mean.dropped, mean.entropy, load)
    assert_close(found, RouterMetrics(*expected), 1e-6)
    assert_close(jnp.sum(found.load), 1.0, 1e-6)


def test_load_balance_by_hand() -> None:
    """experts · Σ_e (choices of e per token) · (mean probability of e)."""
    logits = float_rows(4, 6, 3)
    chosen = jax.lax.top_k(logits, 2)[1]
    probability = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)
    counts = np.eye(3)[np.asarray(chosen)].sum(axis=2)

    def by_hand(rows: slice) -> float:
        share, mean = counts[rows].mean(axis=(0, 1)), probability[rows].mean(axis=(0, 1))
        return 3 * float(np.sum(share * mean))

    usage = expert_usage(logits, chosen)

    def of_microbatches(count: int) -> jax.Array:
        return load_balance_loss(
            jax.tree.map(lambda rows: rows.reshape(count, -1, *rows.shape[1:]).mean(axis=1), usage)
        )

    whole, halves = of_microbatches(1), of_microbatches(2)
    assert whole.tolist() == pytest.approx([by_hand(slice(0, 4))], rel=1e-5)
    assert halves.tolist() == pytest.approx([by_hand(slice(0, 2)), by_hand(slice(2, 4))], rel=1e-5)
    assert float(whole[0]) != pytest.approx(float(halves.mean()), rel=1e-5)


def test_load_balance_is_lowest_when_even() -> None:
    """k with even use of the experts, and more when all tokens go to the same ones."""
    even = jnp.array([[0, 1], [2, 3]])[None]
    assert float(load_balance_loss(expert_usage(jnp.zeros((1, 2, 4)), even))[0]) == pytest.approx(
        2.0
    )
    steep = jnp.broadcast_to(jnp.array([9.0, 9.0, 0.0, 0.0]), (1, 2, 4))
    same = jnp.array([[0, 1], [0, 1]])[None]
    assert float(load_balance_loss(expert_usage(steep, same))[0]) == pytest.approx(4.0, rel=1e-3)


def embed(method: str, **changes: object) -> Embed:
    config = replace(small_config(), "model", embedding=method, **changes).model
    return Embed(config, rngs=nnx.Rngs(0))


def test_gather_and_one_hot_read_the_same_rows() -> None:
    tokens = jnp.array([[0, 31, 5], [7, 7, 1]], jnp.int32)
    gather, one_hot = embed("gather"), embed("one_hot")
    want = np.asarray(gather.embedding[...])[np.asarray(tokens)]
    np.testing.assert_array_equal(gather(tokens), want)
    np.testing.assert_array_equal(one_hot(tokens), want)
    assert embed("gather", dtype="bfloat16")(tokens).dtype == jnp.bfloat16


@pytest.mark.parametrize("mode", ["explicit", "auto"])
@pytest.mark.parametrize("method", ["gather", "one_hot"])
def test_embedding_on_a_mesh(method: str, mode: str) -> None:
    """Values and gradients with the table spread over all devices."""
    tokens = np.random.default_rng(0).integers(32, size=(8, 4), dtype=np.int32)
    rows = P(("stage", "fsdp"), None)
    plain = embed(method)

    def gradient(out: P) -> Any:
        return jax.jit(jax.grad(lambda table, ids: jnp.sum(jnp.sin(table(ids, out=out)))))

    want = gradient(P())(plain, jnp.asarray(tokens))
    mesh = mesh_of("stage=2,fsdp=2,tensor=2", mode)
    with jax.set_mesh(mesh):
        table = jax.device_put(plain, NamedSharding(mesh, P(("stage", "tensor"), "fsdp")))
        got = gradient(P(*rows, None))(table, jax.device_put(tokens, NamedSharding(mesh, rows)))
    assert_close(got, want, 1e-5)
    assert_same_placement(got, table)


def abstract_embed(vocab: int, method: str = "auto", dtype: str = "bfloat16") -> Embed:
    config = ModelConfig(
        vocab_size=vocab,
        embed_dim=4096,
        mlp_dim=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        dtype=dtype,
        embedding=method,
    )
    return jax.eval_shape(lambda: Embed(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("vocab", "tokens", "dtype", "one_hot"),
    [
        (102_400, 8 * 4096, "bfloat16", False),  # 6.7 GB
        (32_000, 8 * 4096, "bfloat16", True),  # 2.10e9 bytes, below 2 · 1024³
        (32_768, 8 * 4096, "bfloat16", True),  # exactly 2 · 1024³
        (32_769, 8 * 4096, "bfloat16", False),
        (32_000, 8 * 4096, "float32", False),
        (128, 16 * 64, "float32", True),
    ],
)
def test_auto_takes_one_hot_up_to_two_gigabytes(
    vocab: int, tokens: int, dtype: str, one_hot: bool
) -> None:
    assert uses_one_hot("auto", tokens, vocab, dtype) is one_hot


def test_a_named_method_is_taken_whatever_the_size() -> None:
    assert uses_one_hot("one_hot", 8 * 4096, 102_400, "bfloat16")
    assert not uses_one_hot("gather", 1, 32, "bfloat16")


def test_auto_does_as_it_says() -> None:
    """The lookup of a large vocabulary holds no array as large as its one-hot rows."""
    tokens = jax.ShapeDtypeStruct((8, 4096), jnp.int32)

    def makes_product(vocab: int) -> bool:
        jaxpr = jax.make_jaxpr(lambda table, ids: table(ids))(abstract_embed(vocab), tokens)
        return "dot_general" in str(jaxpr)

    assert makes_product(32_000)
    assert not makes_product(102_400)


@pytest.mark.parametrize("method", ["gather", "one_hot"])
@pytest.mark.parametrize("token", [32, 1000, -1])
def test_tokens_outside_the_table_read_nan(method: str, token: int) -> None:
    """A wrong id is seen at once, and the same whichever way `auto` takes."""
    rows = embed(method)(jnp.array([[3, token]], jnp.int32))
    assert np.all(np.isfinite(rows[0, 0]))
    assert np.all(np.isnan(rows[0, 1]))


def gradients_of_expert_kernels() -> tuple[list[Any], list[Any]]:
    """The products that give gradients of expert kernels, and all equations of the program."""
    layout = Layout()
    tokens = layout.spec("batch", None, None)
    into, out = ("expert", "embed_of_expert", "mlp"), ("expert", "mlp", "embed_of_expert")
    size = {"expert": EXPERTS, "embed_of_expert": EMBED, "mlp": MLP}
    kernels = ExpertKernels(
        *(jnp.ones([size[name] for name in axes]) for axes in (into, into, out))
    )

    def loss(kernels: ExpertKernels) -> jax.Array:
        x, weights = place(jnp.ones((4, 5, EMBED)), tokens), place(jnp.ones((4, 5, 1)), tokens)
        choice = weights, place(jnp.zeros((4, 5, 1), jnp.int32), tokens)
        stored = [layout.spec(*axes) for axes in (into, into, out)]
        kernels = ExpertKernels(*map(place, kernels, stored))
        return jnp.sum(DenseExperts()(x, choice, kernels, layout=layout, remat=FULL).output)

    everything = list(equations(jax.make_jaxpr(jax.grad(loss))(kernels)))
    products = [
        one
        for one in everything
        if one.primitive.name == "dot_general"
        and math.prod(one.outvars[0].aval.shape) == EXPERTS * EMBED * MLP
    ]
    assert len(products) == 3
    return products, everything


@pytest.mark.parametrize(
    ("platform", "first"), [("cpu", EMBED), ("tpu", EXPERTS), ("gpu", EXPERTS)]
)
def test_gradients_of_expert_kernels_are_made_in_the_order_of_the_compiler(
    platform: str, first: int
) -> None:
    """For the CPU with embed first, so that it transposes no hidden units."""
    device = AbstractDevice(device_kind="any", num_cores=None, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        products, _ = gradients_of_expert_kernels()
    shapes = [[size for size in one.outvars[0].aval.shape if size > 1] for one in products]
    assert [shape[0] for shape in shapes] == [first] * 3


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_gradients_of_expert_kernels_are_summed_whole(mode: str) -> None:
    """No product is sharded over embed, which XLA for TPU would cut into one per device."""
    with jax.set_mesh(mesh_of("fsdp=2,expert=2", mode)):
        products, everything = gradients_of_expert_kernels()
    for product in products:
        value = product.outvars[0]
        if mode == "auto":
            value = reader_of(value, "transpose", everything).outvars[0]
            spec = reader_of(value, "sharding_constraint", everything).params["sharding"].spec
        else:
            spec = value.aval.sharding.spec
        assert spec_axes(spec) == {"expert"}


def reader_of(value: Any, primitive: str, everything: list[Any]) -> Any:
    """The one equation that reads a value, which has to be of this primitive.

    Since JAX 0.12 a sharding constraint is in a jitted function of its own.
    """
    (reader,) = (one for one in everything if value in one.invars)
    if reader.primitive.name == "jit":
        (reader,) = reader.params["jaxpr"].eqns
    assert reader.primitive.name == primitive
    return reader


@pytest.mark.parametrize(
    ("platform", "rows", "group"),
    [
        ("cpu", 4, 8),
        ("cpu", 64, 2),  # 2 · 64 · 128 · 256 operations are 4.2e6 of one expert
        ("cpu", 128, 1),
        ("tpu", 128, 8),
        ("tpu", 62_500, 2),
        ("gpu", 125_000, 1),
    ],
)
def test_a_group_of_experts_is_large_enough_for_its_platform(
    platform: str, rows: int, group: int
) -> None:
    device = AbstractDevice(device_kind="any", num_cores=None, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert group_size(rows, (8, 128, 256), Layout()) == group


def test_groups_of_experts_are_those_that_the_field_names() -> None:
    small, large = (preset(name).model for name in ("mixtral-small", "mixtral-8x7b"))
    text = " ".join(inspect.getsource(ModelConfig).split())
    assert "one expert of Mixtral 8x7B at a time, and of `mixtral-small` eight for 1,024" in text
    assert "tokens on a device and four for 2,048" in text
    device = AbstractDevice(device_kind="any", num_cores=None, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        for model, rows, group in ((small, 1024, 8), (small, 2048, 4), (large, 1024, 1)):
            kernel = (model.num_experts, model.embed_dim, model.mlp_dim)
            assert group_size(rows, kernel, Layout()) == group


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_experts_and_their_derivatives_against_a_sum_over_experts(
    group: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The derivatives are written by hand; those of the sum are JAX's."""
    monkeypatch.setattr("nnx_pipeline.ops._experts.ambient_platform", lambda: platform)
    x = float_rows(3, 5, EMBED)
    weights = float_rows(3, 5, 2, seed=1)
    chosen = jnp.arange(30).reshape(3, 5, 2) % EXPERTS
    into, out = (EXPERTS, EMBED, MLP), (EXPERTS, MLP, EMBED)
    shapes = (into, into, out)
    kernels = ExpertKernels(*(float_rows(*one, seed=i) / 4 for i, one in enumerate(shapes, 2)))

    def dense(x: jax.Array, weights: jax.Array, kernels: ExpertKernels) -> jax.Array:
        experts = DenseExperts(group)
        return experts(x, (weights, chosen), kernels, layout=Layout(), remat=FULL).output

    def summed(x: jax.Array, weights: jax.Array, kernels: ExpertKernels) -> jax.Array:
        total = jnp.zeros_like(x)
        for expert, (gate, up, down) in enumerate(zip(*kernels, strict=True)):
            share = jnp.where(chosen == expert, weights, 0).sum(-1, keepdims=True)
            total += share * ((jax.nn.silu(x @ gate) * (x @ up)) @ down)
        return total

    def with_gradients(mix: Any) -> Any:
        result, pull_back = jax.vjp(mix, x, weights, kernels)
        return result, pull_back(jnp.cos(result))

    assert_close(with_gradients(dense), with_gradients(summed), 1e-5)
