"""Whether the arms of an experiment compute the same: loss and gradients, on CPU devices."""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import numpy as np

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab import worker
from nnx_pipeline.lab.arms import Experiment, Program
from nnx_pipeline.lab.cache import Cache
from nnx_pipeline.lab.cache_key import key_of
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.lab.settings import set_model
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.presets import preset

VIRTUAL_CPUS = 8
# What of a model is no size: the numbers are compared with the same.
SWITCHES = ("attention", "experts", "embedding", "norm_scale_offset", "dropout_rate")


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Loss and gradients of the arms at `tiny` on CPU devices.

    max_abs_diff: the largest difference of any value. within_tolerance: whether it is at most the
    experiment's tolerance times the largest gradient or loss. mesh: of the CPU devices. pipeline:
    that of the arms there, which is another where the config's own does not fit. measured: when, in
    ISO format, if this comes from a cache.
    """

    max_abs_diff: float
    bitwise_equal: bool
    within_tolerance: bool
    mesh: str
    pipeline: str = ""
    measured: str | None = None


def compare_numerics(
    experiment: Experiment, config: Config, cache: Cache, *, virtual_cpus: int = VIRTUAL_CPUS
) -> Numerics:
    """Loss and gradients of both arms, from the same weights and batch.

    They run at `tiny` with the pipeline of `config`, where that fits the eight devices.
    virtual_cpus: how many of them this process needs, here or for other work.
    """
    mesh = _mesh_of_numbers(experiment)
    programs = _at_tiny(experiment, config, mesh)
    key = key_of(Platform("cpu"), "numerics", mesh, *programs, experiment.tolerance)
    if (known := cache.get(key)) is not None:
        try:
            return Numerics(**{**known[0], "measured": known[1]})
        except TypeError:
            pass  # written by something else
    # Nothing may have started JAX yet: figures that were kept need no device.
    Platform("cpu").devices(virtual_cpus)
    found = _compared(programs, mesh, experiment.tolerance)
    cache.put(key, dataclasses.asdict(found))
    return found


def _compared(programs: tuple[Program, Program], mesh: MeshConfig, tolerance: float) -> Numerics:
    values = [_loss_and_gradients(program, mesh) for program in programs]
    pairs = list(zip(*values, strict=True))
    for a, b in pairs:
        if a.shape != b.shape:
            raise ValueError(f"a gradient of shape {a.shape} in one arm is {b.shape} in the other")
    # numpy's maximum keeps a NaN, and a NaN is within no tolerance.
    largest = float(np.max([np.max(np.abs(a)) for a, _ in pairs]))
    difference = float(np.max([np.max(np.abs(a - b)) for a, b in pairs]))
    return Numerics(
        max_abs_diff=difference,
        bitwise_equal=all(a.tobytes() == b.tobytes() for a, b in pairs),
        within_tolerance=difference <= tolerance * largest,
        mesh=str(mesh),
        pipeline=" and ".join(dict.fromkeys(_pipeline(p.config) for p in programs)),
    )


@functools.lru_cache(maxsize=64)
def _loss_and_gradients(program: Program, mesh: MeshConfig) -> list[np.ndarray]:
    if program.environment:
        return worker.numbers(program, mesh)
    return worker.loss_and_gradients_of(program, mesh, jax.devices("cpu"))


def _pipeline(config: Config) -> str:
    count = config.pipeline.num_microbatches
    words = f"{count} microbatches" if count else "as many microbatches as stages"
    return f"{words} × {config.pipeline.num_repeats} repeats"


def _mesh_of_numbers(experiment: Experiment) -> MeshConfig:
    """Eight devices with the axes that the experiment needs."""
    if "data" in experiment.needs:
        return MeshConfig(data=2, stage=VIRTUAL_CPUS // 2)
    return MeshConfig(stage=VIRTUAL_CPUS // 2, fsdp=2)


def _at_tiny(experiment: Experiment, config: Config, mesh: MeshConfig) -> tuple[Program, Program]:
    """Both arms at `tiny`, with the pipeline of `config` or one that fits the eight devices."""
    tiny = set_model(dtype=experiment.numbers_in)(preset("tiny"))
    switches = {name: getattr(config.model, name) for name in SWITCHES}
    train = dataclasses.replace(tiny.train, load_balance_weight=config.train.load_balance_weight)
    tiny = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, **switches), train=train)
    fitting = dataclasses.replace(config.pipeline, num_microbatches=8, num_repeats=2)
    try:
        like = dataclasses.replace(tiny, pipeline=config.pipeline)
        like.check_mesh(mesh)
        return experiment.programs(like, mesh)
    except InputError:
        return experiment.programs(dataclasses.replace(tiny, pipeline=fitting), mesh)
