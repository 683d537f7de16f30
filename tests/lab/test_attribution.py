"""What the compilers put in their heaps: planted faults, training steps, roles that are known."""

import functools
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import planted
import pytest
import splash
from helpers import Run, assert_account_adds_up, mesh_of, missing, optax_promotion
from hlo_texts import with_line_breaks
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from nnx_pipeline import MeshConfig, lab
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab._cli.options import chosen_config
from nnx_pipeline.lab._cli.values import Chosen
from nnx_pipeline.lab._hlo.dataflow import Flow
from nnx_pipeline.lab._hlo.module import Module, parse
from nnx_pipeline.lab._report.tables import measurement_view
from nnx_pipeline.lab._timing.result import PASSES
from nnx_pipeline.lab.attribution._origins import Origins
from nnx_pipeline.lab.attribution._result import ROLES, Attribution, Buffer
from nnx_pipeline.lab.comparison.outcome import Outcome
from nnx_pipeline.lab.compile._figures import read_program
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform

COMPILERS = {"cpu": (), "tpu:v5p:2x2x2": ("libtpu",), "cuda:h100:8": ("jax_cuda13_plugin",)}
PLANTED: dict[Callable[..., Array], tuple[tuple[Any, ...], str | None]] = {
    planted.keeping: ((planted.WEIGHT, planted.BATCHES), None),
    planted.upcast: ((planted.WEIGHT, planted.BATCHES), None),
    planted.gathering: ((planted.SPREAD, planted.FEW), "fsdp=8"),
}


def line_of(mark: str) -> str:
    """`planted.py:12`, the line that ends in this mark."""
    lines = Path(planted.__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# planted: {mark}")]
    return f"planted.py:{number}"


def need(platform: str) -> None:
    if missing(*COMPILERS[platform]):
        pytest.skip(f"{COMPILERS[platform]} is not installed")


@pytest.fixture(scope="module")
def outcomes() -> Callable[[str, Callable[..., Array]], Outcome]:
    """The sound program beside the one with the fault, each compiled once."""

    @functools.cache
    def compare(platform: str, function: Callable[..., Array]) -> Outcome:
        arguments, mesh = PLANTED[function]
        faulty = functools.partial(function, fault=True)
        return lab.compare(function, faulty, *arguments, mesh=mesh, platform=platform)

    return compare


def attribution_of(measurement: Measurement | None) -> Attribution:
    assert measurement is not None
    assert measurement.attribution is not None
    return measurement.attribution


def check_sums(measurement: Measurement | None) -> None:
    """Rows at the peak are the heap, with what is beyond them they are temp."""
    found = attribution_of(measurement)
    assert measurement is not None
    memory = measurement.memory
    assert (found.heap_bytes, found.temp_bytes) == (memory.heap_bytes, memory.temp_bytes)
    assert sum(row.bytes for row in found.buffers) == found.heap_bytes
    assert found.heap_bytes + sum(row.bytes for row in found.other) == found.temp_bytes
    assert sum(found.by_role().values()) == found.heap_bytes
    assert {row.role for row in (*found.buffers, *found.other)} <= set(ROLES)
    assert all(row.bytes > 0 for row in found.buffers)
    assert all(row.first <= found.peak_position <= row.last for row in found.buffers)
    held = sum(row.bytes for row in found.buffers if row.role != "fragmentation")
    assert dict(found.timeline)[found.peak_position] == held
    assert max(size for _, size in found.timeline) == held


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("platform", COMPILERS)
@pytest.mark.parametrize("function", PLANTED, ids=lambda function: function.__name__)
def test_a_planted_fault_is_named_by_its_line(
    outcomes: Any, platform: str, function: Callable[..., Array]
) -> None:
    need(platform)
    outcome = outcomes(platform, function)
    assert not outcome.failed, outcome.note
    first = outcome.buffers[:2]
    named = [row for row in first if (row.source or "").endswith(line_of(function.__name__))]
    assert any(row.change > 0 for row in named), first
    for arm in (outcome.a, outcome.b):
        check_sums(arm)
    change = sum(row.change for row in outcome.buffers)
    assert change == outcome.b.memory.heap_bytes - outcome.a.memory.heap_bytes
    assert change >= 32e6


@pytest.mark.parametrize("platform", COMPILERS)
def test_roles_of_the_planted_buffers(outcomes: Any, platform: str) -> None:
    """What is kept of every microbatch, the gradient that they add up to, the gathered weight."""
    need(platform)
    kept, gathered = (outcomes(platform, f) for f in (planted.keeping, planted.gathering))
    large = f"{planted.MICROBATCHES},{planted.ROWS},{planted.HIDDEN}"
    rows = [row for row in attribution_of(kept.b).buffers if large in row.shape]
    assert {row.role for row in rows} == {"saved residual"}
    assert len(rows) == 2  # tanh and its derivative
    assert not any(large in row.shape for row in attribution_of(kept.a).buffers)
    counts = []
    for arm in (gathered.a, gathered.b):
        whole = [row for row in attribution_of(arm).buffers if row.role == "gathered weight"]
        counts.append(sum(f"[{planted.HIDDEN},{planted.HIDDEN}]" in row.shape for row in whole))
    assert counts[1] > counts[0] > 0


STEP = ("train.sequence_length=1024",)


@pytest.fixture(scope="module")
def step() -> Callable[[str], Measurement]:
    """A training step of the smallest model, compiled once per platform."""

    @functools.cache
    def measure(platform: str) -> Measurement:
        need(platform)
        mesh = MeshConfig(stage=4, fsdp=2)
        with optax_promotion():
            return measure_step(chosen_config(Chosen("tiny", STEP)), mesh, Platform.parse(platform))

    return measure


@pytest.mark.slow
@pytest.mark.parametrize("platform", COMPILERS)
def test_a_training_step_has_lines_of_source(platform: str, step: Any) -> None:
    result = step(platform)
    check_sums(result)
    assert_account_adds_up(result)
    assert result.account.donated_argument_bytes > result.account.kept_argument_bytes
    found = attribution_of(result)
    roles = found.by_role()
    named = sum(row.bytes for row in found.buffers if row.source)
    assert named >= 0.9 * (found.heap_bytes - roles.get("fragmentation", 0))
    assert found.peak_source
    assert "nnx_pipeline" in found.peak_source
    assert not any("site-packages/jax" in (row.source or "") for row in found.buffers)
    assert {"saved residual", "activation", "gradient accumulator"} <= set(roles)
    assert roles.get("other", 0) < 0.01 * found.heap_bytes


def test_the_gradient_of_a_head_whose_tokens_travel_is_no_logits() -> None:
    """The loss computes it in the forward pass, and an all-to-all brings it to the weight."""
    need("tpu:v5p:2x2x2")
    # 1000 columns of a device fill no tile of 128, so that the result is copied to its weight.
    changes = ("model.vocab_size=8000", "train.sequence_length=16", "model.num_layers=1")
    config = chosen_config(Chosen("tiny", changes))
    with optax_promotion():
        result = measure_step(config, MeshConfig(fsdp=8), Platform.parse("tpu:v5p:2x2x2"))
    rows = [row for row in attribution_of(result).buffers if row.shape == "f32[8,8000]"]
    assert "gradient" in {row.role for row in rows}
    assert "logits" not in {row.role for row in rows}


def test_a_program_without_a_backward_pass_has_no_gradient() -> None:
    """Also where an all-to-all makes an array as large as a weight."""
    need("tpu:v5p:2x2x2")
    mesh, size = mesh_of("fsdp=8", "auto"), 1024

    def forward(weight: Array, x: Array) -> Array:
        columns = jax.lax.with_sharding_constraint(weight, P(None, "fsdp"))
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ columns), P("fsdp", None))
        return jnp.sin(hidden) @ weight

    def array(spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, size), "float32", sharding=NamedSharding(mesh, spec))

    arguments = array(P("fsdp", None)), array(P(None, None))
    result = lab.measure(forward, *arguments, mesh=mesh, platform="tpu:v5p:2x2x2")
    assert result.collectives["all-to-all"]["ops"]
    assert "gradient" not in {row.role for row in attribution_of(result).buffers}


@pytest.mark.slow
@pytest.mark.parametrize("platform", [one for one in COMPILERS if one != "cpu"])
def test_the_time_of_a_training_step(platform: str, step: Any) -> None:
    """Its parts add up, lie where they must, and those by line are all."""
    time = step(platform).time
    lowest, highest = time.range_seconds
    assert 0 < lowest <= time.step_seconds <= highest
    busy = time.compute_seconds + time.memory_wait_seconds
    assert busy + time.exposed_seconds == pytest.approx(time.step_seconds)
    assert busy + time.collective_seconds == pytest.approx(highest)
    assert sum(row.seconds for row in time.rows) == pytest.approx(time.compute_seconds)
    assert sum(row.launches for row in time.rows) == time.launches > 1000
    assert {row.pass_name for row in time.rows} == set(PASSES)
    assert 0 < time.mfu < time.hfu < 1
    assert time.bubble_share == 3 / 7  # as many microbatches as stages
    named = sum(row.seconds for row in time.rows if row.source)
    assert named > 0.8 * time.compute_seconds


@pytest.mark.slow
@pytest.mark.parametrize("platform", COMPILERS)
def test_a_training_step_is_read_whole(platform: str, step: Any) -> None:
    """As many instructions and computations as a count of lines finds; line breaks are nothing."""
    result = step(platform)
    # Only what the compiler gives no time for, such as a sort.
    by_rule = {"time_bound", "time_rule"}
    assert {figure for one in result.unread for figure in one.figures} <= by_rule
    assert result.flops == result.known_flops > 0
    module = parse(result.hlo)
    lines = result.hlo.splitlines()
    starts = [line for line in lines if re.match(r"  (ROOT )?%\S+ = \S", line)]
    heads = [line for line in lines if re.match(r"(ENTRY )?%\S+ \(.*\) -> .* \{$", line)]
    counts = [len(computation.instructions) for computation in module.computations.values()]
    assert (sum(counts), len(counts)) == (len(starts), len(heads))
    broken = with_line_breaks(result.hlo)
    assert len(broken.splitlines()) > 2 * len(lines)
    read = read_program(broken, None, 0)
    assert (read.flops, read.collectives, read.unread) == (result.flops, result.collectives, ())
    assert owned(parse(broken)) == owned(module)


def owned(module: Module) -> list[tuple[str | None, ...]]:
    """Operation, line and origin of every fiftieth instruction."""
    flow = Flow(module)
    origins = Origins(flow)
    found = [origins.of((name, ())) for name in list(flow.instructions)[::50]]
    return [(one.operation, one.source, one.instruction and one.instruction.name) for one in found]


@pytest.fixture(scope="module")
def attention() -> Measurement:
    need("tpu:v5p:2x2x2")
    given = splash.arguments()
    return lab.measure(splash.step, *given, mesh="data=8", platform="tpu:v5p:2x2x2")


def test_what_follows_a_kernel_is_counted(attention: Measurement) -> None:
    """Each of 8 devices has one row of tokens: four products per layer, and twice that backward."""
    assert attention.flops is None
    products = 4 * splash.LAYERS
    assert attention.known_flops == 3 * products * 2 * splash.TOKENS * splash.WIDTH**2
    sums = attention.collectives["all-reduce"]
    # The gradients of all four weights in one sum per layer, and the loss.
    assert sums["executed"] == splash.LAYERS + 1
    assert sums["bytes"] == splash.LAYERS * 4 * splash.WIDTH**2 * 2 + 4
    kernels = {one.name.partition(".")[0]: one for one in attention.unread}
    assert set(kernels) == {
        "splash_mha_fwd_residuals",
        "splash_mha_dkv_no_residuals",
        "splash_mha_dq_no_residuals",
    }
    assert {(one.executed, one.figures) for one in kernels.values()} == {
        (splash.LAYERS, ("flops", "time"))
    }
    assert attention.to_json()["unread"][0]["what"] == "tpu_custom_call"


def test_lines_and_roles_of_what_follows_a_kernel(attention: Measurement) -> None:
    check_sums(attention)
    rows = attribution_of(attention).buffers
    lines = Path(splash.__file__).read_text().splitlines()
    (behind,) = [n for n, line in enumerate(lines, 1) if line.endswith("# behind the kernel")]
    found = {row.role for row in rows if row.source == f"{splash.__file__}:{behind}"}
    assert "saved residual" in found
    named = sum(row.bytes for row in rows if row.source)
    assert named >= 0.8 * sum(row.bytes for row in rows if row.role != "fragmentation")


def test_a_kernel_is_named_in_the_text_and_kept_in_the_cache(attention: Measurement) -> None:
    console = Console(width=400, file=io.StringIO())
    console.print(measurement_view("attention", attention))
    text = console.file.getvalue()
    assert "matrix products: – per device and step, 0.001 TFLOP of them known" in text
    missing_in = "not in the matrix products and in the estimated time: tpu_custom_call"
    assert f"{missing_in} splash_mha_fwd_residuals" in text
    assert "(3 times per step), " in text
    assert "a kernel written by hand" in text
    kept = Measurement.from_cache(json.loads(json.dumps(attention.to_cache())), "2026-01-01")
    assert (kept.unread, kept.known_flops) == (attention.unread, attention.known_flops)
    assert kept.time == attention.time
    assert attention.time.step_seconds is None
    assert attention.time.known_seconds > 0


ROWS, SIZE, VOCABULARY = 512, 256, 3001
X = jax.ShapeDtypeStruct((ROWS, SIZE), "float32")
W = jax.ShapeDtypeStruct((SIZE, SIZE), "float32")


def carried(x: Array, w: Array) -> Array:
    def turn(state: Array, _: None) -> tuple[Array, None]:
        return jnp.sin(state @ w), None

    return jax.lax.scan(turn, x, length=5)[0].sum()


def logits(x: Array, head: Array) -> Array:
    return jax.nn.logsumexp(x @ head, axis=-1).sum()


def moments(x: Array, w: Array) -> tuple[Array, Array]:
    y = jnp.sort(x @ w, axis=-1)
    return y[::-1] @ w, y.sum()


def cast(x: Array, w: Array) -> Array:
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


def saved(x: Array, w: Array) -> Array:
    return jax.grad(lambda w: jnp.sin(jnp.sort(jnp.exp(x @ w))).sum())(w)


def residual_stream(x: Array, w: Array) -> Array:
    """What a layer gives is added to what it read: no gradient, although an argument's shape."""
    return jax.lax.scan(lambda x, _: (x + jnp.sin(x @ w), None), x, length=5)[0].sum()


def summed(x: Array, w: Array) -> Array:
    def loss(w: Array) -> Array:
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=5)[0].sum()

    gradient = jax.grad(loss)(w)
    return (gradient @ gradient).sum()


def running_sum(x: Array, w: Array) -> Array:
    """No derivative, so no gradient."""
    parts = jnp.sin(x)[:5, None, :] * jnp.cos(x)[None, :SIZE, :1]
    total, _ = jax.lax.scan(lambda s, part: (s + jnp.sort(part), None), jnp.zeros_like(w), parts)
    return (total @ w).sum()


def recomputed(x: Array, w: Array) -> Array:
    layer = jax.checkpoint(lambda w: jnp.sort(jnp.tanh(jnp.sort(x @ w))))
    return jax.grad(lambda w: (layer(w) ** 2).sum())(w) @ w


def recomputed_loop(x: Array, w: Array) -> Array:
    """What an inner loop stacks when the outer one recomputes it, for its own backward pass."""

    @jax.checkpoint
    def outer(x: Array, _: None) -> tuple[Array, None]:
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=7)[0], None

    def loss(x: Array) -> Array:
        return jax.lax.scan(outer, x, length=3)[0].sum()

    return jax.grad(loss)(x)


def role(function: Callable[..., Array], *arguments: Any, shape: str) -> set[str]:
    found = attribution_of(lab.measure(function, *arguments))
    return {row.role for row in found.buffers if row.shape.endswith(shape)}


HEAD = jax.ShapeDtypeStruct((SIZE, VOCABULARY), "float32")


@pytest.mark.parametrize(
    ("function", "weight", "shape", "expected"),
    [
        (carried, W, f"f32[{ROWS},{SIZE}]", "scan carry"),
        (logits, HEAD, f"f32[{ROWS},{VOCABULARY}]", "logits"),
        (moments, W, f"f32[{ROWS},{SIZE}]", "activation"),
        (cast, W, f"[{ROWS},{SIZE}]", "parameter cast"),
        (saved, W, f"f32[{ROWS},{SIZE}]", "saved residual"),
        (residual_stream, W, f"f32[{ROWS},{SIZE}]", "scan carry"),
        (summed, W, f"f32[{SIZE},{SIZE}]", "gradient accumulator"),
        (running_sum, W, f"f32[{SIZE},{SIZE}]", "scan carry"),
        (recomputed, W, f"f32[{ROWS},{SIZE}]", "activation"),
        (recomputed_loop, W, f"f32[7,{ROWS},{SIZE}]", "saved residual"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_roles_of_small_programs(
    function: Callable[..., Array], weight: Any, shape: str, expected: str
) -> None:
    assert expected in role(function, X, weight, shape=shape)


def test_what_a_library_works_in() -> None:
    """cuBLASLt takes 4 MiB beside each product, and says so in the program."""
    need("cuda:h100:8")
    cublas = Platform(**(vars(Platform.parse("cuda:h100:8")) | {"gemm": "cublas"}))
    found = attribution_of(lab.measure(lambda x, w: jnp.sin(x @ w) @ w, X, W, platform=cublas))
    roles = {row.shape: row.role for row in found.buffers}
    assert roles["s8[4194304]"] == "library workspace"
    assert roles[f"f32[{ROWS},{SIZE}]"] == "activation"
    assert {shape for shape, role in roles.items() if role == "other"} <= {"tuple of 2"}


@pytest.mark.parametrize(
    ("dtype", "activation", "share"), [("float32", jnp.square, 0.79), ("bfloat16", jnp.tanh, 0.88)]
)
def test_partial_sums_of_a_split_product(dtype: str, activation: Any, share: float) -> None:
    """In both passes, whatever sums them: 4 of the 5 parts of this heap, 8 of 9 in bfloat16."""
    need("cuda:h100:8")
    rows, narrow, wide = 16, 4096, 16384

    def step(weights: tuple[Array, Array], x: Array) -> tuple[Array, tuple[Array, Array]]:
        def loss(weights: tuple[Array, Array]) -> Array:
            y = activation(x @ weights[0]) @ weights[1]
            return (y.astype(jnp.float32) ** 2).mean()

        return jax.value_and_grad(loss)(weights)

    shapes = (narrow, wide), (wide, narrow), (rows, narrow)
    up, down, x = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    found = attribution_of(lab.measure(step, (up, down), x, platform="cuda:h100:1"))
    assert found.by_role()["partial sums"] >= share * found.heap_bytes
    split = f"f32[4,{rows},{wide}]"
    both = [row for row in (*found.buffers, *found.in_outputs) if row.shape == split]
    assert {"transpose(" in row.operation for row in both} == {False, True}
    assert {row.role for row in both} == {"partial sums"}


def test_partial_sums_of_products_of_a_batch() -> None:
    """Of the gradient of each of two weights; each product by itself is no such part."""
    need("cuda:h100:8")
    rows, size, heads = 65536, 256, 2

    def step(weights: Array, x: Array) -> tuple[Array, Array]:
        def loss(weights: Array) -> Array:
            return jnp.tanh(jnp.einsum("hrn,hnm->hrm", x, weights)).sum()

        return jax.value_and_grad(loss)(weights)

    shapes = (heads, size, size), (heads, rows, size)
    given = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    found = attribution_of(lab.measure(step, *given, platform="cuda:h100:1")).buffers
    (parts,) = [row.shape for row in found if row.role == "partial sums"]
    assert re.fullmatch(rf"f32\[\d+,\d+,{size},{size}\]", parts)


TURNS, BATCH, WIDTH = (
    8,
    1536,
    2048,
)  # large enough that nothing of it lies in a TPU's on-chip memory


def loss_of(w: Array, x: Array) -> Array:
    return jnp.tanh(x @ w).var()


def clipped(w: Array, xs: Array) -> Array:
    """The gradient of each microbatch is stacked, and scaled by its own norm."""
    stacked = jax.lax.map(lambda x: jax.grad(loss_of)(w, x), xs)
    scales = jnp.minimum(1, 1 / jnp.linalg.norm(stacked, axis=(1, 2)))
    return w - jnp.einsum("m,mij->ij", scales, stacked)


def clipped_layers(w: Array, xs: Array) -> Array:
    """As before, of layers in a loop."""

    def loss(w: Array, x: Array) -> Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].var()

    _, stacked = jax.lax.scan(lambda _, x: (None, jax.grad(loss)(w, x)), None, xs)
    scales = jnp.minimum(1, 1 / jnp.sqrt(jnp.sum(stacked**2, axis=(1, 2, 3))))
    return w - jnp.einsum("m,mlij->lij", scales, stacked)


def in_the_carry(w: Array, xs: Array) -> Array:
    """The gradients of all microbatches are summed."""

    def turn(total: Array, x: Array) -> tuple[Array, None]:
        return total + jax.grad(loss_of)(w, x), None

    return w - jax.lax.scan(turn, jnp.zeros_like(w), xs)[0]


def of_hidden(w: Array, xs: Array) -> Array:
    """What is stacked is of the backward pass and of no parameter's shape, and no residual."""

    def turn(_: None, x: Array) -> tuple[None, Array]:
        return None, jax.grad(lambda h: jnp.tanh(h @ w.T).var())(x @ w)

    return jnp.sin(jax.lax.scan(turn, None, xs)[1]) @ w.T


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("platform", ["cpu", "tpu:v5e:2x2", "cuda:h100:1"])
@pytest.mark.parametrize(
    ("function", "weight", "held", "expected"),
    [
        (clipped, (WIDTH, 2 * WIDTH), (TURNS, WIDTH, 2 * WIDTH), "gradient"),
        (clipped_layers, (2, WIDTH, WIDTH), (TURNS, 2, WIDTH, WIDTH), "gradient"),
        (in_the_carry, (WIDTH, 32 * WIDTH), (WIDTH, 32 * WIDTH), "gradient accumulator"),
        (of_hidden, (WIDTH, 2 * WIDTH), (TURNS, BATCH, 2 * WIDTH), "scan carry"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_gradients_of_microbatches(
    function: Callable[..., Array],
    weight: tuple[int, ...],
    held: tuple[int, ...],
    expected: str,
    platform: str,
) -> None:
    """One role on every platform, however its compiler wraps the loop."""
    need({"cpu": "cpu", "tpu:v5e:2x2": "tpu:v5p:2x2x2", "cuda:h100:1": "cuda:h100:8"}[platform])
    xs = (TURNS, BATCH, WIDTH)
    given = [jax.ShapeDtypeStruct(shape, "float32") for shape in (weight, xs)]
    found = attribution_of(lab.measure(function, *given, platform=platform))
    shape = f"f32[{','.join(map(str, held))}]"
    rows = [row for row in (*found.buffers, *found.in_outputs) if row.shape == shape]
    assert expected in {row.role for row in rows}
    assert not {row.role for row in rows} & ({"saved residual", "scan carry"} - {expected})


@pytest.mark.parametrize("gemm", ["triton", "cublas"])
def test_products_are_what_was_asked_for(gemm: str) -> None:
    """Whatever the function's own options say, or XLA_FLAGS, which come before those."""
    need("cuda:h100:8")
    platform = Platform(**(vars(Platform.parse("cuda:h100:8")) | {"gemm": gemm}))
    other = {"xla_gpu_enable_triton_gemm": gemm != "triton"}
    halves = [jax.ShapeDtypeStruct((1024, 1024), "bfloat16")] * 2
    product = jax.jit(lambda x, w: x @ w, compiler_options=other)
    assert ("__cublas" in lab.measure(product, *halves, platform=platform).hlo) == (
        gemm != "triton"
    )


def test_the_command(run: Run) -> None:
    words = ("--arg", "float32[1024]", "--arg", "bfloat16[512,1024]")
    ended = run("memory", "own_functions:tall", *words, "--top", "1")
    assert ended.code == 0, ended.err
    assert "own_functions:tall on one device" in ended.out
    assert "own_functions.py" in ended.out
    assert "all others" in ended.out
    assert "of the heap has a line of source" in ended.out


def test_the_command_as_json(run: Run) -> None:
    ended = run(
        "memory", "own_functions:tall", "--arg", "float32[1024]", "--arg", "bfloat16[512,1024]",
        "--json", "-",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    found, memory = ended.json["buffers"], ended.json["memory"]
    assert sum(row["bytes"] for row in found["buffers"]) == memory["heap_bytes"]
    assert set(found["buffers"][0]) == set(Buffer.__annotations__)
    assert sum(found["by_role"].values()) == found["heap_bytes"] == memory["heap_bytes"]
    assert ended.json["schema"] == 1


def test_an_ab_says_what_differs(run: Run) -> None:
    words = ("--arg", "float32[1024]", "--arg", "bfloat16[512,1024]")
    both = ("own_functions:lean", "own_functions:tall")
    ended = run("compare", *both, *words)
    assert ended.code == 0, ended.err
    assert "what differs at the peak" in ended.out
    assert "own_functions.py" in ended.out
    ended = run("compare", *both, *words, "--json", "-")
    (entry,) = ended.json["experiments"]
    sizes = [entry["arms"][arm]["memory"]["heap_bytes"] for arm in "ab"]
    change = sum(row["b_bytes"] - row["a_bytes"] for row in entry["buffers"])
    assert change == sizes[1] - sizes[0] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "tiny", "--top", "0"), "--top"),
        (("--model", "tiny", "--top", "many"), "--top"),
        ((), "give one thing to measure"),
        (
            ("own_functions:tall", "--model", "tiny"),
            "give one thing to measure",
        ),
        (("--model", "tiny", "--arg", "float32[1]"), "leave them out with tiny"),
        (("own_functions:tall", "--set", "model.num_layers=2"), "a function has no config"),
        (("--model", "tiyn"), "tiny"),
        (("--model", "tiny", "--platform", "cuda"), "platform"),
        (("--model", "tiny", "--json", "/nowhere/x.json"), "--json"),
    ],
)
def test_bad_input_ends_with_2(run: Run, words: tuple[str, ...], message: str) -> None:
    ended = run("memory", *words)
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1


def test_without_a_buffer_assignment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a program from JAX's compilation cache."""
    from nnx_pipeline.lab.compile import _compiler as compiler

    plain = compiler.compile_with_dump

    def without(lowered: Any, *_: Any) -> tuple[Any, None]:
        return plain(lowered)[0], None

    monkeypatch.setattr(compiler, "compile_with_dump", without)
    words = ("own_functions:tall", "--arg", "float32[1024]", "--arg", "bfloat16[512,1024]")
    ended = run("memory", *words)
    assert ended.code == 1
    assert "cpu gave no buffer assignment" in ended.err
    assert run("measure", *words).code == 0
