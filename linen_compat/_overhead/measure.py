"""Measures what each style costs before and while a step runs, all styles in one run."""

import contextlib
import cProfile
import dataclasses
import functools
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from linen_compat._overhead import LOOPS
from linen_compat._overhead import arms as styles
from linen_compat._overhead.arms import ARMS, LayersProgram, Style
from linen_compat.bridge._blueprint import forget_blueprints
from linen_compat.formats._intact import Json
from nnx_pipeline import Config, InputError
from nnx_pipeline.config.config import to_dict
from nnx_pipeline.lab._hlo.module import parse
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import divides, one_of

Progress = Callable[[str], None]

DISPATCHES = 10  # calls of each arm's step, where the arms take turns
RUN_LIMIT = 4_000_000_000  # bytes of arrays above which no step is run


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one arm needs in one loop; None where it could not be measured.

    - `abstract_init`, `trace`, `lower`, `trace_and_lower`: seconds of processor time, medians.
    - `compile`: elapsed seconds of one compilation.
    - `dispatch`: elapsed seconds from the call of a compiled step until it returns, without waiting
      for its result; the median of `DISPATCHES` calls.
    - `temp_bytes`, `hlo_instructions`: of the compiled program, the bytes per device.
    - `host_bytes`: the peak size of Python objects from abstract init to lowering.
    - `python_calls`: of functions in tracing and lowering, which nothing else on the machine
      disturbs.
    """

    abstract_init: float | None = None
    trace: float | None = None
    lower: float | None = None
    trace_and_lower: float | None = None
    compile: float | None = None
    dispatch: float | None = None
    temp_bytes: int | None = None
    hlo_instructions: int | None = None
    host_bytes: int | None = None
    python_calls: int | None = None


FIGURES = tuple(item.name for item in dataclasses.fields(Figures))


@dataclass(frozen=True, kw_only=True)
class OverheadRow:
    """The figures of one arm in one loop.

    - `ratios`: each figure divided by the arm's `native`. A ratio of seconds is the median of the
      ratios within each repetition, in which other work on the machine affects both arms alike.
    - `error`: why there are no figures, None where there are.
    """

    loop: str
    arm: str
    native: str
    figures: Figures
    ratios: dict[str, float | None]
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What was measured, and with what."""

    config: Config
    repetitions: int
    rows: tuple[OverheadRow, ...]
    versions: dict[str, str]

    def to_json(self) -> Json:
        """Schema 1 of `linen-compat overhead --json`."""
        return {
            "schema": 1,
            "platform": "cpu",
            "layers": self.config.model.num_layers,
            "repetitions": self.repetitions,
            "config": {name: to_dict(self.config)[name] for name in ("model", "train")},
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "versions": self.versions,
        }


@dataclass
class _Samples:
    """What was measured of one arm.

    `seconds` has a list of times for each timed figure, and `counts` the others. `step` runs the
    compiled step; None if its arrays exceed `RUN_LIMIT`. `error` says why the arm failed.
    """

    arm: Style
    make: Callable[[], LayersProgram]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    step: Callable[[], PyTree] | None = None
    error: str | None = None

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def figures(self) -> Figures:
        if self.error is not None:
            return Figures()
        seconds: Json = {name: median(values) for name, values in self.seconds.items()}
        return Figures(**seconds, **self.counts)

    def attempt(self, measure: Callable[["_Samples"], object]) -> None:
        """Measures unless the arm has failed; its exception does not stop the other arms."""
        if self.error is not None:
            return
        try:
            measure(self)
        except Exception as error:  # wrappers, JAX and compilers raise many kinds
            lines = str(error).strip().splitlines() or [""]
            self.error = f"{type(error).__name__}: {lines[0][:200]}"


def measure_overhead(
    config: Config,
    *,
    repetitions: int = 7,
    loops: Sequence[str] = LOOPS,
    arms: Sequence[Style] = ARMS,
    progress: Progress = lambda text: None,
) -> Overhead:
    """Measures value and gradient of all layers of a model in each style and loop, on the CPU.

    In each repetition the arms take turns, from empty caches, and each time another one begins. Of
    the config only the model, the batch and the length count. Raises InputError when layers or
    batch do not split over the stages of the pipeline.
    """
    check_loops(config, loops)
    Platform.parse("cpu").devices(styles.stages_for(config.model.num_layers) or 1)
    rows: list[OverheadRow] = []
    for loop in loops:
        rows += _measure_loop(config, loop, arms, repetitions, progress)
    versions = {**Platform.parse("cpu").versions(), "python": sys.version.split()[0]}
    return Overhead(config=config, repetitions=repetitions, rows=tuple(rows), versions=versions)


def check_loops(config: Config, loops: Sequence[str] = LOOPS) -> None:
    """Raises InputError unless these loops are known and the layers and the batch fit them."""
    for loop in loops:
        one_of("loop", loop, LOOPS)
    if "pipeline" not in loops:
        return
    layers, stages = config.model.num_layers, styles.stages_for(config.model.num_layers)
    if not stages:
        raise InputError(
            f"{layers} layers do not split over 4 or 2 stages of the pipeline that is measured; "
            "choose an even number, or measure other loops"
        )
    batch = config.train.global_batch
    divides(
        stages, batch, rule=f"train.global_batch={batch} does not split into {stages} microbatches"
    )


def _measure_loop(
    config: Config, loop: str, arms: Sequence[Style], repetitions: int, progress: Progress
) -> list[OverheadRow]:
    mesh = styles.mesh_for_loop(loop, config.model.num_layers)
    samples = [
        _Samples(arm, functools.partial(styles.make_program, arm, loop, config, mesh))
        for arm in arms
    ]
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        # Once without timing, so that imports at first use do not count for the first arm.
        samples[0].attempt(lambda sample: _lowered(sample.make()))
        for repetition in range(repetitions):
            first = repetition % len(samples)  # so that no arm always comes first
            for sample in (*samples[first:], *samples[:first]):
                progress(f"{loop}: {sample.arm.name}, repetition {repetition + 1} of {repetitions}")
                sample.attempt(_measure_once)
        for sample in samples:
            progress(f"{loop}: {sample.arm.name}, compiling, host memory and calls")
            sample.attempt(_measure_compiled)
        progress(f"{loop}: dispatch")
        for _ in range(DISPATCHES):
            for sample in samples:
                sample.attempt(_dispatch)
    by_name = {sample.arm.name: sample for sample in samples}
    return [
        OverheadRow(
            loop=loop,
            arm=sample.arm.name,
            native=sample.arm.native,
            figures=sample.figures(),
            ratios=_ratios(sample, by_name.get(sample.arm.native)),
            error=sample.error,
        )
        for sample in samples
    ]


def _lowered(
    program: LayersProgram,
    note: Callable[[str, float], None] = lambda name, seconds: None,
    profiled: contextlib.AbstractContextManager[object] = contextlib.nullcontext(),
) -> tuple[PyTree, jax.stages.Lowered]:
    """The abstract parameters and the lowered program, made from empty caches.

    `note` is called with the name of each part and its seconds of processor time.
    """
    jax.clear_caches()
    forget_blueprints()
    started = time.process_time()
    params = program.place(jax.eval_shape(program.init))
    after_init = time.process_time()
    with profiled:
        traced = jax.jit(jax.value_and_grad(program.loss)).trace(params, program.x)
        after_trace = time.process_time()
        lowered = traced.lower()
        after_lower = time.process_time()
    note("abstract_init", after_init - started)
    note("trace", after_trace - after_init)
    note("lower", after_lower - after_trace)
    note("trace_and_lower", after_lower - after_init)
    return params, lowered


def _measure_once(sample: _Samples) -> None:
    program = sample.make()
    gc.collect()  # or the garbage of other arms would be collected in this one's time
    gc.disable()
    try:
        _lowered(program, sample.add)
    finally:
        gc.enable()


def _measure_compiled(sample: _Samples) -> None:
    """Compiles, and measures host memory and calls."""
    program = sample.make()
    params, lowered = _lowered(program)
    started = time.perf_counter()
    compiled = lowered.compile()
    sample.add("compile", time.perf_counter() - started)
    memory = compiled.memory_analysis()
    assert memory is not None, "the compiler of the CPU says it"
    sample.counts["temp_bytes"] = memory.temp_size_in_bytes
    module = parse(compiled.as_text() or "")
    sample.counts["hlo_instructions"] = sum(
        len(computation.instructions) for computation in module.computations.values()
    )
    # The gradients take as much as the parameters, which are among the arguments.
    if 2 * memory.argument_size_in_bytes + memory.temp_size_in_bytes <= RUN_LIMIT:
        arguments = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
            (params, program.x),
        )
        sample.step = lambda: compiled(*arguments)
    gc.collect()
    tracemalloc.start()
    try:
        _lowered(program)
        sample.counts["host_bytes"] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    sample.counts["python_calls"] = count_calls(program)


def count_calls(program: LayersProgram) -> int:
    """Counts the calls of Python and built-in functions while a program is traced and lowered."""
    profile = cProfile.Profile()
    _lowered(program, profiled=profile)
    return sum(entry.callcount for entry in profile.getstats())


def _dispatch(sample: _Samples) -> None:
    if sample.step is None:
        return
    started = time.perf_counter()
    result = sample.step()
    sample.add("dispatch", time.perf_counter() - started)
    jax.block_until_ready(result)


def _ratios(samples: _Samples, native: _Samples | None) -> dict[str, float | None]:
    """Each figure over the native one; None where either is missing, or the native one is 0."""

    def ratio(name: str) -> float | None:
        if native is None or samples.error or native.error:
            return None
        if name in samples.seconds and name in native.seconds:
            # Within a repetition, what else the machine did slowed both arms alike.
            pairs = zip(samples.seconds[name], native.seconds[name], strict=True)
            ratios = [mine / base for mine, base in pairs if base]
            return round(median(ratios), 4) if ratios else None
        mine, base = samples.counts.get(name), native.counts.get(name)
        return round(mine / base, 4) if mine is not None and base else None

    return {name: ratio(name) for name in FIGURES}
