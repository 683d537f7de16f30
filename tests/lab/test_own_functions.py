"""Measuring, comparing and linting functions that are not this project's."""

import functools
import json
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import own_functions
import pytest
from flax import nnx
from helpers import Ended, Run, in_a_process, mesh_of, missing
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline import InputError, MeshConfig, lab
from nnx_pipeline.lab._page import outcomes_page
from nnx_pipeline.lab.compile._arguments import arguments_of, parse_argument
from nnx_pipeline.lab.compile._compiler import compile_with_dump
from nnx_pipeline.lab.compile._functions import abstract_arguments, find_function, name_of
from nnx_pipeline.lab.compile._places import mesh_on
from nnx_pipeline.lab.lint import Limits, lint

ROWS, SIZE = 64, 32
X, WEIGHT = (
    jax.ShapeDtypeStruct((ROWS, SIZE), "float32"),
    jax.ShapeDtypeStruct((SIZE, SIZE), "float32"),
)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def twice(x: jax.Array, w: jax.Array) -> jax.Array:
    """The same and another product, for which the first one must wait in memory."""
    y = product(x, w)
    return jnp.tanh(y @ w) + y[::-1]


def test_a_function_is_measured() -> None:
    result = lab.measure(product, X, WEIGHT)
    assert result.memory.argument_bytes == 4 * (ROWS * SIZE + SIZE * SIZE)
    assert result.memory.output_bytes == 4 * ROWS * SIZE
    assert result.flops == 2 * ROWS * SIZE * SIZE
    assert result.platform == "cpu"
    assert result.mesh == {}
    arguments = ["float32[64,32]", "float32[32,32]"]
    assert result.config == {"function": f"{__name__}:product", "arguments": arguments}
    assert set(result.seconds) == {"trace", "lower", "compile"}


@pytest.mark.parametrize("donate", [False, True])
def test_what_jit_was_told_counts(donate: bool) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=(0,) if donate else ())
    assert lab.measure(step, X).memory.alias_bytes == (4 * ROWS * SIZE if donate else 0)


class OfAnotherLibrary:
    """As `equinox.filter_jit` makes it: can be called and lowered, and donates what are arrays."""

    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function
        self.jitted = jax.jit(lambda given, rest: function(*given, *rest), donate_argnums=0)

    def __call__(self, *arguments: Any) -> Any:
        return self.jitted(arguments[:1], arguments[1:])

    def lower(self, *arguments: Any) -> Any:
        return self.jitted.lower(arguments[:1], arguments[1:])


def test_donation_is_honoured_however_a_function_was_jitted() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w + x.T @ x

    donating = jax.jit(step, donate_argnums=0)
    as_bound = jax.jit(lambda x, w: step(w, x), donate_argnums=1)
    for function in (
        donating,
        functools.partial(donating),
        OfAnotherLibrary(step),
        functools.partial(OfAnotherLibrary(step)),
    ):
        result = lab.measure(function, WEIGHT, X)
        assert result.memory.alias_bytes == 4 * SIZE * SIZE
        assert result.notes == ()
    result = lab.measure(functools.partial(as_bound, jnp.ones(X.shape)), WEIGHT)
    assert result.memory.alias_bytes == 4 * SIZE * SIZE
    assert result.memory.argument_bytes == 4 * (SIZE * SIZE + ROWS * SIZE)


@pytest.mark.parametrize("platform", ["cpu", "tpu:v5p:2x2x1", "cuda:h100:1"])
def test_donation_without_effect_is_said(platform: str) -> None:
    if missing({"tpu": "libtpu", "cuda": "jax_cuda13_plugin"}.get(platform[:3], "jax")):
        pytest.skip("the compiler is not installed")

    def step(unread: Any, w: jax.Array, b: jax.Array, x: jax.Array) -> Any:
        return (w + x.T @ x).astype(jnp.bfloat16), b + x[0]

    donating = jax.jit(step, donate_argnums=(0, 1, 2))
    bias = jax.ShapeDtypeStruct((SIZE,), "float32")
    result = lab.measure(donating, X, WEIGHT, bias, X, platform=platform)
    assert 4 * SIZE <= result.memory.alias_bytes < 4 * SIZE**2  # a TPU pads the bias
    _, note = result.notes
    assert note.startswith(
        "donated without effect: 1 argument (float32[32,32]; 4,096 bytes before sharding). A result"
    )
    kept = jax.jit(lambda w, x: w + x.T @ x, donate_argnums=0)
    assert lab.measure(kept, WEIGHT, X, platform=platform).notes == ()


def printing(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x[0])
    return x


def reading(x: jax.Array) -> jax.Array:
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def telling(x: jax.Array) -> jax.Array:
    jax.experimental.io_callback(print, None, x[0], ordered=True)
    return x


def showing(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (printing(x), jax.debug.callback(print, x)), x, length=2)[0]


@pytest.mark.skipif(missing("jax_cuda13_plugin"), reason="the CUDA plugin is not installed")
@pytest.mark.parametrize(
    ("function", "callback"),
    [
        (printing, "jax.debug.print"),
        (reading, "jax.pure_callback"),
        (telling, "jax.experimental.io_callback"),
        (jax.jit(showing), "jax.debug."),
    ],
)
def test_a_callback_is_refused_for_nvidia_at_its_line(function: Any, callback: str) -> None:
    assert lint(function, X) == []
    assert lab.measure(function, X).memory.argument_bytes == 4 * ROWS * SIZE
    named = rf"{callback}.* at .*test_own_functions.py:\d+ \(in \w+\) calls Python, which JAX"
    with pytest.raises(InputError, match=named):
        lab.measure(function, X, platform="cuda:h100:1")


def spectrum(x: jax.Array) -> jax.Array:
    return jnp.abs(jnp.linalg.eig(x.T @ x)[0])


def triangle(x: jax.Array) -> jax.Array:
    return jax.scipy.linalg.schur(x.T @ x)[0]


@pytest.mark.parametrize(
    ("function", "platform", "compiler", "why"),
    [
        (spectrum, "tpu:v5e:2x2", "libtpu", "not lower it for tpu; .* jnp.linalg.eigh where"),
        (spectrum, "cuda:h100:1", "jax_cuda13_plugin", "asks cuSOLVER .* jnp.linalg.eigh where"),
        (triangle, "tpu:v5e:2x2", "libtpu", "not lower it for tpu; .* what it returns$"),
        (triangle, "cuda:h100:1", "jax_cuda13_plugin", "not lower it for cuda; .* it returns$"),
    ],
)
def test_what_jax_does_not_lower_is_named_with_its_line(
    function: Any, platform: str, compiler: str, why: str
) -> None:
    """The errors of JAX name neither the line nor what to do; on a CPU it is measured."""
    if missing(compiler):
        pytest.skip(f"{compiler} is not installed")
    assert lab.measure(function, X).memory.argument_bytes == 4 * ROWS * SIZE
    primitive = "eig" if function is spectrum else "schur"
    named = rf"^{primitive} at .*test_own_functions.py:\d+ \(in {function.__name__}\): JAX .*{why}"
    with pytest.raises(InputError, match=named):
        lab.measure(function, X, platform=platform)


@pytest.mark.parametrize(
    ("function", "use"),
    [
        (lambda x: jnp.dot(x, WEIGHT), lab.measure),
        (lambda x: x + WEIGHT[0], lab.measure),
        (lambda x: x + WEIGHT[0], lint),
        (nnx.eval_shape(lambda: nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))), lab.measure),
        (nnx.eval_shape(lambda: nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))), lint),
    ],
)
def test_a_shape_from_outside_is_named(function: Any, use: Any) -> None:
    """JAX finds some while it traces, and some when it lowers."""
    named = r"computes with a jax.ShapeDtypeStruct that is none of its arguments, .*; pass it as"
    with pytest.raises(InputError, match=named):
        use(function, X)


PMAP = "uses jax.pmap, .*; write it as a jax.jit of arguments with shardings, or as a jax.shard_map"


@pytest.mark.parametrize("use", [lab.measure, lint])
@pytest.mark.parametrize("around", [lambda f: lambda x: f(x) + 1, jax.jit, lambda f: f])
def test_a_pmap_over_more_than_the_devices_is_named(around: Any, use: Any) -> None:
    """As of a process with one device: JAX fails while it traces, in an operation of its own."""
    mapped = around(jax.pmap(lambda x: x * 2))
    with pytest.raises(InputError, match=PMAP):
        use(mapped, jax.ShapeDtypeStruct((2 * jax.device_count(), 4), "float32"))


def test_the_same_words_of_another_operation_stay() -> None:
    with pytest.raises(ValueError, match="cannot select an axis to squeeze out") as caught:
        lab.measure(lambda x: jnp.squeeze(x, 0), jax.ShapeDtypeStruct((8, 4), "float32"))
    assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize("mesh", [None, "data=8"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_pmap_is_named(inside: bool, mesh: str | None) -> None:
    mapped = jax.pmap(lambda x: x * 2)
    x = jax.ShapeDtypeStruct((8, 4), "float32")
    named = rf"{PMAP}|\(write a jax.pmap as one\)"
    with pytest.raises(InputError, match=named):
        lab.measure((lambda x: mapped(x) + 1) if inside else mapped, x, mesh=mesh)


@pytest.mark.skipif(missing("jax_cuda13_plugin"), reason="the CUDA plugin is not installed")
@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (jnp.linalg.cholesky, "cusolver_potrf_ffi (1 call)"),
        (jnp.linalg.eigh, "cusolver_syevd_ffi (1 call)"),
        (lambda w: jnp.linalg.qr(jnp.linalg.qr(w)[0])[0], "cusolver_geqrf_ffi (2 calls)"),
        (lambda w: jnp.fft.fft(w).real, "fft (1 call)"),
        (lambda w: jnp.sort(w @ w), ""),
    ],
)
def test_scratch_of_libraries_is_said(function: Any, calls: str) -> None:
    notes = lab.measure(function, WEIGHT, platform="cuda:h100:1").notes
    said = [note for note in notes if "scratch that libraries allocate" in note]
    assert [calls in note for note in said] == ([True] if calls else [])


def test_a_size_that_does_not_split_over_the_mesh_has_the_sizes_that_do() -> None:
    mesh = AbstractMesh((4, 2), ("data", "fsdp"))
    sharding = NamedSharding(mesh, P(("data", "fsdp")))
    for make in (jax.ShapeDtypeStruct, types.SimpleNamespace):
        x = make(shape=(12, 4), dtype=jnp.dtype("float32"), sharding=sharding)
        message = "an axis of 12 does not split over data=4,fsdp=2 .* 8, such as 8 or 16"
        with pytest.raises(InputError, match=message):
            lab.measure(lambda x: x, x, mesh=mesh)


def test_donation_that_jax_ignores_is_said() -> None:
    """Inside another program nothing is given up; JSON and the note of compare say so."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w + x.T @ x

    def training(w: jax.Array, x: jax.Array) -> jax.Array:
        return step(w, x) * 2

    expected = "what step donates is not donated here: JAX ignores donation inside of another"
    for function in (training, jax.jit(training)):
        result = lab.measure(function, WEIGHT, X)
        assert result.memory.alias_bytes == 0
        (note,) = result.to_json()["notes"]
        assert note.startswith(expected)
    assert f"training: {expected}" in lab.compare(training, step, WEIGHT, X).note


def test_what_figures_hold_or_lack_is_said() -> None:
    """Branches of which one runs, and arguments that nobody reads."""

    def branching(unread: Any, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda: product(x, w), lambda: twice(x, w))

    result = lab.measure(branching, {"a": X, "b": (None, X)}, X, WEIGHT)
    assert result.flops == 3 * 2 * ROWS * SIZE**2
    assert result.to_json()["notes"] == (
        "2 arguments are in no figure, since the program does not read them: 16,384 bytes before "
        "sharding, which the caller still holds",
        "the matrix products count every branch of 1 conditional",
    )
    assert lab.measure(product, X, WEIGHT).notes == ()


class Held:
    """No pytree, as a trainer is; its methods are jitted with a static `self`."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def turned(self, x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(self.turns):
            x = product(x, w)
        return x

    by_number = functools.partial(jax.jit, static_argnums=0)(turned)
    by_nnx = functools.partial(nnx.jit, static_argnums=0)(turned)


def repeated(x: jax.Array, w: jax.Array, turns: int, kind: str = "tanh") -> jax.Array:
    assert kind == "tanh"
    return Held(turns).turned(x, w)


by_name = jax.jit(repeated, static_argnames=("turns", "kind"))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (Held(2).by_number, (X, WEIGHT)),
        (Held(2).by_nnx, (X, WEIGHT)),
        (Held.by_number, (Held(2), X, WEIGHT)),
        (by_name, (X, WEIGHT, 2, "tanh")),
        (jax.jit(repeated, static_argnums=(2, 3)), (X, WEIGHT, 2, "tanh")),
        (nnx.jit(repeated, static_argnums=(2, 3)), (X, WEIGHT, 2, "tanh")),
        (functools.partial(by_name, turns=2, kind="tanh"), (X, WEIGHT)),
        (functools.partial(repeated, turns=2), (X, WEIGHT)),
        (jax.jit(functools.partial(repeated, turns=2)), (X, WEIGHT)),
    ],
)
def test_static_arguments_need_be_no_arrays(function: Any, arguments: Any) -> None:
    result = lab.measure(function, *arguments)
    assert result.memory.argument_bytes == 4 * (ROWS + SIZE) * SIZE
    assert result.flops == 2 * 2 * ROWS * SIZE * SIZE
    assert lint(function, *arguments) == []
    half = jax.ShapeDtypeStruct((ROWS, SIZE), "bfloat16")
    mixed = [half if argument is X else argument for argument in arguments]
    with jax.numpy_dtype_promotion("standard"):
        (found,) = lint(function, *mixed, limits=Limits(large=1))
    assert (found.rule, found.bytes) == ("hidden-upcast", 4 * ROWS * SIZE)


def test_equinox_takes_what_is_no_array_as_static() -> None:
    equinox = pytest.importorskip("equinox")
    jitted = equinox.filter_jit(repeated)
    assert lab.measure(jitted, X, WEIGHT, 2, "tanh").flops == 2 * 2 * ROWS * SIZE * SIZE
    assert lint(jitted, X, WEIGHT, 2, "tanh") == []

    class Layer(equinox.Module):
        w: Any

        @equinox.filter_jit
        def apply(self, x: Any) -> Any:
            return product(x, self.w)

    result = lab.measure(Layer(WEIGHT).apply, X)
    assert result.flops == 2 * ROWS * SIZE * SIZE
    assert result.config["function"].endswith("Layer.apply")


def test_what_a_jit_does_not_take_as_static_is_refused() -> None:
    wrong = r"repeated is given a str, which its jit does not take as static; name that argument in"
    with pytest.raises(InputError, match=wrong):
        lab.measure(jax.jit(repeated, static_argnums=2), X, WEIGHT, 2, "tanh")
    with pytest.raises(InputError, match="a static argument without a hash, such as a list; give"):
        lab.measure(by_name, X, WEIGHT, 2, ["tanh"])
    with pytest.raises(InputError, match=r"numbers in order are traced \(.*; give it by name"):
        lab.measure(repeated, X, WEIGHT, 2, "tanh")
    with pytest.raises(TypeError, match="dot_general"):
        lab.measure(by_name, X, X, 2, "tanh")


def keyed(x: jax.Array, *, w: jax.Array, bias: Any = None, scale: float = 1.0) -> jax.Array:
    return product(x, w) * scale + (0.0 if bias is None else bias)


def gathered(*arrays: jax.Array, w: jax.Array) -> jax.Array:
    return product(*arrays, w)


@pytest.mark.parametrize("jit", [lambda function: function, jax.jit, nnx.jit])
@pytest.mark.parametrize("function", [keyed, gathered])
def test_keyword_only_arguments_are_the_last_ones(function: Any, jit: Any) -> None:
    result = lab.measure(jit(function), X, WEIGHT)
    assert result.memory.argument_bytes == 4 * (ROWS + SIZE) * SIZE
    assert result.config["arguments"] == ["float32[64,32]", "float32[32,32]"]
    assert lint(jit(function), X, WEIGHT) == []
    assert not lab.compare(jit(function), product, X, WEIGHT).failed
    given = () if function is gathered else (X,)
    with pytest.raises(InputError, match=r"cannot be called with . argument.*missing a required"):
        lab.measure(jit(function), *given)


@pytest.mark.parametrize("jit", [lambda function: function, jax.jit])
def test_an_array_is_bound_to_a_keyword_that_has_a_default(jit: Any) -> None:
    bias = jax.ShapeDtypeStruct((SIZE,), "float32")
    bound = functools.partial(jit(keyed), bias=bias)
    assert lab.measure(bound, X, WEIGHT).memory.argument_bytes == 4 * (
        ROWS * SIZE + SIZE * SIZE + SIZE
    )
    assert lint(bound, X, WEIGHT) == []
    with pytest.raises(InputError, match=r"with 3 arguments: too many .* and bind the rest with"):
        lab.measure(jit(keyed), X, WEIGHT, bias)


def test_a_number_on_a_mesh_has_no_sharding() -> None:
    assert lab.measure(lambda x, by: x * by, X, 2.0, mesh="data=8").notes[0].startswith("no arg")


def test_a_partial_has_the_name_of_its_function() -> None:
    bound = functools.partial(functools.partial(repeated, turns=2), kind="tanh")
    for function in (bound, jax.jit(bound), jax.vmap(bound), jax.tree_util.Partial(repeated)):
        assert name_of(function) == f"{__name__}:repeated"
    assert name_of(Held(2).by_number) == f"{__name__}:Held.turned"


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_arguments_are_said_with_their_shardings(kind: str) -> None:
    """As `--arg` takes them, so that two shardings of one function read apart."""
    mesh = mesh_of("data=4,fsdp=2", kind)
    texts = ["float32[64@data+fsdp,32]", "bfloat16[64,32@fsdp]", "float32[64,32]", "float32[]"]
    arguments = [parse_argument(text, mesh) for text in texts[:-1]]
    result = lab.measure(lambda *of: [2 * one for one in of], *arguments, 3.0, mesh=mesh)
    assert result.config["arguments"] == texts


def test_what_a_partial_binds_is_part_of_what_is_compared() -> None:
    """Two partials of one function differ on the page and in the JSON; arrays are no settings."""
    short, long = (functools.partial(repeated, w=jnp.ones(WEIGHT.shape), turns=n) for n in (1, 3))
    outcome = lab.compare(short, jax.jit(functools.partial(long, kind="tanh")), X)
    arms = [arm["config"] for arm in outcome.to_json()["arms"].values()]
    assert {arm["function"] for arm in arms} == {f"{__name__}:repeated"}
    assert [arm["bound"] for arm in arms] == [{"turns": 1}, {"turns": 3, "kind": "tanh"}]
    assert "bound.turns: 1 → 3" in outcomes_page("two partials", [outcome])
    assert "bound" not in lab.measure(product, X, WEIGHT).config


def test_a_weak_type_stays_weak() -> None:
    """bfloat16 times a weak float32 is bfloat16, as where the function runs."""
    x = jax.ShapeDtypeStruct((8, 8), "bfloat16")
    with jax.numpy_dtype_promotion("standard"):
        for weak in (jnp.asarray(2.0), jax.ShapeDtypeStruct((), "float32", weak_type=True), 2.0):
            assert lab.measure(jnp.multiply, x, weak).memory.output_bytes == 2 * 64
        strong = jax.ShapeDtypeStruct((), "float32")
        assert lab.measure(jnp.multiply, x, strong).memory.output_bytes == 4 * 64


def fetched(w: jax.Array, x: jax.Array) -> jax.Array:
    w, x = jax.device_put((w, x), jax.memory.Space.Device)
    return x @ w


@pytest.mark.parametrize("mesh", ["", "data=8"])
@pytest.mark.parametrize(
    ("platform", "compiler"),
    [("tpu:v5p:2x2x2", "libtpu"), ("cuda:h100:8", "jax_cuda13_plugin")],
)
def test_arguments_in_host_memory_stand_apart(platform: str, compiler: str, mesh: str) -> None:
    if missing(compiler):
        pytest.skip(f"{compiler} is not installed")
    size = 256
    grid = mesh_of("data=8", "auto") if mesh else Mesh(np.asarray(jax.devices()[:1]), ("data",))
    on_host = NamedSharding(grid, P(), memory_kind="pinned_host")
    if not mesh:
        on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    w = jax.ShapeDtypeStruct((size, size), "float32", sharding=on_host)
    x = jax.ShapeDtypeStruct((size, size), "float32")
    memory = lab.measure(fetched, w, x, mesh=mesh or None, platform=platform).memory
    assert (memory.argument_bytes, memory.host_argument_bytes) == (4 * size**2, 4 * size**2)
    memory = lab.measure(fetched, x, x, mesh=mesh or None, platform=platform).memory
    assert (memory.argument_bytes, memory.host_argument_bytes) == (2 * 4 * size**2, 0)
    # Nor does it take an argument in the memory of the device to know the device.
    memory = lab.measure(lambda w: fetched(w, w), w, mesh=mesh or None, platform=platform).memory
    assert (memory.argument_bytes, memory.host_argument_bytes) == (0, 4 * size**2)


def test_kinds_of_memory_that_a_device_lacks() -> None:
    device = jax.devices()[0]
    x = types.SimpleNamespace(
        shape=(8,), dtype=jnp.dtype("float32"), sharding=types.SimpleNamespace(memory_kind="disk")
    )
    with pytest.raises(InputError, match="in memory of the kind 'disk', which cpu lacks"):
        abstract_arguments((x,), None, device)
    on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=on_host)
    result = lab.measure(lambda x: jax.device_put(x, jax.memory.Space.Device) + 1, x)
    assert result.notes == (
        "arguments in pinned_host (here 1) count as device memory: the CPU compiler knows no other",
    )


def test_results_that_differ_are_a_warning() -> None:
    def as_pair(x: jax.Array, w: jax.Array) -> Any:
        return product(x, w), x

    def in_half(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(x, w).astype(jnp.bfloat16)

    differs = "warning: what is returned differs: "
    note = lab.compare(product, in_half, X, WEIGHT).note
    assert f"{differs}the result is float32[64,32] and bfloat16[64,32]" in note
    entry = lab.compare(product, as_pair, X, WEIGHT).to_json()
    assert "[0] is missing and float32[64,32]" in entry["note"]
    assert "warning" not in lab.compare(product, twice, X, WEIGHT).note


@pytest.mark.parametrize("shapes", [[(2**31, 2**31)], [(2**48,)] * 5], ids=["one", "together"])
def test_inputs_are_held_to_the_size_of_arguments(
    shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    monkeypatch.setattr(own_functions, "inputs", lambda: given)
    message = r"bytes are more than 1,125,899,906,842,624; give smaller axes"
    with pytest.raises(InputError, match=message):
        arguments_of("own_functions:inputs", (), None)
    with pytest.raises(InputError, match=message):
        lab.measure(lambda *arrays: arrays[0] + 1, *given)
    if len(shapes) > 1:
        texts = [f"float32[{','.join(map(str, shape))}]" for shape in shapes]
        with pytest.raises(InputError, match=message):
            arguments_of(None, texts, None)


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_64_bits_that_jax_would_halve_are_refused(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = jax.ShapeDtypeStruct((4,), dtype)
    monkeypatch.setattr(own_functions, "inputs", lambda: given)
    message = rf"argument \[0\]: JAX turns {dtype} into (\w+); write \1, or set JAX_ENABLE_X64"
    with pytest.raises(InputError, match=message):
        arguments_of("own_functions:inputs", (), None)
    for tool in (lab.measure, lint):
        with pytest.raises(InputError, match=message):
            tool(lambda x: x + 1, given)
    with jax.enable_x64(True):
        found = lab.measure(lambda x: x + 1, given)
    assert found.memory.argument_bytes == given.size * given.dtype.itemsize


def test_64_bits_with_values_are_32_as_in_the_program_itself() -> None:
    table = nnx.Variable(np.arange(4) / 4)
    found = lab.measure(
        lambda table, x, rate: rate * x * table[...], table, jnp.ones(4), np.array(0.1)
    )
    assert found.memory.argument_bytes == 4 * (4 + 4 + 1)


MESHES = [
    "data=4,tensor=2",
    MeshConfig(data=4, tensor=2),
    AbstractMesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2),
    Mesh(
        jax.devices()[:1] and __import__("numpy").array(jax.devices()).reshape(4, 2),
        ("data", "tensor"),
    ),
]


@pytest.mark.parametrize("mesh", MESHES, ids=["text", "config", "abstract", "mesh"])
def test_arguments_are_spread_over_the_mesh(mesh: Any) -> None:
    """Bytes are of one device: the shardings are those of the arguments, on the platform's mesh."""
    there = mesh_of("data=4,tensor=2", "auto")
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(there, P("data")))
    result = lab.measure(product, x, WEIGHT, mesh=mesh)
    assert result.memory.argument_bytes == 4 * (ROWS * SIZE // 4 + SIZE * SIZE)
    assert (result.mesh["data"], result.mesh["tensor"]) == (4, 2)


def test_an_nnx_module_and_a_linen_module_are_arguments_like_others() -> None:
    layer = nnx.eval_shape(lambda: nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0)))
    own = lab.measure(lambda layer, x: layer(x), layer, X)
    dense = nn.Dense(SIZE)
    params = jax.eval_shape(dense.init, jax.random.key(0), X)
    theirs = lab.measure(dense.apply, params, X)
    assert own.memory.argument_bytes == theirs.memory.argument_bytes
    assert own.flops == theirs.flops == 2 * ROWS * SIZE * SIZE


def test_values_are_never_looked_at() -> None:
    """Real arrays and numbers serve as abstract arguments."""
    result = lab.measure(lambda x, y: x * y, jnp.ones((8, 8)), 2.0)
    assert result.memory.output_bytes == 4 * 64


def test_two_functions_are_compared() -> None:
    outcome = lab.compare(twice, product, X, WEIGHT)
    assert not outcome.failed
    entry = outcome.to_json()
    assert entry["arms"]["a"]["label"] == f"{__name__}:twice"
    a, b = (entry["arms"][arm]["memory"]["temp_bytes"] for arm in "ab")
    assert entry["delta_temp_bytes"] == b - a < 0
    assert entry["verdict"] == "holds"
    assert entry["numerics"] is None


def test_the_same_function_twice_is_the_same_program() -> None:
    outcome = lab.compare(product, product, X, WEIGHT)
    assert outcome.note == "both arms compile to the same program"
    donating = jax.jit(product, donate_argnums=0)
    outcome = lab.compare(product, donating, X, WEIGHT, labels=("plain", "donating"))
    assert [label for label, _ in outcome.arms] == ["plain", "donating"]
    assert not outcome.same_program


def test_a_function_that_breaks_leaves_the_other_one() -> None:
    def broken(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ x

    outcome = lab.compare(broken, product, X, WEIGHT)
    assert outcome.failed
    assert outcome.a is None
    assert outcome.b is not None
    assert "broken did not compile: TypeError: dot_general requires" in outcome.note


@pytest.mark.parametrize(
    ("text", "shape", "dtype", "spec"),
    [
        ("bfloat16[8@data, 128]", (8, 128), "bfloat16", P("data", None)),
        ("int32[]", (), "int32", P()),
        ("float32[16@data+fsdp]", (16,), "float32", P(("data", "fsdp"))),
    ],
)
def test_arguments_written_down(text: str, shape: Any, dtype: str, spec: P) -> None:
    made = parse_argument(text, mesh_of("data=4,fsdp=2", "auto"))
    assert (made.shape, str(made.dtype)) == (shape, dtype)
    assert made.sharding.is_equivalent_to(NamedSharding(made.sharding.mesh, spec), made.ndim)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "float32",
            r"argument 'float32' is not an array; write for example bfloat16\[8@data,128\]",
        ),
        ("float33[2]", "there is no dtype 'float33'"),
        ("float64[2]", "JAX turns float64 into float32; write float32, or set JAX_ENABLE_X64=1"),
        ("float32[a]", "'a' is not an axis; write 8 or 8@data"),
        ("float32[8@dta]", "the mesh has no axis 'dta'; did you mean 'data'"),
        (
            "float32[9@data]",
            "an axis of 9 does not split over data=4 of the mesh; choose a multiple of 4, such as "
            "8 or 12",
        ),
        ("float32[4,12@data+fsdp]", "of 12 .* data=4,fsdp=2 .* a multiple of 8, such as 8 or 16"),
        ("float32[8@data,8@data]", "names a mesh axis twice"),
        ("float32[8,,4]", "'' is not an axis; write 8 or 8@data"),
        ("float32[8,]", "'' is not an axis; write 8 or 8@data"),
        ("str[3]", "JAX has no arrays of <U0; write a numeric dtype"),
        ("object[3]", "JAX has no arrays of object"),
        ("float32[9999999999,99999999999]", "is larger than 1,125,899,906,842,624 bytes"),
        ("int8[99999999999999999999999]", "'99999999999999999999999' is not an axis; write 8"),
    ],
)
def test_arguments_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_argument(text, mesh_of("data=4,fsdp=2", "auto"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("own_functions", "names no function; write module:function"),
        ("own_function:scaled", r"cannot be imported \(ModuleNotFoundError.*in the current folder"),
        ("own_function.py:scaled", r"there is no file own_function.py; name one, or a module"),
        ("here/own_functions:scaled", r"write here/own_functions.py:scaled for a file"),
        ("gs://here/own_functions.py:scaled", r"is an address, and only files and folders"),
        ("own_functions:scald", "there is no 'scald'; did you mean 'scaled'"),
        ("own_functions:not_a_function", "has the type int, which cannot be called; name a func"),
    ],
)
def test_functions_that_are_not_found(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_function(text)


def test_functions_and_inputs_by_name() -> None:
    assert find_function("own_functions:scaled") is own_functions.scaled
    given = arguments_of("own_functions:inputs", (), None)
    assert [leaf.shape for leaf in given] == [shape for shape, _ in own_functions.SHAPES]
    with pytest.raises(InputError, match="--inputs and --arg both give the arguments"):
        arguments_of("own_functions:inputs", ("float32[2]",), None)
    with pytest.raises(InputError, match="scaled needs scale, x, and is called without"):
        arguments_of("own_functions:scaled", (), None)
    with pytest.raises(InputError, match="'builtins:print' returned None; return the tuple of the"):
        arguments_of("builtins:print", (), None)
    assert name_of(own_functions.scaled) == "own_functions:scaled"


def test_a_function_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs once, imports what is beside it, and hides no module of its name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_it.py").write_text("SIZE = 3\n")
    (tmp_path / "json.py").write_text(
        "from beside_it import SIZE\nRUNS = []\ndef f(x): return x * SIZE\ndef g(x): return f(x)\n"
    )
    f = find_function(f"{tmp_path}/json.py:f")
    assert f(2) == 6
    assert f.__globals__ is find_function(f"{tmp_path}/json.py:g").__globals__
    assert sys.modules["json"] is json
    (tmp_path / "fails.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(InputError, match="cannot be imported \\(ZeroDivisionError"):
            find_function(f"{tmp_path}/fails.py:f")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"mesh": 8}, "mesh=8 is no mesh; give a mesh of JAX, a MeshConfig, or a text such as"),
        ({"platform": None}, "platform=None is no platform; give a text such as 'tpu:v5p:2x2x2'"),
    ],
)
def test_a_place_that_is_none(place: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lab.measure(own_functions.scaled, X, **place)


def test_arguments_that_do_not_fit() -> None:
    wrapped = functools.wraps(product)(lambda *arguments: product(*arguments))
    for function in (product, wrapped, jax.value_and_grad(product)):
        for tool in (lab.measure, lint):
            with pytest.raises(InputError, match="cannot be called with 1 argument: missing"):
                tool(function, X)
    with pytest.raises(InputError, match="a list is one argument, the arguments themselves are"):
        lab.measure(product, [X, WEIGHT])
    bound = functools.wraps(product)(lambda x: product(x, jnp.ones(WEIGHT.shape, WEIGHT.dtype)))
    assert lab.measure(bound, X).flops == lab.measure(product, X, WEIGHT).flops
    device, mesh = jax.devices()[0], mesh_of("data=8", "auto")
    spread = jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(mesh, P("data")))
    with pytest.raises(InputError, match="sharded over a mesh and none is given; give mesh="):
        abstract_arguments((spread,), None, device)
    other = mesh_on(AbstractMesh((8,), ("rows",)), jax.devices())
    with pytest.raises(InputError, match=r"over the mesh axis 'data', and the mesh has rows; name"):
        abstract_arguments((spread,), other, device)
    smaller = mesh_of("data=4,fsdp=2", "auto")
    with pytest.raises(
        InputError, match=r"sharded over data=8, and the mesh has data=4; give both"
    ):
        abstract_arguments((spread,), smaller, device)
    assert lab.measure(product, X, WEIGHT, mesh="data=8").notes == (
        "no argument is sharded: each of the 8 devices holds all of the arguments whole",
    )
    with pytest.raises(InputError, match="the mesh needs 16 devices and there are 8"):
        mesh_on(AbstractMesh((16,), ("rows",)), jax.devices())


@pytest.mark.parametrize("form", ["text", "mesh"])
def test_a_shard_map_takes_the_mesh_of_the_measurement(form: str) -> None:
    """One with a mesh of its own is refused; the words of JAX that it is known by may change."""
    own = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def summed(x: jax.Array, **places: Any) -> jax.Array:
        add = jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), in_specs=P("data"), out_specs=P(), **places
        )
        return add(x)

    mesh = "data=8" if form == "text" else own
    found = lab.measure(summed, X, mesh=mesh).collectives["all-reduce"]
    assert found["bytes"] == X.size * X.dtype.itemsize // 8
    with pytest.raises(InputError, match=r"a mesh of its own.*; leave mesh= out of the shard_map"):
        lab.measure(functools.partial(summed, mesh=own), X, mesh=mesh)


@pytest.mark.skipif(missing("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize("kind", ["concrete", "abstract"])
def test_shardings_of_its_own_that_a_function_has(kind: str) -> None:
    """Over devices of their own they are refused, over an abstract mesh all but those of inputs."""
    abstract_mesh = AbstractMesh((8,), ("data",))
    mesh = abstract_mesh if kind == "abstract" else mesh_of("data=8", "auto")
    own = NamedSharding(mesh, P("data"))
    placed = NamedSharding(abstract_mesh, P("data"))
    x = jax.ShapeDtypeStruct((1024, 128), "float32", sharding=placed)

    def constrained(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * 2, own)

    def double(x: jax.Array) -> jax.Array:
        return x * 2

    def doubled_inside(x: jax.Array) -> jax.Array:
        return jax.jit(double, in_shardings=own)(x + 1)

    def put_inside(x: jax.Array) -> jax.Array:
        return jax.device_put(x * 2, own)

    inside = "a jit, or a device_put, inside with devices of its own; leave"
    for function, message in (
        (doubled_inside, f"doubled_inside has {inside}"),
        (put_inside, f"put_inside has {inside}"),
        (constrained, "constrained has a sharding constraint with devices of its own; write it"),
        (jax.jit(double, out_shardings=own), "double has an out_sharding with devices of its own"),
        (jax.jit(double, in_shardings=own), "double has in_shardings that its arguments do not"),
    ):
        measure = functools.partial(lab.measure, function, x, mesh=abstract_mesh)
        # Newer versions of JAX take a constraint over other devices for one over its axes.
        accepted = function is constrained and jax.__version_info__ >= (0, 11)
        if (kind == "concrete" and not accepted) or "in_shardings" in message:
            with pytest.raises(InputError, match=message):
                measure(platform="tpu:v5p:2x2x2")
        else:
            assert measure(platform="tpu:v5p:2x2x2").memory.argument_bytes == 1024 * 128 * 4 // 8


ARGUMENTS = ("--inputs", "own_functions:inputs")


def line_of(text: str) -> str:
    """The only line of `own_functions.py` that holds a text, as a report names it."""
    lines = Path(own_functions.__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if text in line)
    return f"own_functions.py:{number}"


@pytest.mark.slow
def test_measure_and_compare_on_the_command_line() -> None:
    ended = in_a_process("measure", "own_functions:scaled", *ARGUMENTS, "--json", "-")
    assert ended.code == 0, ended.err
    assert ended.json["memory"]["output_bytes"] == 4 * 512 * 1024
    names = ("own_functions:scaled", "own_functions:jitted")
    ended = in_a_process("compare", *names, *ARGUMENTS, "--json", "-")
    assert ended.code == 0, ended.err
    (entry,) = ended.json["experiments"]
    assert [entry["arms"][arm]["label"] for arm in "ab"] == list(names)
    ended = in_a_process("measure", "own_functions:talkative", *ARGUMENTS, "--json", "-")
    assert ended.json["memory"]["output_bytes"] == 4 * 512 * 1024
    assert "a word while it is traced" in ended.err


def test_a_compiler_that_jax_lost_when_it_started_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if missing("jax_cuda13_plugin"):
        pytest.skip("the CUDA plugin is not installed")

    def gone(**_: Any) -> Any:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", gone)
    with pytest.raises(
        InputError, match=r"JAX started earlier and found .* or set JAX_PLATFORMS=cpu"
    ):
        lab.measure(product, X, WEIGHT, platform="cuda:h100:1")


@pytest.mark.slow
def test_what_breaks_is_one_line_and_1() -> None:
    ended = in_a_process("compare", "own_functions:broken", "own_functions:lean", *ARGUMENTS)
    assert ended.code == 1
    assert "own_functions:broken did not compile: TypeError" in ended.err
    assert "Traceback" not in ended.err
    ended = in_a_process("measure", "own_functions:broken", *ARGUMENTS)
    assert ended.code == 1
    assert ended.err.rstrip().endswith(f"{line_of('scale[:3]')}, in broken)")


def lint_command(*words: str) -> Ended:
    return in_a_process("lint", *words)


@pytest.mark.slow
def test_lint_on_the_command_line() -> None:
    ended = lint_command("--model", "tiny", "--mesh", "stage=2,fsdp=2", "--json", "-")
    assert ended.code == 0, ended.err
    assert ended.json["findings"] == []
    assert ended.json["schema"] == 1
    assert ended.json["config"]["model"]["num_layers"] == 8
    ended = lint_command(
        "own_functions:scaled", "--arg", "float32[1024]", "--arg", "bfloat16[512,1024]"
    )
    assert ended.code == 1
    assert f"{line_of('tanh(x * scale)')} (scaled)" in ended.out
    assert ended.err.splitlines()[-1] == "nnx-pipeline: 1 finding"


@pytest.mark.slow
def test_lint_json_and_limits() -> None:
    words = ("own_functions:scaled", *ARGUMENTS, "--json", "-")
    (finding,) = lint_command(*words).json["findings"]
    assert finding["rule"] == "hidden-upcast"
    assert line_of("tanh(x * scale)") == f"own_functions.py:{finding['line']}"
    assert finding["function"] == "scaled"
    assert (finding["bytes"], finding["bytes_of"]) == (4 * 512 * 1024, "one device")
    ended = lint_command(*words, "--large", "3")
    assert ended.code == 0
    assert ended.json["limits"] == {"large_bytes": 3e6, "one_hot_bytes": 256e6}
    assert ended.json["findings"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "MODULE:FUNCTION or FILE.py:FUNCTION; nothing is given"),
        (
            ("own_functions:scaled", "--model", "tiny"),
            "own_functions:scaled and --model tiny are both given",
        ),
        (("own_functions:scaled",), "own_functions:scaled cannot be called with 0 arguments"),
        (("--model", "tiny", "--arg", "float32[1]"), "leave them out with tiny"),
        (("own_functions:lean", "--set", "model.num_layers=2"), "a function has no config"),
        (("--model", "tiny", "--mesh", "stage=3"), "stage"),
        (("own_functions:broken", *ARGUMENTS), "did not compile or run: TypeError"),
        (("--model", "tiny", "--large", "-1"), "--large"),
    ],
)
def test_bad_input_ends_with_2(run: Run, words: tuple[str, ...], message: str) -> None:
    ended = run("lint", *words)
    assert ended.code == 2
    assert message in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "compiler"),
    [("tpu:v5p:2x2x2", "libtpu"), ("cuda:h100:8", "jax_cuda13_plugin")],
)
@pytest.mark.parametrize("mesh", ["", "data=8"])
def test_functions_on_compilers_without_hardware(platform: str, compiler: str, mesh: str) -> None:
    if missing(compiler):
        pytest.skip(f"{compiler} is not installed")
    rows = "512@data" if mesh else "512"
    words = ("--arg", "float32[1024]", "--arg", f"bfloat16[{rows},1024]", "--mesh", mesh)
    ended = in_a_process(
        "measure", "own_functions:lean", *words, "--platform", platform, "--json", "-"
    )
    assert ended.code == 0, ended.err
    assert ended.json["platform"] == platform
    assert ended.json["memory"]["output_bytes"] == 2 * 512 * 1024 // (8 if mesh else 1)


@pytest.mark.slow
@pytest.mark.skipif(missing("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize(("inputs", "rows"), [("computed_inputs", 512), ("placed_inputs", 64)])
def test_inputs_may_compute_arrays_beside_a_compiler_without_devices(
    inputs: str, rows: int
) -> None:
    words = ("--inputs", f"own_functions:{inputs}", "--mesh", "data=8", "--json", "-")
    ended = in_a_process("measure", "own_functions:lean", *words, "--platform", "tpu:v5p:2x2x2")
    assert ended.code == 0, ended.err
    assert ended.json["memory"]["output_bytes"] == 2 * rows * 1024


def test_programs_of_the_persistent_cache_are_compiled_again(tmp_path: Path) -> None:
    """A program from there has no buffer assignment; what else the process compiles is kept."""

    def own(x: jax.Array, w: jax.Array) -> jax.Array:  # no other test has compiled it
        return twice(x, w) + 1

    assert jax.config.jax_enable_compilation_cache, "an earlier test left it off"
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        jax.jit(own).lower(X, WEIGHT).compile()
        kept = len(list(tmp_path.iterdir()))
        assert kept
        heaps = [lab.measure(own, X, WEIGHT).memory.heap_bytes for _ in range(2)]
        assert heaps[0]
        assert heaps[0] == heaps[1]
        assert len(list(tmp_path.iterdir())) == kept
        jax.jit(lambda x, w: own(x, w) + 1).lower(X, WEIGHT).compile()
        assert len(list(tmp_path.iterdir())) > kept
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_threads_leave_the_persistent_cache_as_it_was() -> None:
    """The first one to begin is the first one to end: the second found the cache switched off."""
    begun, both, ended = (threading.Event() for _ in range(3))

    class First:
        def compile(self, **options: Any) -> None:
            begun.set()
            assert both.wait(60)

    class Second:
        def compile(self, **options: Any) -> None:
            both.set()
            assert ended.wait(60)

    def first() -> None:
        compile_with_dump(First())  # type: ignore[arg-type]
        ended.set()

    def second() -> None:
        assert begun.wait(60)
        compile_with_dump(Second())  # type: ignore[arg-type]

    assert jax.config.jax_enable_compilation_cache
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(first), threads.submit(second)]:
            done.result()
    assert jax.config.jax_enable_compilation_cache
