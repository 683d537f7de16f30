"""How often each branch of a conditional is taken, in programs that each compiler has made."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import optax_promotion

from nnx_pipeline import MeshConfig, preset
from nnx_pipeline.config.overrides import apply_overrides
from nnx_pipeline.experiments.arms import Program
from nnx_pipeline.experiments.programs import prepare
from nnx_pipeline.lab import api as lab
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.hlo.branches import branch_shares
from nnx_pipeline.lab.hlo.loops import executions
from nnx_pipeline.lab.hlo.module import parse
from nnx_pipeline.pipeline.schedule import OneForwardOneBackward

SIZE = 128
ONE_PRODUCT = 2 * SIZE**3
PLATFORMS = ["cpu", "tpu:v5p:2x2x1", "cuda:h100:1"]
UNKNOWN = ("the matrix products count every branch of 1 conditional",)

Loop = Callable[[jax.Array, jax.Array], jax.Array]


def idle(x: jax.Array, w: jax.Array) -> jax.Array:
    return x


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)


def two_products(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(jnp.cos(x @ w) @ w)


def by_flags(flags: list[bool], x: jax.Array, w: jax.Array) -> jax.Array:
    """A product in each trip whose flag is set."""

    def trip(x: jax.Array, flag: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.cond(flag, product, idle, x, w), None

    return jax.lax.scan(trip, x, jnp.asarray(flags))[0]


def by_number(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product in the trips 1, 5 and 9 of ten."""
    return jax.lax.fori_loop(
        0, 10, lambda trip, x: jax.lax.cond(trip % 4 == 1, product, idle, x, w), x
    )


def by_choice(x: jax.Array, w: jax.Array) -> jax.Array:
    """No product in seven trips, one in two and two in four; JAX clamps the choices."""
    choices = jnp.asarray([0, 2, 1, 2, 2, 9, -1, 1, 0, 0, 0, 0, 0])

    def trip(x: jax.Array, choice: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.switch(choice, [idle, product, two_products], x, w), None

    return jax.lax.scan(trip, x, choices)[0]


def by_data(x: jax.Array, w: jax.Array) -> jax.Array:
    def trip(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.cond(x[0, 0] > 0, product, idle, x, w), None

    return jax.lax.scan(trip, x, None, length=10)[0]


def by_the_outer_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    def outer(x: jax.Array, flag: jax.Array) -> tuple[jax.Array, None]:
        def trip(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.cond(flag, product, idle, x, w), None

        return jax.lax.scan(trip, x, None, length=3)[0], None

    return jax.lax.scan(outer, x, jnp.asarray([True, False, False, True]))[0]


def inside_an_outer_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 4, lambda _, x: by_number(x, w), x)


def measured(loop: Loop, platform: str) -> Measurement:
    array = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    return lab.measure(loop, array, array, platform=platform)


# A table of more than ten entries is left out of the text of a program.
EVERY_THIRD = [trip % 3 == 0 for trip in range(60)]
KNOWN = {
    "flags": (partial(by_flags, EVERY_THIRD), 20),
    "few flags": (partial(by_flags, [True, False, True]), 2),
    "never": (partial(by_flags, [False] * 5), 0),
    "number": (by_number, 3),
    "choice": (by_choice, 2 + 2 * 4),
    "inside another loop": (inside_an_outer_loop, 4 * 3),
}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("loop", "products"), KNOWN.values(), ids=KNOWN)
def test_a_branch_counts_as_often_as_it_is_taken(loop: Loop, products: int, platform: str) -> None:
    result = measured(loop, platform)
    assert result.flops == products * ONE_PRODUCT
    assert result.notes == ()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("loop", "trips"), [(by_data, 10), (by_the_outer_loop, 12)], ids=["data", "outer loop"]
)
def test_where_the_choice_is_not_known_every_branch_counts_and_that_is_said(
    loop: Loop, trips: int, platform: str
) -> None:
    result = measured(loop, platform)
    assert (result.flops, result.notes) == (trips * ONE_PRODUCT, UNKNOWN)


@pytest.mark.parametrize("platform", PLATFORMS[1:])
def test_the_time_is_that_of_the_branches_that_run(platform: str) -> None:
    """One trip in six computes: the rest of a trip is far shorter than a product here."""
    seconds = {
        often: measured(partial(by_flags, [trip % often == 0 for trip in range(60)]), platform).time
        for often in (1, 6)
    }
    always, seldom = (seconds[often].known_seconds for often in (1, 6))  # type: ignore[union-attr]
    alone = measured(product, platform).time
    assert always - seldom == pytest.approx(50 * alone.known_seconds, rel=0.3)  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_head_of_interleaved_1f1b_works_once_for_each_microbatch() -> None:
    """And not at every tick: its branch is one of those that the timetable chooses."""
    changes = {
        "model.num_layers": "8",
        "pipeline.schedule": "1f1b",
        "pipeline.num_repeats": "2",
        "pipeline.num_microbatches": "8",
    }
    config = apply_overrides(preset("tiny"), changes)
    mesh = MeshConfig.parse("stage=4")
    with optax_promotion():
        result = prepare(Program(config), mesh, Platform.parse("cpu"))()
    assert result.notes == ()
    module = parse(result.hlo)
    runs, schedule = executions(module), OneForwardOneBackward(4, 8, 2)
    steady = schedule.phases[1]
    leaves = schedule.forward.active[:, -1] & (schedule.forward.repeat[:, -1] == 1)
    share = Fraction(int(np.sum(leaves)), len(steady))
    found = branch_shares(module)
    # The head in the steady phase; where the backward visits return to the embedding in that and
    # in the last phase.
    assert len(found) == 3
    assert any(shares is not None and share in shares for shares in found.values())
    for (name, conditional), shares in found.items():
        called = module.computations[name].instructions[conditional].called()
        assert shares is not None
        assert [runs[branch] for branch in called] == [runs[name] * one for one in shares]
