"""Experts that compute only the tokens sent to them, beside a plain sum over experts."""

import functools
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_mixtures import (
    EMBED,
    EXPERTS,
    MLP,
    kernels_of,
    kernels_on_mesh,
    put,
    summed,
    with_gradients,
)
from helpers import assert_close, equations, float_rows, mesh_of, missing
from hypothesis import given
from hypothesis import strategies as st

from nnx_pipeline import InputError, Layout, lab
from nnx_pipeline.config._remat import FULL
from nnx_pipeline.lab import compile as lab_compile
from nnx_pipeline.ops._experts import ExpertKernels
from nnx_pipeline.ops._grouped import by_triton
from nnx_pipeline.ops._grouped import experts as grouped_experts
from nnx_pipeline.ops._grouped.experts import GroupedExperts
from nnx_pipeline.ops._grouped.order import Some, from_rows, sort_by_expert, to_rows, visits
from nnx_pipeline.ops._grouped.products import ON_PLATFORM, GroupedProducts, Tiles
from nnx_pipeline.pipeline.stage.apply import map_stages
from nnx_pipeline.sharding._cast import cast_at_use, reading_slices

pytestmark = pytest.mark.jax_alone

BACKENDS = {
    "tiles": GroupedProducts("tiles", Tiles.of((8, 0, 0))),
    "triton": GroupedProducts("triton", Tiles.of((16, 16, 16)), interpret=True),
    "megablox": GroupedProducts("megablox", Tiles.of((16, 128, 128)), interpret=True),
}

# ---- products ------------------------------------------------------------------------------------


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sizes", [(16, 16, 16, 16), (5, 0, 30, 1), (0, 0, 64, 0), (0, 0, 0, 0), (3, 20, 0, 0)]
)
def test_each_row_is_multiplied_by_the_kernel_of_its_group(
    backend: str, sizes: tuple[int, ...]
) -> None:
    """Groups that are empty, have all rows, or end in a tile; what follows the last one is NaN."""
    products, rows, used = BACKENDS[backend], 64, sum(sizes)
    groups = np.repeat(np.arange(EXPERTS), sizes)
    x = [np.array(float_rows(rows, width)) for width in (EMBED, MLP)]
    kernels = float_rows(EXPERTS, EMBED, MLP, seed=2)
    for each in x:
        each[used:] = np.nan
    counts, given = jnp.array(sizes, jnp.int32), tuple(map(jnp.asarray, x))
    own = np.einsum("rd,rdf->rf", x[0][:used], kernels[groups])
    back = np.einsum("rf,rdf->rd", x[1][:used], kernels[groups])
    total = np.zeros(kernels.shape, np.float32)
    for row, group in enumerate(groups):
        total[group] += np.outer(x[0][row], x[1][row])
    assert_close(products.product(given[0], kernels, counts)[:used], own, 1e-5)
    assert_close(products.product(given[1], kernels, counts, transposed=True)[:used], back, 1e-5)
    assert_close(products.outer(*given, counts), total, 1e-5)
    # The last three groups are added to what the first one gave.
    some, start = Some(jnp.int32(1), 3), jnp.full(x[1].shape, -1.0)
    found = products.product(given[0], kernels[:1], counts, (jnp.int32(0), start))
    found = products.product(given[0], kernels[1:], counts, (some.first, found))
    assert_close(found[:used], own, 1e-5)
    # A kernel that JAX has for TPUs rounds what it leaves alone to float32, as here.
    assert np.all(found[used:] == -1)
    assert_close(products.outer(*given, counts, some), total[1:], 1e-5)


@given(sizes=st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_every_row_of_a_group_is_visited_once(sizes: list[int]) -> None:
    rows, tile = 176, 8
    group, at, bounds = visits(Some(0, len(sizes)), jnp.array(sizes, jnp.int32), rows, tile)
    seen = np.full(rows, -1)
    for one, where, (start, end) in zip(group, at, bounds, strict=True):
        own = np.arange(max(start, where * tile), min(end, where * tile + tile))
        assert np.all(seen[own] == -1)
        seen[own] = one
    expected = np.repeat(np.arange(len(sizes)), sizes)
    np.testing.assert_array_equal(seen[: len(expected)], expected)
    assert np.all(seen[len(expected) :] == -1)


def test_rows_come_back_to_their_tokens_without_those_of_other_devices() -> None:
    experts = jnp.array([[0, 3], [2, 3], [5, 0], [3, 2], [1, 4]])
    order = sort_by_expert(experts, first=2, count=2, tile=4)  # experts 2 and 3
    assert order.sizes.tolist() == [2, 3]
    assert len(order.choices) == 12
    x = float_rows(5, EMBED)
    rows = to_rows(x, order)
    np.testing.assert_array_equal(rows[:5], x[np.array([1, 3, 0, 1, 3])])
    times = jnp.array([1.0, 2.0, 0.0, 2.0, 0.0])[:, None]
    assert_close(from_rows(rows.at[5:].set(jnp.nan), order), x * times, 1e-6)


# ---- the mixture ---------------------------------------------------------------------------------


def grouped(
    x: Any, weights: Any, kernels: ExpertKernels, chosen: Any, group: int | None = None
) -> Any:
    mix = GroupedExperts(group, tiles=(8, 0, 0))
    return mix(x, (weights, chosen), kernels, layout=Layout(), remat=FULL).output


# The experts of each token: all of them, one alone, and those of the first device of two.
CHOSEN = {
    "all": lambda token, choice: (token * 3 + choice) % EXPERTS,
    "one": lambda token, choice: 2 + 0 * token * choice,
    "first": lambda token, choice: (token + choice) % 2,
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize(
    ("mesh", "mode", "group"),
    [
        ("", "", None),
        ("data=2,expert=4", "auto", None),
        ("fsdp=2,tensor=2,expert=2", "explicit", 1),
    ],
)
def test_a_mixture_and_its_derivatives_against_a_sum_over_experts(
    chosen: str, mesh: str, mode: str, group: int | None
) -> None:
    """5 tokens of 7 and 8 sequences: no tile divides the rows of an expert."""
    x, weights = float_rows(8, 5, EMBED), float_rows(8, 5, 2, seed=1)
    experts = jnp.fromfunction(CHOSEN[chosen], (40, 2), dtype="int32").reshape(8, 5, 2)
    wanted = with_gradients(functools.partial(summed, chosen=experts), x, weights, kernels_of())
    if not mesh:
        mix = functools.partial(grouped, chosen=experts)
        assert_close(with_gradients(mix, x, weights, kernels_of()), wanted, 1e-5)
        return
    with jax.set_mesh(mesh_of(mesh, mode)):
        spec = Layout().spec
        tokens, kernels = spec("batch", None, None), kernels_on_mesh()
        mix = functools.partial(grouped, chosen=put(experts, tokens), group=group)
        found = jax.jit(functools.partial(with_gradients, mix))(
            put(x, tokens), put(weights, tokens), kernels
        )
        assert_close(found, wanted, 1e-5)
        assert found[1][2].gate.sharding.is_equivalent_to(kernels.gate.sharding, 3)


def test_a_kernel_of_many_experts_is_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there are fewer on a device, their group is given, or nothing is gathered."""
    x, weights = float_rows(8, 5, EMBED), float_rows(8, 5, 2, seed=1)
    experts = jnp.fromfunction(CHOSEN["all"], (40, 2), dtype="int32").reshape(8, 5, 2)
    wanted = with_gradients(functools.partial(summed, chosen=experts), x, weights, kernels_of())
    for mesh, many, group, waits in (
        ("fsdp=4,expert=2", EXPERTS // 2, None, 1),
        ("fsdp=4,expert=2", EXPERTS, None, 0),
        ("fsdp=4,expert=2", EXPERTS // 2, EXPERTS // 2, 0),
        ("data=8", EXPERTS // 2, None, 0),
    ):
        monkeypatch.setattr(grouped_experts, "MANY", many)
        with jax.set_mesh(mesh_of(mesh, "explicit")):
            tokens = Layout().spec("batch", None, None)
            args = put(x, tokens), put(weights, tokens), kernels_on_mesh()
            mix = functools.partial(grouped, chosen=put(experts, tokens), group=group)
            step = jax.jit(functools.partial(with_gradients, mix))
            assert_close(step(*args), wanted, 1e-5)
            primitives = [each.primitive.name for each in equations(step.trace(*args).jaxpr)]
            assert primitives.count("optimization_barrier") == waits


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "group"), [("explicit", 2), ("auto", 1), ("explicit", 1)])
def test_a_mixture_mapped_over_stages(mode: str, group: int) -> None:
    """Each stage multiplies by its own kernels, and no stage gathers what others hold."""
    x, weights = float_rows(2, 4, 5, EMBED), float_rows(2, 4, 5, 2, seed=1)
    experts = jnp.fromfunction(CHOSEN["all"], (40, 2), dtype="int32").reshape(2, 4, 5, 2)
    wanted = with_gradients(jax.vmap(summed), x, weights, kernels_of(2), experts)
    with jax.set_mesh(mesh_of("stage=2,fsdp=2,expert=2", mode)):
        spec = Layout().spec
        tokens = spec("stage", "batch", None, None)
        kernels = kernels_on_mesh("stage")
        args = put(x, tokens), put(weights, tokens), kernels, put(experts, tokens)
        mix = map_stages(functools.partial(grouped, group=group))
        step = jax.jit(functools.partial(with_gradients, mix))
        assert_close(step(*args)[0], wanted[0], 1e-5)
        assert_close(step(*args)[1][:3], wanted[1][:3], 1e-5)
        text = step.lower(*args).compile().as_text()
        # Stages are the slowest axis of the mesh: devices 0 to 3, and 4 to 7.
        assert "{0,4}" not in text
        assert "{0,1,2,3,4,5,6,7}" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "compiler"),
    [("tpu:v5p:2x2x1", "libtpu"), ("cuda:h100:1", "jax_cuda13_plugin")],
)
@pytest.mark.parametrize("group", [1, 4])
def test_kernels_compile_and_state_the_operations_of_their_rows(
    platform: str, compiler: str, group: int
) -> None:
    """Two products forward, because no gradient needs the third, and six backward."""
    if missing(compiler):
        pytest.skip(f"{compiler} is not installed")
    tokens, embed, mlp = 1024, 128, 256

    def step(x: Any, weights: Any, chosen: Any, kernels: ExpertKernels) -> Any:
        def mix(x: Any, weights: Any, kernels: ExpertKernels) -> Any:
            choice = (weights, chosen)
            found = GroupedExperts(group)(x, choice, kernels, layout=Layout(), remat=FULL)
            return found.output

        return jax.vjp(mix, x, weights, kernels)[1](x)

    choices = [jax.ShapeDtypeStruct((1, tokens, 2), dtype) for dtype in ("bfloat16", "int32")]
    shapes = (embed, mlp), (embed, mlp), (mlp, embed)
    kernels = ExpertKernels(
        *(jax.ShapeDtypeStruct((EXPERTS, *shape), "bfloat16") for shape in shapes)
    )
    x = jax.ShapeDtypeStruct((1, tokens, embed), "bfloat16")
    found = lab.measure(step, x, *choices, kernels, platform=platform)
    assert found.flops == 8 * (2 * 2 * tokens * embed * mlp)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_gpu_loads_more_ahead_than_its_shared_memory_holds(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (high, deep, wide) = ON_PLATFORM["gpu"]
    facts = tomllib.loads((Path(lab_compile.__file__).parent / "gpus.toml").read_text("utf-8"))
    ahead = {}
    for maker in facts.values():
        for gpu in maker.values():
            if not isinstance(gpu, dict) or "device_description_str" not in gpu:
                continue  # what holds for all GPUs of the maker
            kind, own = gpu["device_description_str"], gpu["gpu_device_info"]
            shared = {**maker["gpu_device_info"], **own}["shared_memory_per_block_optin"]
            monkeypatch.setattr(by_triton, "ambient_device_kind", lambda kind=kind: kind)
            for elements in (high * deep + deep * wide, high * deep + high * wide):
                steps = by_triton._parameters(elements, dtype).num_stages
                assert steps == 1 or steps * elements * jnp.dtype(dtype).itemsize <= shared, kind
                ahead[kind] = steps
    assert ahead["NVIDIA H100 80GB HBM3"] > ahead["AMD Instinct MI300X"] == 1


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_second_derivatives_are_refused(forward: bool, mode: str) -> None:
    x, weights = float_rows(4, 5, EMBED), float_rows(4, 5, 2, seed=1)
    chosen = jnp.zeros((4, 5, 2), jnp.int32)

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.sin(grouped(x, weights, kernels_of(), chosen)))

    def again(x: Any) -> Any:
        if forward:
            return jax.jvp(jax.grad(loss), (x,), (x,))
        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) * x))(x)

    with (
        jax.set_mesh(mesh_of("fsdp=2", mode)),
        pytest.raises(InputError, match=r"set model\.experts='dense' for second derivatives"),
    ):
        jax.eval_shape(again, x)


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        (Layout(expert=("tensor",), mlp=()), "tensor=4"),
        (Layout(batch=("data", "fsdp"), embed=("fsdp",)), "expert=2,fsdp=2"),
        (Layout(embed_of_expert=("tensor",), mlp=()), "tensor=2,fsdp=2"),
        (Layout(batch=("data",), batch_beside_experts=("data",)), "data=2,fsdp=2"),
    ],
)
def test_devices_with_the_same_tokens_are_refused(layout: Layout, mesh: str) -> None:
    """Sums over them would count each token several times."""
    x, weights, chosen = jnp.ones((8, 5, EMBED)), jnp.ones((8, 5, 2)), jnp.zeros((8, 5, 2), "int32")
    with (
        jax.set_mesh(mesh_of(mesh)),
        pytest.raises(InputError, match="grouped experts need other tokens"),
    ):
        GroupedExperts()(x, (weights, chosen), kernels_of(), layout=layout, remat=FULL)


@pytest.mark.parametrize("numbers", [(128,), (8,) * 6, (8, 8, 8, 12, 8, 8, 8, 8, 8)])
def test_tiles_that_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="give powers of two"):
        Tiles.of(numbers)


# ---- casts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_of_a_slice_is_a_cast(dtype: str) -> None:
    """To the bit, of any float32; in bfloat16 alone it is rounded first."""
    bits = np.random.default_rng(0).integers(2**32, size=100_000, dtype=np.uint32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40, 6e-6], np.float32)
    x = jnp.asarray(np.concatenate([bits.view(np.float32), edges]))
    cast = functools.partial(cast_at_use, dtype=dtype)
    sliced = reading_slices()(lambda x: cast(x))
    found, wanted = (np.asarray(f(x)) for f in (sliced, lambda x: x.astype(dtype)))
    assert found.tobytes() == wanted.tobytes()
    assert ("reduce_precision" in str(jax.make_jaxpr(sliced)(x))) == (dtype == "bfloat16")
    assert "reduce_precision" not in str(jax.make_jaxpr(cast)(x))
