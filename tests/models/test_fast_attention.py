"""Attention whose scores never exist as a whole, beside a plain softmax and JAX's derivative."""

import dataclasses
import functools
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    float_rows,
    largest_array,
    mesh_of,
    missing,
    optax_promotion,
    small_config,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from nnx_pipeline import Config, InputError, Layout, MeshConfig
from nnx_pipeline.experiments._layer_variants import MASK_ARRAY
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.experiments._replaced import replaced
from nnx_pipeline.lab._report.tables import measurement_view
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.ops._attention import Options, TokenSpan, allowed, dot_product_attention
from nnx_pipeline.ops._fast_attention import cudnn, kernels
from nnx_pipeline.ops._fast_attention.chunked import Tiling, computed_tiles, tiles_needed
from nnx_pipeline.ops._fast_attention.kernels import (
    auto_attention,
    chosen,
    chunked_attention,
    flash_attention,
)
from nnx_pipeline.ops._fast_attention.splash import Splash
from nnx_pipeline.pipeline.stage.apply import map_stages

WHOLE = P(None, None, None, None, None)
HEADS, KEYS, SCALE = 6, 2, 0.5


def heads_of(length: int, *, rows: tuple[int, ...] = (2,), dtype: str = "float32") -> list[Any]:
    """Query, key and value: three query heads read each of two key heads."""
    return [
        float_rows(*rows, length, heads, 4, seed=seed).astype(dtype)
        for seed, heads in enumerate((HEADS, KEYS, KEYS))
    ]


def segments_of(length: int) -> Any:
    """Two rows: documents that end within a block, and one document before some padding."""
    place = np.arange(length)
    packed = 1 + (place > length // 3) + (place > length // 2 + 1)
    return jnp.array([packed, np.where(place < length - 3, 1, 0)], jnp.int32)


def plain(
    query: Any, key: Any, value: Any, segments: Any, window: int | None, cap: float | None = None
) -> Any:
    """A softmax over all keys, with the rule of what may be read written out."""
    length = query.shape[1]
    key, value = (jnp.repeat(x, HEADS // KEYS, axis=2) for x in (key, value))
    apart = np.arange(length)[:, None] - np.arange(length)
    seen = (apart >= 0) & (apart < (window or length))
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    scores = SCALE * jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    scores = jnp.where(jnp.broadcast_to(seen, (len(query), length, length))[:, None], scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


def with_gradients(attend: Any, *arrays: Any) -> Any:
    result, pull_back = jax.vjp(attend, *arrays)
    return result, *pull_back(jnp.cos(result))


def check(attention: Any, length: int, packed: bool, window: int | None, **options: Any) -> None:
    arrays, segments = heads_of(length), segments_of(length) if packed else None
    how = Options(scale=SCALE, window=window, **options)

    def attend(*arrays: Any) -> Any:
        return attention(*arrays, segments, grouped=WHOLE, options=how)

    cap = how.soft_cap
    expected = with_gradients(lambda *a: plain(*a, segments, window, cap), *arrays)
    assert_close(jax.jit(functools.partial(with_gradients, attend))(*arrays), expected, 1e-5)


# ---- chunked -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "block", "packed", "window"),
    [
        (13, 4, True, None),  # no block divides the sequence
        (13, 4, True, 6),  # the window ends within a block
        (12, 4, False, 5),  # the window ends between two blocks
        (12, 4, False, 2),  # each token reads itself and one more
        (7, 64, True, 100),  # one block, and a window of more than the sequence
    ],
)
def test_chunked_is_a_softmax(length: int, block: int, packed: bool, window: int | None) -> None:
    check(chunked_attention, length, packed, window, block=block)


@pytest.mark.parametrize("window", [3, 100])
def test_dot_product_with_a_window(window: int) -> None:
    check(dot_product_attention, 9, True, window, block=4)


CAP = 0.7  # most scores here are between -2 and 2


@pytest.mark.parametrize("kind", [chunked_attention, dot_product_attention])
@pytest.mark.parametrize("block", [4, 64])
def test_a_soft_cap(kind: Any, block: int) -> None:
    check(kind, 13, True, 6, block=block, soft_cap=CAP)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_chunked_in_half_precision(dtype: str) -> None:
    """Every token is a segment: each query reads itself alone, whatever its tiles began with."""
    query, key, value = heads_of(6, dtype=dtype)
    segments, options = jnp.tile(jnp.arange(6), (2, 1)), Options(block=2)
    got = chunked_attention(query, key, value, segments, grouped=WHOLE, options=options)
    assert got.dtype == jnp.dtype(dtype)
    assert_close(got, jnp.repeat(value, HEADS // KEYS, axis=2), 1e-6)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 7, 40])
@pytest.mark.parametrize("length", [1, 16, 18])
def test_only_tiles_in_which_something_is_read(length: int, window: int | None) -> None:
    block, every = 5, TokenSpan(0, length, None)
    readable = np.asarray(allowed(every, every, window))[0]
    padded = np.pad(readable, (0, -length % block))
    # What fills the sequence up reads at least itself: its own block is needed for its neighbours.
    tiles = padded.reshape(len(padded) // block, block, -1, block).any((1, 3))
    np.testing.assert_array_equal(tiles_needed(length, block, window), np.argwhere(tiles))
    computed = computed_tiles(Tiling(window, block), length)
    np.testing.assert_array_equal(computed, np.argwhere(tiles))


def numbers_held(length: int, attention: Any = chunked_attention) -> int:
    """The numbers in the largest array of forward and backward pass, loops included."""

    def loss(*arrays: Any) -> Any:
        return jnp.sum(attention(*arrays, grouped=WHOLE, options=Options(block=8)))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in heads_of(length)]
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*shapes)
    return largest_array(traced)


def test_what_is_held_grows_with_the_sequence_and_not_with_its_square() -> None:
    few, many = (numbers_held(length) for length in (128, 512))
    assert many == 4 * few
    few, many = (numbers_held(length, dot_product_attention) for length in (128, 512))
    assert many == 16 * few  # the mask; this is what a failure looks like


def test_another_mask_is_read_tile_by_tile() -> None:
    """As an experiment replaces it: here a token reads itself, and the first of the sequence."""

    def first(queries: TokenSpan, keys: TokenSpan, window: int | None) -> Any:
        query, key = (
            span.start + jnp.arange(span.size).reshape(shape)
            for span, shape in ((queries, (1, -1, 1)), (keys, (1, 1, -1)))
        )
        return (query == key) | (key == 0)

    arrays = heads_of(9)
    kinds = (chunked_attention, dot_product_attention)
    options = Options(block=4)
    with replaced([dataclasses.replace(one, by=first) for one in MASK_ARRAY]):
        found, wanted = (kind(*arrays, grouped=WHOLE, options=options) for kind in kinds)
    assert_close(found, wanted, 1e-5)


# ---- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("packed", "window"), [(True, None), (False, 100), (True, 20)])
def test_splash_is_a_softmax(packed: bool, window: int | None) -> None:
    """The kernel for TPUs, interpreted; two blocks of keys for each of the last queries."""
    check(flash_attention, 256, packed, window, interpret=True)


def test_splash_with_a_soft_cap() -> None:
    check(flash_attention, 256, True, None, interpret=True, soft_cap=CAP)


@pytest.mark.parametrize("mode", ["explicit", "auto"])
@pytest.mark.parametrize("kind", ["chunked", "flash"])
def test_attention_mapped_over_stages(kind: str, mode: str) -> None:
    """Sharded over sequences and heads, and no device gathers what others hold."""
    flash = kind == "flash"
    options = Options(scale=SCALE, window=20, block=None if flash else 48, interpret=flash)
    arrays = heads_of(128, rows=(2, 2))
    segments = jnp.stack([segments_of(128), segments_of(128)[::-1]])
    expected = [
        with_gradients(lambda *a, row=row: plain(*a, segments[row], 20), *(x[row] for x in arrays))
        for row in range(2)
    ]
    with jax.set_mesh(mesh_of("stage=2,fsdp=2,tensor=2", mode)):
        layout = Layout()
        grouped = layout.spec("batch", None, "kv_heads", None, None)

        def attend(query: Any, key: Any, value: Any, segments: Any) -> Any:
            def kernel(*arrays: Any) -> Any:
                return kernels.KERNELS[kind](*arrays, segments, grouped=grouped, options=options)

            return with_gradients(kernel, query, key, value)

        spec, rows = (
            layout.spec("stage", "batch", None, *rest) for rest in (("kv_heads", None), ())
        )
        mesh = jax.sharding.get_mesh()
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        args.append(jax.device_put(segments, NamedSharding(mesh, rows)))
        compiled = jax.jit(map_stages(attend)).lower(*args).compile()
        found = compiled(*args)
    stacked = [np.stack(both) for both in zip(*expected, strict=True)]
    assert_close([np.asarray(x) for x in found], stacked, 1e-5)
    assert "all-gather" not in compiled.as_text()
    assert [x.sharding.is_equivalent_to(args[0].sharding, 5) for x in found] == [True] * 4


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_second_derivatives_are_refused(mode: str) -> None:
    def loss(query: Any) -> Any:
        key, value = heads_of(8)[1:]
        return jnp.sum(chunked_attention(query, key, value, grouped=WHOLE) ** 2)

    with (
        jax.set_mesh(mesh_of("fsdp=2", mode)),
        pytest.raises(InputError, match=r"set model\.attention='dot_product' for second"),
    ):
        jax.eval_shape(jax.grad(lambda q: jnp.sum(jax.grad(loss)(q) ** 2)), heads_of(8)[0])


def attend(kind: Any, *arrays: Any, **options: Any) -> Any:
    """The shape alone: what is refused is refused when it is traced."""
    return jax.eval_shape(
        functools.partial(kind, grouped=WHOLE, options=Options(**options)), *arrays
    )


@pytest.mark.parametrize(
    ("options", "length", "dtype", "message"),
    [
        ({}, 128, "bfloat16", "the platform is cpu; set model.attention='chunked'"),
        ({"block": 128}, 128, "bfloat16", "got attention_block=128; leave that out"),
        ({"interpret": True}, 200, "bfloat16", "200 tokens .* take a multiple of 128, or set"),
        ({"interpret": True}, 128, "float16", "float16 .* take bfloat16 or float32, or set"),
    ],
)
def test_what_flash_refuses(options: dict[str, Any], length: int, dtype: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        attend(flash_attention, *heads_of(length, dtype=dtype), **options)


def not_found(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("head_dim", "dtype", "other", "message"),
    [
        (64, "bfloat16", {"head_dims": (64, 32)}, "value heads of 32, as of multi-head latent"),
        (64, "bfloat16", {"packed": True}, "no segment ids here; give batches without segment_ids"),
        (64, "bfloat16", {"soft_cap": 50.0}, r"attention_soft_cap=50\.0; set that to None"),
        (64, "float32", {}, "float32 is no dtype of it; take bfloat16 or float16, or set"),
        (20, "float16", {}, "head_dim=20 is not a multiple of 8 up to 128; change it, or set"),
        (64, "float16", {}, r"not installed; pip install 'nnx-pipeline\[cudnn\]', or set"),
    ],
)
def test_what_flash_refuses_for_nvidia(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: str, other: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(cudnn.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cudnn.ctypes, "CDLL", not_found)
    with pytest.raises(InputError, match=message):
        cudnn.check_cudnn(
            **{"head_dims": (head_dim, head_dim), "packed": False, **other}, dtype=dtype
        )


@pytest.mark.parametrize(
    ("platform", "length", "dtype", "kind"),
    [
        ("tpu", 8192, "bfloat16", "flash"),
        ("tpu", 8200, "bfloat16", "chunked"),
        ("tpu", 100, "float16", "dot_product"),
        ("gpu", 4096, "bfloat16", "dot_product"),
        ("gpu", 4097, "bfloat16", "chunked"),
        ("cpu", 8192, "float32", "chunked"),
    ],
)
def test_what_auto_takes(
    monkeypatch: pytest.MonkeyPatch, platform: str, length: int, dtype: str, kind: str
) -> None:
    monkeypatch.setattr(kernels, "ambient_platform", lambda: platform)
    assert chosen("auto", length, dtype) == kind
    assert chosen("dot_product", length, dtype) == "dot_product"
    called = []

    def kernel(*arrays: Any, **how: Any) -> Any:
        called.append(how)
        return arrays[0]

    monkeypatch.setitem(kernels.KERNELS, kind, kernel)
    auto_attention(*heads_of(length, dtype=dtype), grouped=WHOLE, options=Options(window=3))
    assert called == [{"grouped": WHOLE, "options": Options(window=3)}]


def test_splash_states_the_operations_of_its_tiles() -> None:
    """Of 3 blocks of 512 keys, causal: 6 tiles of 9, and 5 with a window of 512."""
    query = jnp.zeros((2, 1536, KEYS, 3, 64), jnp.bfloat16)
    value = jnp.zeros((2, 1536, KEYS, 64), jnp.bfloat16)
    for window, tiles in ((None, 6), (512, 5)):
        one = 2 * 512 * 512 * 64 * tiles * 2 * KEYS * 3  # a product: two rows, all heads
        stated = Splash(window).stated(query, value)
        for name, products in (("fwd", 2), ("dkv", 4), ("dq", 3)):
            assert stated[f"splash_mqa_{name}"].startswith(
                f"flops={products * one} bytes_accessed="
            )


def long_config(**model: Any) -> Config:
    """Two stages of one layer; 128 tokens are one tile of the kernel."""
    sizes = {"num_layers": 2, "head_dim": 64, "dtype": "bfloat16", "num_experts": 1}
    return small_config(
        model={**sizes, "num_experts_per_token": 1, **model},
        pipeline={"num_microbatches": 2},
        train={"global_batch": 4, "sequence_length": 128},
    )


@pytest.mark.slow
@pytest.mark.skipif(missing("libtpu"), reason="libtpu is not installed")
def test_flash_in_a_pipeline_for_tpus() -> None:
    """All operations of a step are known: those of dense attention, and what kernels state."""
    mesh, tpu = MeshConfig(stage=2, fsdp=2), Platform.parse("tpu:v5p:2x2x1")
    with optax_promotion():
        flash, dense = (
            measure_step(long_config(attention=kind), mesh, tpu) for kind in ("auto", "dot_product")
        )
    assert (flash.to_json()["attention"], dense.to_json()["attention"]) == ("flash", "dot_product")
    console = Console(width=200, file=io.StringIO())
    console.print(measurement_view("step", flash))
    assert "attention: flash\n" in console.file.getvalue()
    assert flash.floor is not None
    assert "what model.attention=auto holds is not counted" in flash.floor.unknown
    names = ("splash_mqa_fwd", "splash_mqa_dkv", "splash_mqa_dq")
    assert all(name in flash.hlo for name in names)
    # One product of scores of a layer and sequence, of which a visit has one on each device. The
    # dense layer runs two forward, two again, and five backward, of which one is the scores again.
    assert flash.flops is not None
    product = 2 * 128 * 128 * 64 * 4
    visits = 3  # ticks of 2 microbatches through 2 stages
    assert flash.flops - dense.flops == visits * product * ((2 + 2 + 7) - (2 + 2 + 5))
    assert flash.time is not None
    assert flash.time.compute_seconds is not None
