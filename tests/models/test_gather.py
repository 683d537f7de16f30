"""Gathers in two steps beside `jax.lax.all_gather`, and where they are made."""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import pytest
from expert_mixtures import put
from helpers import float_rows, mesh_of, missing

from nnx_pipeline import MeshConfig, lab
from nnx_pipeline.lab.api import traced_call
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.sharding._gather import first_dimension, gather_in_steps
from nnx_pipeline.sharding.layout import P

pytestmark = pytest.mark.jax_alone


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("first", [2, 4])
@pytest.mark.parametrize("names", [("fsdp",), ("data", "fsdp")])
def test_it_gathers_what_one_step_does(names: tuple[str, ...], first: int, axis: int) -> None:
    mesh = mesh_of("fsdp=8" if len(names) == 1 else "data=2,fsdp=4")
    x = float_rows(2, 8, 16, 8)
    spec = P(*[names if at == axis else None for at in range(3)])

    def gathered(gather: Callable[[jax.Array], jax.Array]) -> jax.Array:
        whole = jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
        return jax.jit(jax.vmap(whole))(put(x, P(None, *spec)))

    with jax.set_mesh(mesh):
        one = gathered(lambda x: jax.lax.all_gather(x, names, axis=axis, tiled=True))
        two = gathered(partial(gather_in_steps, names=names, axis=axis, first=first))
    np.testing.assert_array_equal(one, x)
    np.testing.assert_array_equal(two, x)


@pytest.mark.skipif(missing("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("platform", "mesh", "first"),
    [
        ("tpu:v5p:4x4x4", "fsdp=64", 4),
        ("tpu:v5p:4x4x8", "fsdp=128", 4),
        ("tpu:v5p:8x8x8", "fsdp=512", 8),
        ("tpu:v5p:4x4x4", "data=2,fsdp=32", 1),  # not the whole torus
        ("tpu:v5p:2x4x4", "fsdp=32", 1),  # not closed in all three dimensions
        ("tpu:v6e:8x8", "fsdp=64", 1),  # two dimensions
        ("cpu", "fsdp=8", 1),
    ],
)
def test_where_it_is_made(platform: str, mesh: str, first: int) -> None:
    found: list[int] = []

    def step(x: jax.Array) -> jax.Array:
        found.append(first_dimension(("fsdp",)))
        return x

    chosen, x = Platform.parse(platform), jax.ShapeDtypeStruct((8,), "float32")
    traced_call(step, x, mesh=MeshConfig.parse(mesh), platform=chosen)
    assert found == [first]


@pytest.mark.skipif(missing("libtpu"), reason="libtpu is not installed")
def test_the_compiler_makes_it_of_gathers() -> None:
    """Of the gather in one step it makes a sum of arrays of zeros."""

    def collectives(gather: Callable[[jax.Array], jax.Array]) -> set[str]:
        def step(x: jax.Array) -> jax.Array:
            return jax.shard_map(gather, in_specs=spec, out_specs=P(), check_vma=False)(x)

        spec = P(None, "fsdp", None)
        x = jax.ShapeDtypeStruct((8, 4096, 256), "bfloat16")
        found = lab.measure(step, x, mesh=MeshConfig(fsdp=64), platform="tpu:v5p:4x4x4")
        return {kind for kind, made in found.collectives.items() if made["ops"]}

    def one(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, ("fsdp",), axis=1, tiled=True)

    assert collectives(one) == {"all-reduce"}
    assert collectives(lambda x: gather_in_steps(x, ("fsdp",), 1, 4)) == {"all-gather"}
