"""What the cures of `nnx-pipeline explain` gain, beside what it promised.

    python benchmarks/explain.py [PLATFORM …]

compiles each program as its author wrote it, with XLA's option xla_dump_to, lets `explain` read
the folder, compiles the program with the cure, and writes benchmarks/results/explain.md.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.explain import Explanation, explain

RESULTS = Path(__file__).parent / "results" / "explain.md"
PLATFORMS = ("tpu:v5e:2x2", "cuda:h100:1", "rocm:mi300x:1")
PARTS = 8
LAYERS, BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 12, 4, 1024, 1024, 8, 32_000
ABOUT = """# What the cures of `explain` gain

Each program is compiled as it is, with XLA's option `xla_dump_to`; `nnx-pipeline explain` reads
the folder and promises a gain; then the cure is compiled. `came` is by how much the account of the
program (arguments, outputs, constants, heap) got smaller; MB (10⁶ bytes) per device. A promise is
kept where it is not above what came. Made by `python benchmarks/explain.py`.

| program | platform | account | cure | promised | came | kept |
|---|---|--:|---|--:|--:|---|
"""
Arrays = Any


class Case(NamedTuple):
    name: str
    cure: str  # words of `Cure.what` by which it is found
    function: Callable[..., Arrays]
    cured: Callable[..., Arrays]
    shapes: tuple[Any, ...]
    donated: tuple[int, ...] = ()  # by the cure
    tpu_only: bool = False


def array(*dims: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def cross_entropy(hidden: Arrays, head: Arrays, labels: Arrays) -> Arrays:
    logits = (hidden @ head).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -chosen.sum()


def cross_entropy_in_parts(hidden: Arrays, head: Arrays, labels: Arrays) -> Arrays:
    @jax.checkpoint
    def part(total: Arrays, rows: Arrays) -> tuple[Arrays, None]:
        return total + cross_entropy(rows[0], head, rows[1]), None

    rows = hidden.reshape(PARTS, -1, WIDTH), labels.reshape(PARTS, -1)
    return jax.lax.scan(part, jnp.float32(0), rows)[0]


def scored(queries: Arrays, keys: Arrays, values: Arrays) -> Arrays:
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys).astype(jnp.float32)
    shares = jax.nn.softmax(scores).astype(values.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, values)


def scored_in_parts(queries: Arrays, keys: Arrays, values: Arrays) -> Arrays:
    batch, _, heads, size = queries.shape
    parts = jnp.moveaxis(queries.reshape(batch, PARTS, -1, heads, size), 1, 0)
    done = jax.lax.map(jax.checkpoint(lambda part: scored(part, keys, values)), parts)
    return jnp.moveaxis(done, 0, 1).reshape(queries.shape)


def mlp(hidden: Arrays, weights: Arrays) -> Arrays:
    return hidden + jax.nn.gelu(hidden @ weights["up"]) @ weights["down"]


def attended(hidden: Arrays, weights: Arrays, attend: Any = scored) -> Arrays:
    heads = hidden.reshape(*hidden.shape[:2], HEADS, -1)
    return hidden + attend(heads, heads, heads).reshape(hidden.shape) @ weights["out"]


def decoder(hidden: Arrays, weights: Arrays) -> Arrays:
    return mlp(attended(hidden, weights), weights)


def layers(layer: Any, weights: Arrays, hidden: Arrays, remat: bool) -> Arrays:
    def body(state: Arrays, of_layer: Arrays) -> tuple[Arrays, None]:
        return layer(state, of_layer), None

    return jax.lax.scan(jax.checkpoint(body) if remat else body, hidden, weights)[0]


def mean_of_layers(weights: Arrays, hidden: Arrays, *, layer: Any, remat: bool = False) -> Arrays:
    def loss(weights: Arrays) -> Arrays:
        return layers(layer, weights, hidden, remat).astype(jnp.float32).mean()

    return jax.grad(loss)(weights)


def head_gradient(hidden: Arrays, head: Arrays, labels: Arrays, *, loss: Any) -> Arrays:
    return jax.grad(loss, argnums=(0, 1))(hidden, head, labels)


def attention_gradient(q: Arrays, k: Arrays, v: Arrays, *, attend: Any) -> Arrays:
    def loss(*qkv: Arrays) -> Arrays:
        return attend(*qkv).astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def sgd(weights: Arrays, momentum: Arrays, hidden: Arrays) -> Arrays:
    gradients = mean_of_layers(weights, hidden, layer=mlp)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g.astype(m.dtype), momentum, gradients)
    return jax.tree.map(lambda w, m: w - m.astype(w.dtype) * 0.1, weights, momentum), momentum


def train(
    weights: Arrays, head: Arrays, hidden: Arrays, labels: Arrays, *, loss: Any, remat: bool
) -> Arrays:
    def whole(pair: Arrays) -> Arrays:
        return loss(layers(decoder, pair[0], hidden, remat), pair[1], labels)

    gradients = jax.grad(whole)((weights, head))
    return jax.tree.map(lambda w, g: w - 0.1 * g, (weights, head), gradients)


def thin(x: Arrays) -> Arrays:
    """Sorts along an axis of four, which a TPU pads to 128."""
    rows = jnp.sin(x).reshape(-1, 8, 4)
    turned = jax.lax.optimization_barrier(rows * 2)
    return jax.lax.optimization_barrier(jnp.cos(turned)).reshape(x.shape) + x


def wide(x: Arrays) -> Arrays:
    turned = jax.lax.optimization_barrier(jnp.sin(x) * 2)
    return jax.lax.optimization_barrier(jnp.cos(turned)) + x


def cast_at_once(weights: Arrays, hidden: Arrays) -> Arrays:
    whole = jax.lax.optimization_barrier(weights.astype(jnp.float32))

    def body(state: Arrays, of_layer: Arrays) -> tuple[Arrays, None]:
        return jnp.tanh(state @ of_layer), None

    return jax.lax.scan(body, hidden, whole)[0]


def cast_by_layer(weights: Arrays, hidden: Arrays) -> Arrays:
    def body(state: Arrays, of_layer: Arrays) -> tuple[Arrays, None]:
        return jnp.tanh(state @ of_layer.astype(jnp.float32)), None

    return jax.lax.scan(body, hidden, weights)[0]


WEIGHTS = {
    "up": array(LAYERS, WIDTH, 4 * WIDTH),
    "down": array(LAYERS, 4 * WIDTH, WIDTH),
    "out": array(LAYERS, WIDTH, WIDTH),
}
MOMENTUM = jax.tree.map(lambda leaf: array(*leaf.shape, dtype="float32"), WEIGHTS)
HIDDEN, HEAD = array(BATCH, LENGTH, WIDTH), array(WIDTH, VOCABULARY)
LABELS = array(BATCH, LENGTH, dtype="int32")
QKV = (array(1, 4096, HEADS, 128),) * 3
_OF_LAYERS = partial(mean_of_layers, layer=mlp)
_OF_DECODER = partial(mean_of_layers, layer=decoder)
_LOSS, _SCORES, _REMAT = "the loss for a part", "never holds all scores", "jax.checkpoint around"
_DONATE, _PADDING, _CAST = "donate_argnums", "another shape", "narrower dtype"


def cases() -> list[Case]:
    whole = partial(train, loss=cross_entropy, remat=False)
    step = (WEIGHTS, HEAD, HIDDEN, LABELS)
    of_head, of_scores = partial(head_gradient), partial(attention_gradient)
    return [
        Case(
            *("a loss over all logits", _LOSS),
            *(partial(of_head, loss=cross_entropy), partial(of_head, loss=cross_entropy_in_parts)),
            (HIDDEN, HEAD, LABELS),
        ),
        Case(
            *("attention", _SCORES),
            *(partial(of_scores, attend=scored), partial(of_scores, attend=scored_in_parts)),
            QKV,
        ),
        Case("attention, forward only", _SCORES, scored, scored_in_parts, QKV),
        Case(
            *("MLPs in a scan", _REMAT, _OF_LAYERS, partial(_OF_LAYERS, remat=True)),
            (WEIGHTS, HIDDEN),
        ),
        Case(
            *("decoder layers in a scan", _REMAT, _OF_DECODER, partial(_OF_DECODER, remat=True)),
            (WEIGHTS, HIDDEN),
        ),
        Case("an update", _DONATE, sgd, sgd, (WEIGHTS, MOMENTUM, HIDDEN), (0, 1)),
        Case(
            *("arrays of four columns", _PADDING, thin, wide),
            (array(4096, 8192, dtype="float32"),),
            tpu_only=True,
        ),
        Case(
            *("weights cast at once", _CAST, cast_at_once, cast_by_layer),
            (array(LAYERS, WIDTH, WIDTH), array(512, WIDTH, dtype="float32")),
        ),
        Case(
            *("a whole step", _LOSS, whole),
            partial(train, loss=cross_entropy_in_parts, remat=False),
            step,
        ),
        Case(
            *("a whole step", _REMAT, whole),
            partial(train, loss=cross_entropy, remat=True),
            step,
        ),
        Case("a whole step", _DONATE, whole, whole, step, (0, 1)),
    ]


def dumped(
    function: Callable[..., Arrays],
    shapes: tuple[Any, ...],
    platform: Platform,
    donated: tuple[int, ...] = (),
) -> Explanation:
    """What `explain` says of the program, from a folder that the compiler wrote."""
    place = SingleDeviceSharding(platform.devices(1)[0])
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes
    )
    lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            lowered.compile(compiler_options={**platform.compiler_options, **options})
        except jax.errors.JaxRuntimeError:  # too large: the dump is there all the same
            print(f"{platform} refused it", file=sys.stderr)
        return explain(folder)


def account(found: Explanation) -> int:
    assert found.program is not None
    assert found.program.memory.account_bytes is not None
    return found.program.memory.account_bytes


def row(case: Case, name: str, known: dict[str, Explanation]) -> str:
    """The row of a case; `known` has the programs of the platform that are compiled already."""
    platform = Platform.parse(name)
    if case.name not in known:
        known[case.name] = dumped(case.function, case.shapes, platform)
    before = known[case.name]
    came = account(before) - account(dumped(case.cured, case.shapes, platform, case.donated))
    cure = next((one for one in before.cures if case.cure in one.what), None)
    promised = cure.gain_bytes if cure else None
    kept = "–" if promised is None else "yes" if promised <= came else "**no**"
    named = case.cure if cure else f"{case.cure}: not named"
    cells = [megabytes(account(before)), named, megabytes(promised), megabytes(came), kept]
    return f"| {case.name} | {name} | {' | '.join(cells)} |\n"


def main() -> None:
    text, names = ABOUT, sys.argv[1:] or PLATFORMS
    for name in sorted(names, key=lambda name: not name.startswith("rocm")):
        Platform.parse(name).devices(1)  # AMD's compiler is found only before JAX starts
    for name in names:
        known: dict[str, Explanation] = {}
        for case in cases():
            if not case.tpu_only or name.startswith("tpu"):
                text += row(case, name, known)
                print(text.splitlines()[-1], file=sys.stderr, flush=True)
    write_text(str(RESULTS), text)


if __name__ == "__main__":
    main()
