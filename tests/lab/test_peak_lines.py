"""Lines of the peak that a compiled program alone does not tell: of stacks and of casts."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import missing
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lint_steps import INPUTS, STATES_BYTES, by_product, in_chunks, states_of

from nnx_pipeline import lab
from nnx_pipeline.lab._report.view.buffers import buffer_rows
from nnx_pipeline.lab._tracing.constraints import casts_of
from nnx_pipeline.lab.attribution._result import Buffer
from nnx_pipeline.lab.lint import Limits, lint

LAYERS, SIZE = 4, (64, 2048)
PLATFORMS = {"cpu": (), "tpu:v5p:2x2x2": ("libtpu",), "cuda:h100:8": ("jax_cuda13_plugin",)}


def line_of(mark: str) -> str:
    """`test_peak_lines.py:12`, the line that ends in this mark."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"{Path(__file__).name}:{number}"


def on(platform: str) -> str:
    if lacking := missing(*PLATFORMS[platform]):
        pytest.skip(lacking)
    return platform


def peak(function: object, *arguments: object, platform: str) -> tuple[Buffer, ...]:
    measured = lab.measure(function, *arguments, platform=on(platform))  # type: ignore[arg-type]
    assert measured.attribution
    return measured.attribution.buffers


def written(caches: Array, new: Array, place: Array) -> tuple[list[Array], Array]:
    kept, read = [], new
    for number in range(LAYERS):
        cache = jax.lax.dynamic_update_slice(caches[number], read[None], (place, 0))
        read = jnp.sin(cache.T @ jnp.tanh(cache @ read))
        kept.append(cache)
    return kept, read


def stacked(caches: Array, new: Array, place: Array) -> tuple[Array, Array]:
    kept, read = written(caches, new, place)
    return jnp.stack(kept), read  # the stack


def listed(caches: Array, new: Array, place: Array) -> tuple[list[Array], Array]:
    return written(caches, new, place)


CACHES = (
    jax.ShapeDtypeStruct((LAYERS, *SIZE), "float32"),
    jax.ShapeDtypeStruct(SIZE[1:], "float32"),
    jax.ShapeDtypeStruct((), "int32"),
)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_copies_name_the_line_of_the_stack_that_they_are_for(platform: str) -> None:
    size = 4 * SIZE[0] * SIZE[1]
    rows = [row for row in peak(stacked, *CACHES, platform=platform) if row.bytes >= size]
    named = [row for row in rows if row.into]
    assert {Path(str(row.into)).name for row in named} == {line_of("the stack")}
    (_, number) = line_of("the stack").split(":")
    assert any(f" → {number}" in row.source for row in buffer_rows(named))
    rows = [row for row in peak(listed, *CACHES, platform=platform) if row.bytes >= size]
    assert not [row for row in rows if row.into]


def cast_and_flattened(frames: Array, order: Array) -> Array:
    wide = frames.astype(jnp.float32)  # the cast
    flat = wide.reshape(-1, frames.shape[-1])

    def one(total: Array, at: Array) -> tuple[Array, None]:
        return total + jnp.sin(flat[at]), None

    return jax.lax.scan(one, jnp.zeros(frames.shape[-1]), order)[0]


FRAMES = (
    jax.ShapeDtypeStruct((64, 32, 1024), "uint8"),
    jax.ShapeDtypeStruct((8,), "int32"),
)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_cast_has_its_own_line_before_a_reshape(platform: str) -> None:
    rows = peak(cast_and_flattened, *FRAMES, platform=platform)
    wide = [row for row in rows if row.shape.startswith("f32") and row.bytes >= 8 * 2**20]
    assert line_of("the cast") in {Path(str(row.source)).name for row in wide}


def test_casts_are_found_behind_several_moves_and_not_behind_work() -> None:
    def moved(x: Array) -> Array:
        return x.astype(jnp.float32).reshape(4, 8).T

    def worked(x: Array) -> Array:
        return (x.astype(jnp.float32) + 1).reshape(4, 8)

    x = jax.ShapeDtypeStruct((32,), "bfloat16")
    found = casts_of(jax.make_jaxpr(moved)(x))
    assert [(one.operation, one.bits, one.old_bits) for one in found] == [
        ("reshape", 32, 16),
        ("transpose", 32, 16),
    ]
    assert casts_of(jax.make_jaxpr(worked)(x)) == ()


def gathered(stack: Array, x: Array) -> Array:
    def inside(stack: Array, x: Array) -> Array:
        whole = jax.lax.all_gather(stack, "fsdp", axis=1, tiled=True)  # the gather
        return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, whole)[0]

    specs = P(None, "fsdp"), P("fsdp")
    mapped = jax.shard_map(inside, in_specs=specs, out_specs=P("fsdp"), check_vma=False)
    return jax.grad(lambda stack: (mapped(stack, x) ** 2).sum())(stack)


def test_copies_at_the_end_of_a_shard_map_have_the_line_inside() -> None:
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    stack = jax.ShapeDtypeStruct(
        (8, 512, 512), "bfloat16", sharding=NamedSharding(mesh, P(None, "fsdp"))
    )
    x = jax.ShapeDtypeStruct((32, 512), "bfloat16", sharding=NamedSharding(mesh, P("fsdp")))
    measured = lab.measure(gathered, stack, x, mesh="fsdp=2")
    assert measured.attribution
    rows = [row for row in measured.attribution.buffers if row.role == "gathered weight"]
    assert sum(row.bytes for row in rows) >= 2 * 8 * 512 * 512
    assert {Path(str(row.source)).name for row in rows} == {line_of("the gather")}


def by_sum(u: Array, c: Array) -> Array:
    return (states_of(u, c) * c[..., None, :]).sum(-1)


def largest_so_far(x: Array) -> Array:
    return jax.lax.associative_scan(jnp.maximum, x, axis=1).sum(-1)


def test_lint_finds_states_of_all_positions() -> None:
    """Where a sum over each state follows, and not of states that are a result themselves."""
    limits = Limits(large=1e4)

    def trained(function: object) -> object:
        return jax.grad(lambda u, c: function(u, c).sum())  # type: ignore[operator]

    for function in (by_product, by_sum):
        for one in (function, trained(function)):
            found = lint(one, *INPUTS, limits=limits)  # type: ignore[arg-type]
            (finding,) = [one for one in found if one.rule == "states-stored"]
            assert finding.location.function == "states_of"
            assert finding.bytes == STATES_BYTES
    as_large = jax.ShapeDtypeStruct((8, 128, 1024), "float32")
    cases = [(one, INPUTS) for one in (in_chunks, trained(in_chunks), states_of)]
    for function, arguments in (*cases, (largest_so_far, (as_large,))):
        found = lint(function, *arguments, limits=limits)  # type: ignore[arg-type]
        assert "states-stored" not in {one.rule for one in found}
