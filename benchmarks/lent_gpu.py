"""Times programs on one H100 or H200, each beside the lab's estimate of the same program.

    python benchmarks/lent_gpu.py --dry-run
    python benchmarks/lent_gpu.py [--out FOLDER] [NAME …]

Twenty matrix products, five training steps without collectives and one layer of Mixtral 8x7B,
forward and backward. The first command needs no GPU: it compiles all of them for an H100, in about
five minutes of two cores, and writes the estimates. The second needs an H100 or an H200 with
`jax[cuda13]` and nothing else of the network: it compiles the same functions there, where XLA tries
out its kernels, times them and reads the estimate from the very program that ran. It begins nothing
after seven minutes and says how long it took. Both write `lent_gpu.json` and `lent_gpu.md` in
FOLDER, or in `benchmarks/results`; NAME is a row of the table, and others keep their figures.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # of a GPU; JAX takes 0.75

import jax
import jax.numpy as jnp
from flax import nnx
from gpu_layer import FULL, refusal, step, tokens_of
from jax.sharding import NamedSharding, PartitionSpec
from kept_rows import write_rows

from nnx_pipeline import Config, DecoderLayer, InputError, MeshConfig, make_mesh, preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._timing.devices import device_of
from nnx_pipeline.lab._timing.links import Links
from nnx_pipeline.lab._timing.result import Time
from nnx_pipeline.lab.compile._figures import read_program
from nnx_pipeline.lab.compile._packages import MissingCompiler
from nnx_pipeline.lab.compile._tables import with_costs, with_tables
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.ops._fast_attention.cudnn import check_cudnn
from nnx_pipeline.train import abstract_batch, abstract_state, jit_train_step
from nnx_pipeline.train.data import learnable_batches
from nnx_pipeline.train.step import make_state

RESULTS = Path(__file__).parent / "results"
CHIPS = ("h100", "h200")
LAST_START = 420  # seconds after which no row begins, so that all is over in eight minutes
WARM, RUNS, SHORTEST = 3, 20, 0.02  # calls not counted, timed runs, seconds of a run at least
ENOUGH, MOST = 7e11, 32  # operations of a program of products, and how many it has at most

# M × N × K: tokens, width of the result, and width of what is read.
SHAPES = (
    *("512x14336x4096", "512x4096x14336", "1024x4096x4096", "2048x4096x4096", "4096x4096x4096"),
    *("8192x1024x4096", "8192x4096x4096", "8192x11008x4096", "8192x14336x4096", "8192x4096x14336"),
    *("16384x512x4096", "4096x8192x1024", "8192x2048x512", "8192x8192x8192", "8192x16384x6144"),
    "16384x16384x16384",
)
PRODUCTS = [f"{shape} bfloat16" for shape in SHAPES]
PRODUCTS += ["4096x4096x4096 float32", "8192x4096x4096 float32"]
PRODUCTS += ["4096x4096x4096 int8", "8192x14336x4096 int8"]
FOUR_LAYERS = ("model.num_layers=4", "train.global_batch=4", "train.sequence_length=2048")
STEPS = {
    "mixtral-small": (),
    "mixtral-small, grouped": ("model.experts=grouped",),
    "deepseek-small": (),
    "llama2-7b, 4 layers": FOUR_LAYERS,
    "mistral-7b, 4 layers": (*FOUR_LAYERS, "train.sequence_length=4096"),
}
ATTENTION = "mistral-7b, 4 layers"  # the step whose attention is cuDNN's, where that is installed
LAYER = "Mixtral 8x7B, a layer"

ABOUT = """# One {device} beside the lab's estimates

{timed}
Milliseconds of a product, a training step or a layer forward and backward, on one device. Estimated
is what the lab says of the very program that ran, compiled on the GPU, and without a GPU what it
says of the same function compiled where there is none. Of ≳ a part counts at its least. The errors
say by how much an estimate is longer. Made by `python benchmarks/lent_gpu.py` with {versions}.

| program | measured | estimated | error | without a GPU | error |
|---|--:|--:|--:|--:|--:|
"""
ESTIMATES = {"estimated": "of the program that ran", "without": "without a GPU"}
TIMED = f"A time is the median of {RUNS} runs, after {WARM} calls that are not counted."
NOT_TIMED = """**Nothing was timed yet.** The script is ready, and waits for a GPU to be lent.
"""


class Case(NamedTuple):
    """A program: `make` gives the jitted function and its arguments on a mesh, real or abstract.

    `count` is how many equal products it has; a training step is `donated` its first argument, and
    returns the next one.
    """

    name: str
    kind: str
    make: Callable[[bool], tuple[jax.stages.Wrapped, tuple[Any, ...]]]
    sharding: str = "auto"
    count: int = 1


def product(name: str) -> Case:
    shape, dtype = name.split()
    m, n, k = map(int, shape.split("x"))
    count = min(MOST, math.ceil(ENOUGH / (2 * m * n * k)))

    def make(real: bool) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
        def multiply(pairs: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
            result = jnp.int32 if dtype == "int8" else dtype
            return [jnp.matmul(a, b, preferred_element_type=result) for a, b in pairs]

        def drawn() -> list[tuple[jax.Array, jax.Array]]:
            keys = jax.random.split(jax.random.key(0), 2 * count)
            arrays = [
                (100 * jax.random.normal(key, size)).astype(dtype)
                for key, size in zip(keys, [(m, k), (k, n)] * count, strict=True)
            ]
            return list(zip(arrays[::2], arrays[1::2], strict=True))

        return jax.jit(multiply), (made(drawn, real),)

    return Case(name, "products", make, count=count)


def training(name: str, settings: Sequence[str]) -> Case:
    model, attention = name.partition(",")[0], {}
    if name == ATTENTION:
        kind = attention_kind()
        name, attention = f"{name}, {kind}", {"model.attention": kind}
    given = dict(setting.split("=") for setting in settings)
    config: Config = apply_overrides(preset(model), given | attention)

    def make(real: bool) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
        mesh = jax.sharding.get_mesh()
        state = abstract_state(config, mesh)
        jitted = jit_train_step(state, mesh)
        if real:
            return jitted, (make_state(config, mesh), next(learnable_batches(config, mesh)))
        return jitted, (state, abstract_batch(config, mesh))

    return Case(name, "steps", make, sharding=config.pipeline.sharding)


def attention_kind() -> str:
    """cuDNN's kernel where it is installed, else one that XLA compiles."""
    try:
        check_cudnn((128, 128), "bfloat16", packed=False)
    except InputError:
        return "chunked"
    return "flash"


def layer() -> Case:
    def make(real: bool) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
        weights = made(lambda: DecoderLayer(FULL.model, rngs=nnx.Rngs(0)), real)
        return jax.jit(step), (weights, *made(lambda: tokens_of(FULL), real))

    return Case(LAYER, "layers", make)


def made(create: Callable[[], Any], real: bool) -> Any:
    """What a function creates, on the one device of the mesh, or its shapes there."""
    if real:
        return jax.jit(create)()
    place = NamedSharding(jax.sharding.get_mesh(), PartitionSpec())
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(create),
    )


def cases() -> Iterator[Case]:
    yield from map(product, PRODUCTS)
    yield layer()
    yield from (training(name, settings) for name, settings in STEPS.items())


def row(case: Case, platform: Platform, device: jax.Device, *, real: bool) -> dict[str, Any]:
    """The estimate of a program, and on a real device also how long it takes."""
    mesh = make_mesh(MeshConfig(), [device], sharding=case.sharding)  # type: ignore[arg-type]
    with jax.set_mesh(mesh):
        jitted, arguments = case.make(real)
        compiled = jitted.lower(*arguments).compile(platform.compiler_options)
        found = time_of(compiled, platform, device)
        if not real:
            if found is None:
                raise InputError("the lab has no estimate of this program")
            estimate = {"without": found.step_seconds / case.count}
            return {**estimate, "is_partial": found.is_partial, "bytes": bytes_of(compiled)}
        seconds = found.step_seconds if found else None
        calls = max(1, math.ceil(SHORTEST / (seconds or SHORTEST)))
        took = measured(compiled, arguments, calls, donated=case.kind == "steps") / case.count
    return {"measured": took, **({"estimated": seconds / case.count} if seconds else {})}


def time_of(compiled: jax.stages.Compiled, platform: Platform, device: jax.Device) -> Time | None:
    """What the lab estimates of a program, from its text; None where it does not know a step."""
    known = device_of(platform.kind, platform.target)
    assert known is not None, platform
    text = with_costs(with_tables(compiled.as_text() or "", compiled), compiled)
    links = Links.of(known, platform.topology, [device])
    found = read_program(text, None, None, links=links).time
    return found if found and found.step_seconds else None


def bytes_of(compiled: jax.stages.Compiled) -> int:
    """What a program needs of the memory of a device."""
    memory: Any = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)


def measured(
    compiled: jax.stages.Compiled, arguments: tuple[Any, ...], calls: int, *, donated: bool
) -> float:
    """Seconds of a call: the median of runs of `calls` calls, each begun before the last is over.

    - `donated`: whether a call is given the first result of the call before it.
    """
    first, *rest = arguments

    def run(calls: int) -> None:
        nonlocal first
        for _ in range(calls):
            result = compiled(first, *rest)
            first = result[0] if donated else first
        jax.block_until_ready(result)

    run(WARM)
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run(calls)
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds)


def table(found: dict[str, Any]) -> str:
    """The page of a result, with the median of the errors of each kind."""
    rows = found["rows"]
    is_timed = any("measured" in each for each in rows)
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items() if value)
    about = ABOUT.format(
        device=found["device"], timed=TIMED if is_timed else NOT_TIMED, versions=versions
    )
    lines = [_line(each) for each in rows]
    closing = []
    for kind in ("products", "steps", "layers", "all"):
        those = [each for each in rows if kind in (each["kind"], "all")]
        medians = {words: _median(those, estimate) for estimate, words in ESTIMATES.items()}
        known = [f"{words} {value:.1%}" for words, value in medians.items() if value is not None]
        closing += [f"Median error of {kind}: {', '.join(known)}."] if known else []
    closing += [f"All of it took {found['took']:.0f} s."] if is_timed else []
    return about + "\n".join([*lines, "", *closing, ""])


def _line(row: dict[str, Any]) -> str:
    if "reason" in row:
        return f"| {row['name']} | {row['reason']} | – | – | – | – |"
    cells = [_milliseconds(row.get("measured"))]
    for estimate in ESTIMATES:
        error, least = _error(row, estimate), "≳ " * row.get("is_partial", False)
        shown = least * (estimate in row) + _milliseconds(row.get(estimate))
        cells += [shown, "–" if error is None else f"{error:+.1%}"]
    return f"| {' | '.join([row['name'], *cells])} |"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.3f}"


def _error(row: dict[str, Any], estimate: str) -> float | None:
    if estimate not in row or "measured" not in row:
        return None
    return row[estimate] / row["measured"] - 1


def _median(rows: Sequence[dict[str, Any]], estimate: str) -> float | None:
    errors = [abs(error) for row in rows if (error := _error(row, estimate)) is not None]
    return statistics.median(errors) if errors else None


def all_rows(
    chosen: Sequence[Case], platform: Platform, device: jax.Device, *, real: bool
) -> Iterator[dict[str, Any]]:
    """What was found of each program, or the `reason` why nothing was."""
    begun = time.monotonic()
    for case in chosen:
        named = {"name": case.name, "kind": case.kind}
        if real and time.monotonic() - begun > LAST_START:
            yield {**named, "reason": "not begun, as seven minutes were over"}
            continue
        try:
            yield {**named, **row(case, platform, device, real=real)}
        except Exception as failure:  # of any kind; the time of the others is not to be lost
            lines = str(failure).splitlines() or [""]
            yield {**named, "reason": f"{type(failure).__name__}: {lines[0][:160]}"}


def run(given: argparse.Namespace, device: jax.Device, platform: Platform) -> None:
    """Estimates or times what was asked for, and writes the result after each program."""
    file, begun, real = given.out / "lent_gpu.json", time.monotonic(), not given.dry_run
    known = json.loads(file.read_text()) if file.exists() else {}
    kept = known if known.get("platform") == str(platform) else {}
    rows = {each["name"]: each for each in kept.get("rows", ())}
    found = {**kept, "device": device.device_kind, "platform": str(platform)}
    found["versions"] = platform.versions()
    chosen = [case for case in cases() if not given.names or case.name in given.names]
    for each in all_rows(chosen, platform, device, real=real):
        before = rows.get(each["name"], {})
        # What was timed before is not of the versions of this run.
        keys = {"without", "bytes", "is_lower_bound"} if real else {"estimated", "measured"}
        rows[each["name"]] = {name: before[name] for name in keys & before.keys()} | each
        found["rows"] = [rows[case.name] for case in cases() if case.name in rows]
        if real:
            found["took"] = time.monotonic() - begun
        write_rows(file, found)
        write_text(str(file.with_suffix(".md")), table(found))
        print(_line(rows[each["name"]]), flush=True)
    print(f"{len(chosen)} programs took {time.monotonic() - begun:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows; all where none is named")
    parser.add_argument("--dry-run", action="store_true", help="estimate alone, without a GPU")
    parser.add_argument("--chip", choices=CHIPS, default="h100", help="of a dry run")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    given = parser.parse_args()
    names = [case.name for case in cases()]
    if strangers := [name for name in given.names if name not in names]:
        parser.error(f"there is no row {strangers[0]!r}; the rows are {'; '.join(names)}")
    if given.dry_run:
        platform = Platform.parse(f"cuda:{given.chip}:1")
        try:
            run(given, platform.devices(1)[0], platform)
        except MissingCompiler as missing:
            sys.exit(f"lent_gpu: {missing}")
        return
    device = jax.devices()[0]
    chips = [chip for chip in CHIPS if chip in device.device_kind.lower()]
    if not chips:
        sys.exit(refusal("lent_gpu", "an H100 or H200", "--dry-run"))
    run(given, device, Platform.parse(f"cuda:{chips[0]}:1"))


if __name__ == "__main__":
    main()
