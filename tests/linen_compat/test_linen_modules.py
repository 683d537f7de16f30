"""Each Linen class against its NNX counterpart, to the bit; what it starts with and refuses."""

import dataclasses
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.errors import ScopeParamShapeError
from helpers import float_rows, fusions_of_a_user, small_config
from linen_helpers import assert_same_bits, part_of
from test_deepseek_linen import DEEPSEEK

import linen_compat as linen
import nnx_pipeline as native
from linen_compat.formats._names import (
    ATTENTION,
    EXPERTS,
    EXPERTS_OF_DEEPSEEK,
    MLP,
    NORMS,
    OUTSIDE,
    PLAIN_QUERY,
    QK_NORMS,
    of_layer,
)
from linen_compat.modules.parameters import axes_of
from nnx_pipeline import InputError, ModelConfig
from nnx_pipeline.sharding.dropout import sequence_keys
from tests.pipeline.test_random_options import LLAMA3

pytestmark = pytest.mark.jax_alone

BATCH, LENGTH = 2, 6
MOE = small_config(model={"dropout_rate": 0.25}).model
DENSE = small_config(model={"num_experts": 1, "num_experts_per_token": 1}).model
QWEN3 = dataclasses.replace(MOE, qk_norm=True)
# The bias has a gradient, and queries are made without a latent vector.
OF_DEEPSEEK = dataclasses.replace(
    small_config(model=DEEPSEEK).model, router_bias_in_weights=True, q_lora_rank=None
)
DEEPSEEK_LAYER = (*NORMS, *PLAIN_QUERY, *EXPERTS_OF_DEEPSEEK)
QK_ATTENTION = (*ATTENTION, *QK_NORMS)
QWEN3_LAYER = of_layer(4, qk_norm=True)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(32, size=(BATCH, LENGTH)), jnp.int32)
POSITIONS = jnp.asarray([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]], jnp.int32)
SEGMENTS = jnp.asarray([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2]], jnp.int32)
PACKED = {"positions": POSITIONS, "segment_ids": SEGMENTS}


class Pair(NamedTuple):
    """A class of each style, and how the parameters of one are named in the other."""

    linen: Any
    nnx: Any
    config: ModelConfig
    names: tuple[Any, ...]
    nnx_part: str = ""
    linen_part: str = ""
    call: Any = MappingProxyType({})


PAIRS = {
    "norm": Pair(
        linen.RMSNorm, native.RMSNorm, MOE, NORMS, "attention_norm", "pre_self_attention_layer_norm"
    ),
    "embed": Pair(linen.Embed, native.Embed, MOE, OUTSIDE, "embedding.", "token_embedder"),
    "attention": Pair(
        linen.Attention, native.Attention, MOE, ATTENTION, "attention", "self_attention", PACKED
    ),
    "qk norm": Pair(
        linen.Attention,
        native.Attention,
        QWEN3,
        QK_ATTENTION,
        "attention",
        "self_attention",
        PACKED,
    ),
    "mlp": Pair(linen.MlpBlock, native.MLP, DENSE, MLP, "feed_forward", "mlp"),
    "moe": Pair(linen.MoeBlock, native.RoutedMoE, MOE, EXPERTS, "feed_forward", "MoeBlock_0"),
    "mixtral": Pair(linen.MixtralDecoderLayer, native.DecoderLayer, MOE, of_layer(4), call=PACKED),
    "qwen3 moe": Pair(
        linen.Qwen3MoeDecoderLayer, native.DecoderLayer, QWEN3, QWEN3_LAYER, call=PACKED
    ),
    "llama": Pair(linen.LlamaDecoderLayer, native.DecoderLayer, DENSE, of_layer(1), call=PACKED),
    "deepseek": Pair(
        linen.DeepSeekMoELayer, native.DecoderLayer, OF_DEEPSEEK, DEEPSEEK_LAYER, call=PACKED
    ),
}


def with_fields(config: ModelConfig, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**vars(config), **changes})


def weighed(result: Any) -> jax.Array:
    """A number that every entry of a module's output has its own share in."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(result)]
    return sum((jnp.sum(leaf * float_rows(*leaf.shape, seed=9)) for leaf in leaves), jnp.float32(0))


def both(pair: Pair, config: ModelConfig, x: jax.Array, call: dict[str, Any]) -> Any:
    """(result, gradients) of the Linen and of the NNX module with the same weights, jitted."""
    model = jax.jit(lambda: pair.nnx(config, rngs=nnx.Rngs(0)))()
    # Initial scales are all one, and would hide that they are not read.
    model = jax.tree.map(lambda leaf: leaf + 0.1 * float_rows(*leaf.shape, seed=3), model)

    def as_params(tree: Any) -> Any:
        return part_of(tree, pair.names, pair.nnx_part, pair.linen_part)

    module, trainable = pair.linen(config), x.dtype != jnp.int32

    def evaluate(apply: Any, weights: Any) -> Any:
        def loss(weights: Any, x: jax.Array, arrays: Any) -> Any:
            result = apply(weights, x, **arrays)
            return weighed(result), result

        of = (0, 1) if trainable else (0,)
        run = jax.jit(jax.grad(loss, of, has_aux=True), compiler_options=fusions_of_a_user())
        return run(weights, x, dict(call))

    got = evaluate(
        lambda params, x, **rest: module.apply({"params": params}, x, **rest), as_params(model)
    )
    (of_model, *rest), result = evaluate(lambda model, x, **call: model(x, **call), model)
    return got, ((as_params(of_model), *rest), result)


def test_what_orbax_restores_is_applied_without_jit() -> None:
    """It restores arrays of NumPy."""
    model = linen.Transformer(small_config(model={"num_layers": 1}))
    variables = nn.unbox(model.init(jax.random.key(0), TOKENS))
    restored = jax.tree.map(np.asarray, variables)
    np.testing.assert_allclose(
        model.apply(restored, TOKENS), model.apply(variables, TOKENS), rtol=0, atol=1e-6
    )


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_equal_nnx(name: str, dtype: str) -> None:
    pair = PAIRS[name]
    config = with_fields(pair.config, dtype=dtype)
    rows = float_rows(BATCH, LENGTH, config.embed_dim).astype(dtype)
    got, want = both(pair, config, TOKENS if name == "embed" else rows, pair.call)
    assert_same_bits(got, want, zero="dropped")  # dense experts take every choice


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "call"),
    [
        ("norm", {"norm_scale_offset": 1.0, "norm_epsilon": 0.1}, {}),
        ("embed", {"embedding": "one_hot"}, {}),
        ("attention", {"attention_scale": 0.3, "rope_theta": 10.0}, {}),
        ("attention", {"attention": "chunked", "attention_block": 2, "sliding_window": 3}, {}),
        ("qk norm", {"attention_scale": 0.3, "norm_scale_offset": 1.0, **LLAMA3}, {}),
        ("mixtral", {}, {**PACKED, "keys": sequence_keys(jax.random.key(5), BATCH)}),
    ],
)
def test_options_equal_nnx(name: str, changes: dict[str, Any], call: dict[str, Any]) -> None:
    """Whatever the config or the call says: nothing is read in one style only."""
    pair = PAIRS[name]
    config = with_fields(pair.config, **changes)
    x = TOKENS if name == "embed" else float_rows(BATCH, LENGTH, config.embed_dim)
    got, want = both(pair, config, x, call)
    assert_same_bits(got, want)


# ---- initial values ------------------------------------------------------------------------------

WIDE = ModelConfig(
    vocab_size=512,
    embed_dim=128,
    mlp_dim=256,
    num_layers=1,
    num_heads=16,
    num_kv_heads=8,
    head_dim=16,
    num_experts=4,
    num_experts_per_token=2,
    dtype="float32",
)
CUT_OFF = 2 / 0.8796  # a normal distribution cut off at 2 σ has 0.8796 of its standard deviation


def initial(module: nn.Module, x: jax.Array) -> dict[str, np.ndarray]:
    variables = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))["params"]
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(v) for p, v in leaves}


# What MaxText's own checkpoints of step 0 hold, by the formulas that fit their standard deviations.
DISTRIBUTIONS = {
    "self_attention/query/kernel": (1 / np.sqrt(128 * 16), False),
    "self_attention/key/kernel": (1 / np.sqrt(128), False),
    "self_attention/value/kernel": (1 / np.sqrt(128), False),
    "self_attention/out/kernel": (1 / np.sqrt(16 * 16), False),
    "MoeBlock_0/gate/kernel": (1 / np.sqrt(128), True),
    "MoeBlock_0/wi_0": (1 / np.sqrt(4 * 256), True),
    "MoeBlock_0/wi_1": (1 / np.sqrt(4 * 256), True),
    "MoeBlock_0/wo": (1 / np.sqrt(4 * 128), True),
}


def assert_distributed(values: np.ndarray, deviation: float, cut_off: bool) -> None:
    assert float(values.std()) == pytest.approx(deviation, rel=0.03)
    assert abs(float(values.mean())) < 5 * deviation / np.sqrt(values.size)
    largest = float(np.abs(values).max()) / deviation
    assert largest <= CUT_OFF * 1.0001 if cut_off else largest > 2.8


def test_weights_start_as_in_maxtext() -> None:
    found = initial(linen.MixtralDecoderLayer(WIDE), jnp.zeros((1, 4, 128)))
    for path, (deviation, cut_off) in DISTRIBUTIONS.items():
        if path == "MoeBlock_0/gate/kernel":  # too few for 3 %
            continue
        assert_distributed(found.pop(path), deviation, cut_off)
    assert np.std(found.pop("MoeBlock_0/gate/kernel")) == pytest.approx(1 / np.sqrt(128), rel=0.1)
    assert set(found) == {
        "pre_self_attention_layer_norm/scale",
        "post_self_attention_layer_norm/scale",
    }
    assert all(np.all(scale == 1.0) for scale in found.values())


def test_weights_outside_layers_and_of_the_mlp_start_as_in_maxtext() -> None:
    table = initial(linen.Embed(WIDE), jnp.zeros((1, 4), jnp.int32))
    assert_distributed(table["embedding"], 1.0, False)
    tied = initial(linen.Embed(with_fields(WIDE, tied_embeddings=True)), jnp.zeros((1, 4), int))
    assert_distributed(tied["embedding"], 1 / np.sqrt(128), False)
    dense = with_fields(WIDE, num_experts=1, num_experts_per_token=1)
    for path, values in initial(linen.MlpBlock(dense), jnp.zeros((1, 4, 128))).items():
        assert_distributed(values, 1 / np.sqrt(256 if path == "wo/kernel" else 128), True)


def test_the_query_kernel_makes_up_for_the_scale_of_attention() -> None:
    """1 / sqrt(head_dim) is in the kernel or in the scale, and a scale starts around its offset."""
    x = jnp.zeros((1, 4, 128))
    plain = initial(linen.Attention(WIDE), x)["query/kernel"]
    scaled = initial(linen.Attention(with_fields(WIDE, attention_scale=0.25)), x)["query/kernel"]
    np.testing.assert_allclose(scaled * 0.25, plain, rtol=1e-6)
    offset = initial(linen.RMSNorm(with_fields(WIDE, norm_scale_offset=1.0)), x)["scale"]
    assert np.all(offset == 0.0)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "config", "message"),
    [
        (linen.MixtralDecoderLayer, DENSE, "num_experts=1; use LlamaDecoderLayer, or set"),
        (linen.LlamaDecoderLayer, MOE, "num_experts=4; use MixtralDecoderLayer, or set"),
        (
            linen.MixtralDecoderLayer,
            with_fields(MOE, router_bias=True),
            "has no latent attention or shared experts, .* use DeepSeekMoELayer",
        ),
        (
            linen.MixtralDecoderLayer,
            with_fields(MOE, num_shared_experts=1),
            "and the config has .* num_shared_experts=1; use DeepSeekMoELayer",
        ),
        (linen.MixtralDecoderLayer, QWEN3, "needs qk_norm=False, .* use Qwen3MoeDecoderLayer, or"),
        (linen.Qwen3MoeDecoderLayer, MOE, "needs qk_norm=True, .* use MixtralDecoderLayer, or set"),
        (
            linen.MixtralDecoderLayer,
            OF_DEEPSEEK,
            "has no latent attention or shared experts, .* use DeepSeekMoELayer",
        ),
        (linen.DeepSeekMoELayer, MOE, "needs latent attention .* use MixtralDecoderLayer"),
    ],
)
def test_a_layer_of_another_model(layer: Any, config: ModelConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        layer(config).init(jax.random.key(0), float_rows(1, 4, 16))


def test_a_logical_axis_that_maxtext_does_not_have() -> None:
    with pytest.raises(
        InputError, match="logical axis 'q_head' is not known; did you mean 'q_heads'"
    ):
        axes_of(("embed", "q_head", None))


def test_a_weight_of_another_shape_is_named() -> None:
    module, x = linen.RMSNorm(MOE), float_rows(1, 4, 16)
    with pytest.raises(ScopeParamShapeError, match="scale"):
        module.apply({"params": {"scale": jnp.ones(8)}}, x)


def test_public_names() -> None:
    for name in linen.__all__:
        assert getattr(linen, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Mixtrals'"):
        _ = linen.Mixtrals
