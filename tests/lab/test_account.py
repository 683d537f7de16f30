"""The whole-device account: every byte that decides whether a program fits, and verdicts by it."""

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_account_adds_up, missing, user_environment
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array
from packaging.version import Version
from page_examples import attribution, measurement

from nnx_pipeline import lab
from nnx_pipeline.experiments._arms import Arm, Experiment
from nnx_pipeline.lab._hlo.buffers import read_buffers
from nnx_pipeline.lab.attribution.account import assigned, free_parts
from nnx_pipeline.lab.comparison.outcome import Outcome, compare_measurements
from nnx_pipeline.lab.compile.measure import Measurement

COMPILERS = {"cpu": (), "tpu:v5p:2x2x2": ("libtpu",), "cuda:h100:8": ("jax_cuda13_plugin",)}
POINTER = {"cpu": 8, "cuda:h100:8": 8, "tpu:v5p:2x2x2": 16}  # of an entry in a table of outputs
SIZE = 512
ARRAY = 4 * SIZE * SIZE
X = jax.ShapeDtypeStruct((SIZE, SIZE), "float32")
CAPTURED = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype("float32")

each_compiler = pytest.mark.parametrize("platform", COMPILERS)


def need(platform: str) -> None:
    if missing(*COMPILERS[platform]):
        pytest.skip(f"{COMPILERS[platform]} is not installed")


def update(state: Array, gradient: Array) -> tuple[Array, Array]:
    """A new state, and something beside it; the array of the closure is added to the state."""
    return state - 0.1 * gradient + CAPTURED, jnp.tanh(gradient)


def plain(state: Array, gradient: Array) -> Array:
    return state - 0.1 * jnp.tanh(gradient)


def squares(x: Array) -> tuple[Array, Array]:
    """The sorted rows and their square wait in memory until the last product is made."""
    ordered = jnp.sort(x, axis=0)
    return jnp.sin(ordered @ x) @ x, x[::-1]


def looped(x: Array) -> Array:
    return jax.lax.scan(lambda state, _: (jnp.sin(state @ x), None), x, length=3)[0]


PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {
    "plain": (plain, 2),
    "donated": (jax.jit(plain, donate_argnums=0), 2),
    "captured": (update, 2),
    "squares": (squares, 1),
    "looped": (looped, 1),
    "unused": (lambda x, y: x + 1, 2),
    "same twice": (lambda x: (x + 1,) * 2, 1),
}


@functools.cache
def measured(name: str, platform: str) -> Measurement:
    function, count = PROGRAMS[name]
    return lab.measure(function, *[X] * count, platform=platform)


@each_compiler
def test_a_program_of_which_every_byte_is_known(platform: str) -> None:
    need(platform)
    result = lab.measure(jax.jit(update, donate_argnums=0), X, X, platform=platform)
    account, memory = result.account, result.memory
    assert account.kept_argument_bytes == ARRAY
    assert account.donated_argument_bytes == ARRAY
    assert account.output_bytes == ARRAY + 2 * POINTER[platform]
    assert account.constant_bytes == memory.constant_bytes == ARRAY
    assert account.heap_bytes == memory.heap_bytes < 1000
    assert memory.account_bytes == account.total_bytes
    assert 4 * ARRAY <= account.total_bytes < 4 * ARRAY + 1000
    (row,) = result.attribution.constants
    assert (row.bytes, row.shape, row.role) == (ARRAY, f"f32[{SIZE},{SIZE}]", "constant")


@pytest.mark.slow(but=8)
@each_compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_add_up(name: str, platform: str) -> None:
    need(platform)
    assert_account_adds_up(measured(name, platform))


@each_compiler
def test_temporaries_in_the_place_of_outputs(platform: str) -> None:
    """The outputs of `plain` hold nothing else; those of `squares` hold what makes them."""
    need(platform)
    assert measured("plain", platform).account.scratch_bytes == 0
    found = measured("squares", platform)
    if platform.startswith("tpu") and Version(version("libtpu")) >= Version("0.0.50"):
        # It gives them memory of their own.
        assert (found.account.scratch_bytes, found.account.heap_bytes >= ARRAY) == (0, True)
        return
    assert ARRAY <= found.account.scratch_bytes <= 2 * ARRAY
    lines = {row.source for row in found.attribution.in_outputs}
    assert any(line and "test_account.py" in line for line in lines)


def test_scratch_by_a_text() -> None:
    """Bytes of an output that hold something before the result does count once."""
    text = """BufferAssignment:
allocation 0: size 100, maybe-live-out:
 value: <1 a @0> (size=40,offset=0): f32[10]{0}
 value: <2 b @0> (size=60,offset=20): f32[15]{0}
 value: <3 out @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <4 p @0> (size=64,offset=0): f32[16]{0}
 value: <5 q @0> (size=64,offset=0): f32[16]{0}
allocation 2: size 24, constant:
 value: <6 c @0> (size=24,offset=0): f32[6]{0}
allocation 3: size 24, color 5, constant:
allocation 4: size 512, color 1, preallocated-temp:
allocation 5: size 7, color 5, parameter 1, shape |s8[7]| at ShapeIndex {}:
HloLiveRange (max 3):
  InstructionSequence:
    0:p
    1:a
    2:b
    3:out
  BufferLiveRange:
    p{}:0-1
    a{}:1-2
    b{}:2-3
    out{}:3-4
    q{}:2-4
"""
    found = assigned(read_buffers(text))
    assert (found.argument_bytes, found.output_bytes, found.alias_bytes) == (64, 164, 64)
    assert (found.constant_bytes, found.scratch_bytes, found.on_chip_bytes) == (24, 80, 512)
    assert assigned(read_buffers(text.replace("color 1", "color 2"))).on_chip_bytes is None


@each_compiler
def test_to_donate_a_state_holds(platform: str) -> None:
    need(platform)
    outcome = lab.compare(plain, jax.jit(plain, donate_argnums=0), X, X, platform=platform)
    assert outcome.verdict == "holds"
    entry = outcome.to_json()
    assert entry["judged_by"] == "account"
    assert entry["delta_account_bytes"] == pytest.approx(-ARRAY, abs=1000)
    assert entry["ratio_account"] == pytest.approx(2 / 3, abs=0.01)
    back = lab.compare(jax.jit(plain, donate_argnums=0), plain, X, X, platform=platform)
    assert back.verdict == "opposite"


@each_compiler
def test_a_captured_array_decides_what_fits(platform: str) -> None:
    need(platform)
    result = measured("captured", platform)
    without = result.memory.account_bytes - ARRAY
    assert result.account.rows()["constants"] == ARRAY
    for size, too_large in ((without, True), (without + ARRAY, False)):
        there = dataclasses.replace(result, device_memory_bytes=size)
        assert there.exceeds_device_memory is too_large
        assert there.to_json()["exceeds_device_memory"] is too_large


HOISTED = """
import jax, numpy as np
from nnx_pipeline import lab
captured = jax.numpy.asarray(np.random.default_rng(0).normal(size=(512, 512)), "float32")
x = jax.ShapeDtypeStruct((512, 512), "float32")
account = lab.measure(lambda x: x + captured, x).account
print(account.kept_argument_bytes, account.constant_bytes, account.total_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "expected"), [("0", (1, 1, 3)), ("1", (2, 0, 3))])
def test_what_jax_hoists_counts_once(flag: str, expected: tuple[int, ...]) -> None:
    """With simplified constants JAX makes arguments of captured arrays."""
    environment = {**user_environment(), "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": flag}
    command = [sys.executable, "-c", HOISTED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert tuple(map(int, done.stdout.split())) == tuple(ARRAY * n for n in expected)


PIECES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), max_size=8)


@given(PIECES)
@settings(max_examples=50)
def test_bytes_of_overlapping_pieces_count_once(pieces: list[tuple[int, int]]) -> None:
    seen: set[int] = set()
    for (start, end), size in zip(pieces, free_parts(pieces), strict=True):
        new = set(range(start, end)) - seen
        assert size == len(new)
        seen |= new


def test_the_two_reports_of_a_compiler_disagree() -> None:
    made = with_figures(1)
    buffers = read_buffers("allocation 0: size 1000, parameter 0, shape |s8[1000]|:\n")
    account = dataclasses.replace(made, assigned=assigned(buffers)).account
    assert account.notes[0] == (
        "arguments: 1,000 bytes in the buffer assignment, 210,000,000 by the compiler's analysis"
    )
    assert len(account.notes) == 3


def with_figures(temp: int, *, heap: int | None = 1000, constants: int | None = 24) -> Measurement:
    made = measurement(attribution())
    memory = dataclasses.replace(
        made.memory, temp_bytes=temp, heap_bytes=heap, constant_bytes=constants
    )
    return dataclasses.replace(made, memory=memory, hlo=f"ENTRY %f{temp}")


def judged(a: Measurement, b: Measurement, by: Any = "temp") -> Outcome:
    arms = {"a": Arm(label="one"), "b": Arm(label="other")}
    experiment = Experiment(name="made", claim="", difference="up", judged_by=by, **arms)
    return compare_measurements(experiment.question, a, b)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "ratio"),
    [
        (0, 5_000, "opposite", None),
        (5_000, 0, "holds", 0.0),
        (0, 0, "no effect", None),
        (1_000, 1_009, "no effect", 1.009),
        (1_000, 1_011, "opposite", 1.011),
        (1_000, 989, "holds", 0.989),
    ],
)
def test_verdicts_by_temp(before: int, after: int, verdict: str, ratio: float | None) -> None:
    outcome = judged(with_figures(before), with_figures(after))
    assert outcome.verdict == verdict
    entry = outcome.to_json()
    assert (entry["judged_by"], entry["ratio_temp"]) == ("temp", ratio)
    assert entry["delta_temp_bytes"] == after - before


def test_where_quantities_disagree_the_note_says_so() -> None:
    a, b = with_figures(5_000, heap=400_000_000), with_figures(9_000, heap=300_000_000)
    assert judged(a, b).note == "by the heap and the account: less memory"
    assert judged(a, b, "account").note == "by temp: more memory"
    both = with_figures(5_000, heap=400), with_figures(9_000, heap=800)
    apart = "two programs whose account is less than 1 % apart"
    assert judged(*both, "account").note == f"{apart}; by temp and the heap: more memory"
    assert (judged(a, b).verdict, judged(a, b, "account").verdict) == ("opposite", "holds")
    zero = judged(with_figures(5_000, heap=0), with_figures(5_001, heap=7))
    apart = "two programs whose temp is less than 1 % apart"
    assert (zero.verdict, zero.note) == ("no effect", f"{apart}; by the heap: more memory")
    fewer = with_figures(9_000, heap=8_000)  # than arguments, which one arm holds half of
    memory = dataclasses.replace(fewer.memory, argument_bytes=fewer.memory.argument_bytes // 2)
    fewer = dataclasses.replace(fewer, memory=memory, assigned=None)
    assert judged(with_figures(5_000, heap=4_000), fewer).note == "by the account: less memory"


def test_without_a_buffer_assignment_the_account_is_not_known() -> None:
    bare = with_figures(5_000, heap=None, constants=None)
    assert bare.memory.account_bytes is None
    assert bare.account.total_bytes is None
    assert bare.to_json()["account"]["rows"]["constant_bytes"] is None
    at_least = 210_000_004 + 5_000
    for size, too_large in ((at_least - 1, True), (at_least, None)):
        there = dataclasses.replace(bare, device_memory_bytes=size)
        assert there.exceeds_device_memory is too_large
    outcome = judged(bare, bare, "account")
    assert outcome.verdict == "not applicable"
    assert "the account is not known" in outcome.note


@pytest.mark.skipif(missing("libtpu"), reason="libtpu is not installed")
def test_on_chip_memory_is_in_the_peak_of_a_tpu() -> None:
    result = lab.measure(lambda x: jnp.tanh(x @ x), X, platform="tpu:v5p:2x2x2")
    assert result.account.on_chip_bytes == ARRAY  # both factors are read from there
    assert result.memory.account_bytes < 2 * ARRAY + 1000
    assert result.memory.peak_bytes == 3 * ARRAY
    assert measured("plain", "cpu").account.on_chip_bytes is None


@pytest.mark.skipif(missing("libtpu"), reason="libtpu is not installed")
def test_what_goes_to_the_host_is_apart() -> None:
    def offloaded(x: Array) -> tuple[Array, Array]:
        return x + 1, jax.device_put(jnp.tanh(x), jax.memory.Space.Host)

    memory = lab.measure(offloaded, X, platform="tpu:v5p:2x2x2").memory
    assert memory.host_output_bytes == ARRAY
    assert memory.output_bytes == ARRAY + 2 * POINTER["tpu:v5p:2x2x2"]
