"""How often each branch of a conditional is taken, in programs that each compiler has made."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import missing, optax_promotion

from nnx_pipeline import MeshConfig, preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.experiments._arms import Program
from nnx_pipeline.experiments._programs import prepare
from nnx_pipeline.lab import api as lab
from nnx_pipeline.lab._hlo.loops import branch_shares, executions
from nnx_pipeline.lab._hlo.module import parse
from nnx_pipeline.lab.compile._tables import with_tables
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.pipeline.schedule import OneForwardOneBackward

SIZE = 128
ONE_PRODUCT = 2 * SIZE**3
COMPILERS = {"cpu": (), "tpu:v5p:2x2x1": ("libtpu",), "cuda:h100:1": ("jax_cuda13_plugin",)}
PLATFORMS = [*COMPILERS]
UNKNOWN = ("the matrix products count every branch of 1 conditional",)
LONGEST = (
    "the estimated time takes the longest branch of 1 conditional, and less where another runs",
)

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


def by_numbers(backwards: bool, x: jax.Array, w: jax.Array) -> jax.Array:
    """A product in the trips whose number in an array, one of 1, 3, … 19, is 5 or less."""
    numbers = 2 * jnp.arange(10) + 1

    def trip(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.cond(number <= 5, product, idle, x, w), None

    return jax.lax.scan(trip, x, numbers[::-1] if backwards else numbers)[0]


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


def in_a_branch(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product in the trips 0 and 6 of twelve."""

    def trip(number: int, x: jax.Array) -> jax.Array:
        def even(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax.lax.cond(number % 2 == 0, product, idle, x, w)

        return jax.lax.cond(number % 3 == 0, even, idle, x, w)

    return jax.lax.fori_loop(0, 12, trip, x)


def by_place(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product where a table that two loops read says so: 20 of 60 times."""
    table = jnp.asarray(EVERY_THIRD)

    def outer(row: int, x: jax.Array) -> jax.Array:
        def trip(column: int, x: jax.Array) -> jax.Array:
            return jax.lax.cond(table[row * 12 + column], product, idle, x, w)

        return jax.lax.fori_loop(0, 12, trip, x)

    return jax.lax.fori_loop(0, 5, outer, x)


def by_bytes(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product in the trips 1 and 12 of thirteen, by a table of int8."""
    numbers = np.asarray([5, -3, *[7] * 10, -128], np.int8)

    def trip(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.cond(number < 0, product, idle, x, w), None

    return jax.lax.scan(trip, x, jnp.asarray(numbers))[0]


def by_a_number_that_a_branch_changes(x: jax.Array, w: jax.Array) -> jax.Array:
    def trip(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, number = state
        return jax.lax.cond(
            number % 3 == 0,
            lambda x: (product(x, w), number + 1),
            lambda x: (x, number + 2),
            x,
        )

    return jax.lax.fori_loop(0, 6, trip, (x, jnp.int32(0)))[0]


def by_chance(x: jax.Array, w: jax.Array) -> jax.Array:
    """The compiler writes the random bits out as long arithmetic on integers."""
    key = jax.random.key(0)

    def trip(number: int, x: jax.Array) -> jax.Array:
        choice = jax.random.randint(jax.random.fold_in(key, number), (), 0, 3)
        return jax.lax.switch(choice, [idle, product, two_products], x, w)

    return jax.lax.fori_loop(0, 4, trip, x)


def by_a_long_chain(x: jax.Array, w: jax.Array) -> jax.Array:
    def trip(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, number = state
        x = jax.lax.cond(number % 3 == 0, product, idle, x, w)
        for step in range(400):
            number = jnp.minimum(number * 3, jnp.int32(1000 + step)) ^ jnp.int32(step)
        return x, number

    return jax.lax.fori_loop(0, 6, trip, (x, jnp.int32(1)))[0]


def measured(loop: Loop, platform: str, size: int = SIZE) -> Measurement:
    if missing(*COMPILERS[platform]):
        pytest.skip(f"the compiler for {platform} is not installed")
    array = jax.ShapeDtypeStruct((size, size), jnp.float32)
    return lab.measure(loop, array, array, platform=platform)


# A table of more than ten entries is left out of the text of a program.
EVERY_THIRD = [trip % 3 == 0 for trip in range(60)]
KNOWN = {
    "flags": (partial(by_flags, EVERY_THIRD), 20),
    "few flags": (partial(by_flags, [True, False, True]), 2),
    "never": (partial(by_flags, [False] * 5), 0),
    "number": (by_number, 3),
    "calculated numbers": (partial(by_numbers, False), 3),
    "numbers backwards": (partial(by_numbers, True), 3),
    "choice": (by_choice, 2 + 2 * 4),
    "inside another loop": (inside_an_outer_loop, 4 * 3),
    "outer loop": (by_the_outer_loop, 2 * 3),
    "in a branch": (in_a_branch, 2),
    "two loops": (by_place, 20),
    "bytes": (by_bytes, 2),
}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("loop", "products"), KNOWN.values(), ids=KNOWN)
def test_a_branch_counts_as_often_as_it_is_taken(loop: Loop, products: int, platform: str) -> None:
    result = measured(loop, platform)
    assert result.flops == products * ONE_PRODUCT
    assert result.notes == ()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("loop", "trips"),
    [(by_data, 10), (by_a_number_that_a_branch_changes, 6)],
    ids=["data", "a branch"],
)
def test_where_the_choice_is_not_known_every_branch_counts_and_that_is_said(
    loop: Loop, trips: int, platform: str
) -> None:
    result = measured(loop, platform)
    told = UNKNOWN if platform == "cpu" else UNKNOWN + LONGEST
    assert (result.flops, result.notes) == (trips * ONE_PRODUCT, told)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("loop", [by_chance, by_a_long_chain])
def test_long_arithmetic_is_followed_once_or_not_at_all(loop: Loop, platform: str) -> None:
    """It neither takes exponentially long nor ends in an error."""
    result = measured(loop, platform)
    assert result.flops is not None
    shares = [*branch_shares(parse(result.hlo)).values()]
    assert len(shares) == 1
    told = UNKNOWN if platform == "cpu" else UNKNOWN + LONGEST
    assert result.notes == (told if shares[0] is None else ())


def test_a_runtime_without_the_binary_form_leaves_the_text_as_it_is() -> None:
    class Runtime:
        def hlo_modules(self) -> list[Any]:
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no modules")

    class Compiled:
        def runtime_executable(self) -> Runtime:
            return Runtime()

    text = "  %t = pred[60]{0} constant({...})\n  %c = f32[] conditional(%f, %x, %x), …"
    assert with_tables(text, Compiled()) == text  # type: ignore[arg-type]


# ---- what decides, evaluated from the text -----------------------------------------------------

BODY = """HloModule test

%yes (x: f32[]) -> f32[] {{
  ROOT %x = f32[] parameter(0)
}}

%no (x: f32[]) -> f32[] {{
  ROOT %x = f32[] parameter(0)
}}

%last (x: f32[]) -> f32[] {{
  ROOT %x = f32[] parameter(0)
}}
{others}
%body (s: (s32[], f32[])) -> (s32[], f32[]) {{
  %s = (s32[], f32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
{lines}
  %c = f32[] conditional(%flag, %x, %x{more}), {branches}
  ROOT %t = (s32[], f32[]) tuple(%next, %c)
}}

%condition (s: (s32[], f32[])) -> pred[] {{
  %s = (s32[], f32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %six = s32[] constant(6)
  ROOT %more = pred[] compare(%i, %six), direction=LT
}}

ENTRY %main (p: f32[]) -> (s32[], f32[]) {{
  %p = f32[] parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[]) tuple(%zero, %p)
  ROOT %loop = (s32[], f32[]) while(%init), condition=%condition, body=%body
}}
"""
TWO = "true_computation=%yes, false_computation=%no"
THREE = "branch_computations={%yes, %no, %last}"


def shares_of(lines: str, branches: str = TWO, others: str = "") -> list[int] | None:
    """How often each branch is taken in six trips, the number of the trip being `%i`."""
    text = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    more = ", %x" if branches == THREE else ""
    program = BODY.format(lines=text, branches=branches, more=more, others=others)
    (shares,) = branch_shares(parse(program)).values()
    return None if shares is None else [int(6 * share) for share in shares]


MINUS = "%three = s32[] constant(3)\n%n = s32[] subtract(%i, %three)\n"  # -3 … 2
EVALUATED = {
    "a quotient rounds towards zero": (
        MINUS + "%two = s32[] constant(2)\n%q = s32[] divide(%n, %two)\n%z = s32[] constant(0)\n"
        "%flag = pred[] compare(%q, %z), direction=EQ",
        [3, 3],  # -1, 0 and 1
    ),
    "a remainder has the sign of what is divided": (
        MINUS + "%two = s32[] constant(2)\n%q = s32[] remainder(%n, %two)\n"
        "%z = s32[] constant(0)\n%flag = pred[] compare(%q, %z), direction=LT",
        [2, 4],  # -3 and -1
    ),
    "sums wrap around": (
        "%large = s32[] constant(2147483645)\n%n = s32[] add(%i, %large)\n"
        "%z = s32[] constant(0)\n%flag = pred[] compare(%n, %z), direction=LT",
        [3, 3],
    ),
    "converted to unsigned": (
        MINUS + "%u = u32[] convert(%n)\n%b = u32[] constant(1000)\n"
        "%flag = pred[] compare(%u, %b), direction=GT",
        [3, 3],
    ),
    "any number but zero is true": (MINUS + "%flag = pred[] convert(%n)", [5, 1]),
    "select": (
        MINUS + "%z = s32[] constant(0)\n%less = pred[] compare(%n, %z), direction=LT\n"
        "%m = s32[] negate(%n)\n%a = s32[] select(%less, %m, %n)\n%two = s32[] constant(2)\n"
        "%flag = pred[] compare(%a, %two), direction=GE",
        [3, 3],  # 3, 2 and 2
    ),
    "abs, sign and not": (
        MINUS + "%a = s32[] abs(%n)\n%g = s32[] sign(%n)\n%m = s32[] multiply(%a, %g)\n"
        "%w = s32[] not(%m)\n%z = s32[] constant(0)\n"
        "%less = pred[] compare(%w, %z), direction=LT\n%flag = pred[] not(%less)",
        [3, 3],  # of -n - 1 those of -3, -2 and -1 are not below 0
    ),
    "shifts": (
        MINUS + "%right = s32[] shift-right-arithmetic(%n, %one)\n"
        "%left = s32[] shift-left(%right, %one)\n"
        "%flag = pred[] compare(%left, %n), direction=EQ",
        [3, 3],  # the even ones
    ),
    "a logical shift": (
        MINUS + "%k = s32[] constant(31)\n%top = s32[] shift-right-logical(%n, %k)\n"
        "%flag = pred[] compare(%top, %one), direction=EQ",
        [3, 3],
    ),
    "clamp": (
        MINUS + "%m = s32[] constant(-1)\n%c2 = s32[] clamp(%m, %n, %one)\n"
        "%flag = pred[] compare(%c2, %n), direction=EQ",
        [3, 3],
    ),
    "an index out of range is moved to the nearest": (
        MINUS + "%table = s32[3]{0} constant({1, 0, 1})\n"
        "%entry = s32[1]{0} dynamic-slice(%table, %n), dynamic_slice_sizes={1}\n"
        "%e = s32[] bitcast(%entry)\n%flag = pred[] compare(%e, %one), direction=EQ",
        [5, 1],
    ),
    "a part of a part": (
        "%table = pred[7]{0} constant({0, 1, 1, 0, 1, 0, 1})\n"
        "%pair = pred[2]{0} dynamic-slice(%table, %i), dynamic_slice_sizes={2}\n"
        "%second = pred[1]{0} slice(%pair), slice={[1:2]}\n%flag = pred[] reshape(%second)",
        [4, 2],
    ),
    "an array that is calculated": (
        "%up = s32[6]{0} iota(), iota_dimension=0\n%down = s32[6]{0} reverse(%up), dimensions={0}\n"
        "%four = s32[] constant(4)\n%fours = s32[6]{0} broadcast(%four), dimensions={}\n"
        "%late = pred[6]{0} compare(%down, %fours), direction=LT\n"
        "%entry = pred[1]{0} dynamic-slice(%late, %i), dynamic_slice_sizes={1}\n"
        "%flag = pred[] bitcast(%entry)",
        [4, 2],  # 5 and 4 come first
    ),
    "an array that wraps around": (
        "%up = s2[6]{0} iota(), iota_dimension=0\n"
        "%entry = s2[1]{0} dynamic-slice(%up, %i), dynamic_slice_sizes={1}\n"
        "%e = s2[] bitcast(%entry)\n%z = s2[] constant(0)\n"
        "%flag = pred[] compare(%e, %z), direction=LT",
        [2, 4],  # 0, 1, -2, -1, 0, 1
    ),
    "a fusion that runs beside others": (
        "%f-start = ((s32[]), pred[], u32[]) fusion-start(%i), kind=kLoop, calls=%odd\n"
        "%flag = pred[] fusion-done(%f-start)",
        [3, 3],
    ),
}
ODD = """
%odd (n: s32[]) -> pred[] {
  %n = s32[] parameter(0)
  %one = s32[] constant(1)
  %bit = s32[] and(%n, %one)
  ROOT %r = pred[] compare(%bit, %one), direction=EQ
}
"""


@pytest.mark.parametrize(("lines", "times"), EVALUATED.values(), ids=EVALUATED)
def test_integers_are_those_of_the_program(lines: str, times: list[int]) -> None:
    assert shares_of(lines, others=ODD) == times


def test_the_last_branch_is_taken_for_a_choice_out_of_range() -> None:
    assert shares_of(f"{MINUS}%flag = s32[] copy(%n)", THREE) == [1, 1, 4]


NOT_EVALUATED = {
    "bytes read as another type": MINUS + "%u = u32[] bitcast(%n)\n%b = u32[] constant(1000)\n"
    "%flag = pred[] compare(%u, %b), direction=GT",
    "a transpose by a bitcast": "%table = s32[2,3]{1,0} constant({ { 0, 1, 1 }, { 0, 1, 0 } })\n"
    "%turned = s32[3,2]{0,1} bitcast(%table)\n%flat = s32[6]{0} reshape(%turned)\n"
    "%entry = s32[1]{0} dynamic-slice(%flat, %i), dynamic_slice_sizes={1}\n"
    "%e = s32[] bitcast(%entry)\n%flag = pred[] compare(%e, %one), direction=EQ",
    "a table that is not written out": "%table = pred[6]{0} constant({...})\n"
    "%entry = pred[1]{0} dynamic-slice(%table, %i), dynamic_slice_sizes={1}\n"
    "%flag = pred[] bitcast(%entry)",
    "an array of two axes": "%up = s32[6,1]{1,0} iota(), iota_dimension=0\n"
    "%flat = s32[6]{0} reshape(%up)\n"
    "%entry = s32[1]{0} dynamic-slice(%flat, %i), dynamic_slice_sizes={1}\n"
    "%e = s32[] bitcast(%entry)\n%flag = pred[] compare(%e, %one), direction=EQ",
    "an array too long to calculate": "%up = s32[20000]{0} iota(), iota_dimension=0\n"
    "%entry = s32[1]{0} dynamic-slice(%up, %i), dynamic_slice_sizes={1}\n"
    "%e = s32[] bitcast(%entry)\n%flag = pred[] compare(%e, %one), direction=EQ",
    "what no one knows": '%y = pred[] custom-call(%i), custom_call_target="unreadable"\n'
    "%flag = pred[] and(%y, %y)",
    # The first five trips are known, and the last one is not.
    "a division by zero in one trip": "%five = s32[] constant(5)\n"
    "%left = s32[] subtract(%five, %i)\n%q = s32[] remainder(%one, %left)\n"
    "%flag = pred[] compare(%q, %one), direction=EQ",
}


@pytest.mark.parametrize("lines", NOT_EVALUATED.values(), ids=NOT_EVALUATED)
def test_what_is_not_evaluated_is_not_known(lines: str) -> None:
    assert shares_of(lines) is None


def test_a_body_that_two_loops_run_with_other_choices_is_not_known() -> None:
    text = BODY.format(lines="  %flag = pred[] convert(%i)", branches=TWO, more="", others="")
    again = "\n  %two = s32[] constant(2)\n  %later = (s32[], f32[]) tuple(%two, %p)\n"
    again += "  %other = (s32[], f32[]) while(%later), condition=%condition, body=%body\n  ROOT"
    first, _, rest = text.rpartition("\n  ROOT")
    assert [*branch_shares(parse(text)).values()] == [(Fraction(5, 6), Fraction(1, 6))]
    assert [*branch_shares(parse(first + again + rest)).values()] == [None]


# ---- the time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", PLATFORMS[1:])
def test_the_time_is_that_of_the_branches_that_run(platform: str) -> None:
    """One trip in six computes: the rest of a trip is far shorter than such a product."""
    # On a GPU the launch of a kernel takes as long as a small product.
    size = SIZE if platform.startswith("tpu") else 2048
    flags = {often: [trip % often == 0 for trip in range(60)] for often in (1, 6)}
    times = [measured(partial(by_flags, flags[often]), platform, size).time for often in (1, 6)]
    always, seldom = (time.known_seconds for time in times)  # type: ignore[union-attr]
    alone = measured(product, platform, size).time
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
