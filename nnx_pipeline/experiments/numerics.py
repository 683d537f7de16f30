"""Whether the arms of an experiment compute the same: loss and gradients, on CPU devices."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab import programs as of_programs
from nnx_pipeline.lab.arms import Experiment, Program
from nnx_pipeline.lab.cache import Cache
from nnx_pipeline.lab.cache_key import key_of
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.presets import preset

VIRTUAL_CPUS = 8
# What of a model is no size: the numbers are compared with the same.
SWITCHES = ("attention", "experts", "embedding", "norm_scale_offset", "dropout_rate")

Values = Mapping[str, np.ndarray]  # the loss and every gradient, or every parameter, by name


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Loss and gradients of the arms at `tiny` on CPU devices, or the parameters that they create.

    max_abs_diff: the largest difference of any value. within_tolerance: whether, in each array by
    itself, the largest difference is at most the experiment's tolerance times the largest value of
    that array in either arm; a NaN is not. mesh: of the CPU devices. pipeline: that of the arms
    there, which is another where the config's own does not fit. worst: the array in which the arms
    are farthest apart relative to its largest value. worst_relative: how far that is. all_zero:
    arrays that are zero throughout in both arms, which therefore say nothing. measured: when, in
    ISO format, if this comes from a cache.
    """

    max_abs_diff: float
    bitwise_equal: bool
    within_tolerance: bool
    mesh: str
    pipeline: str = ""
    worst: str = ""
    worst_relative: float = 0.0
    all_zero: tuple[str, ...] = ()
    measured: str | None = None


def compare_numerics(
    experiment: Experiment, config: Config, cache: Cache, *, virtual_cpus: int = VIRTUAL_CPUS
) -> Numerics:
    """Loss and gradients of both arms, from the same weights and batch.

    They run at `tiny` with the pipeline of `config`, where that fits the eight devices.
    virtual_cpus: how many of them this process needs, here or for other work.
    """
    mesh = mesh_of_numbers(experiment)
    programs = at_tiny(experiment, config, mesh)
    key = key_of(Platform("cpu"), "numerics", mesh, *programs, experiment.tolerance)
    if (known := cache.get(key)) is not None:
        try:
            kept = {**known[0], "all_zero": tuple(known[0]["all_zero"]), "measured": known[1]}
            return Numerics(**kept)
        except (KeyError, TypeError):
            pass  # written by something else
    # Nothing may have started JAX yet: figures that were kept need no device.
    Platform("cpu").devices(virtual_cpus)
    found = _compared(programs, mesh, experiment.tolerance)
    cache.put(key, dataclasses.asdict(found))
    return found


def _compared(programs: tuple[Program, Program], mesh: MeshConfig, tolerance: float) -> Numerics:
    a, b = (_numbers(program, mesh) for program in programs)
    pipelines = dict.fromkeys(_pipeline(program.config) for program in programs)
    return dataclasses.replace(
        compare_values(a, b, tolerance), mesh=str(mesh), pipeline=" and ".join(pipelines)
    )


def compare_values(a: Values, b: Values, tolerance: float) -> Numerics:
    """Array by array, as `Numerics` says, but for the mesh; ValueError for arrays of other shapes.

    No array needs a floor: one that is zero in both arms is equal, and one that is zero in a single
    arm lies its whole size apart.
    """
    if a.keys() != b.keys():
        raise ValueError(f"one arm computes {sorted(a.keys() ^ b.keys())} and the other does not")
    apart, relative = {}, {}
    for name, one in a.items():
        if one.shape != b[name].shape:
            raise ValueError(
                f"{name} of shape {one.shape} in one arm is {b[name].shape} in the other"
            )
        pair = [np.asarray(array, np.float64) for array in (one, b[name])]
        # numpy's maximum keeps a NaN, and a NaN is within no tolerance.
        with np.errstate(invalid="ignore"):  # infinities, which become a NaN
            apart[name] = float(np.max(np.abs(pair[0] - pair[1]), initial=0.0))
            largest = float(np.max(np.abs(pair), initial=0.0))
            relative[name] = apart[name] / largest if largest else 0.0
    worst = max(relative, key=lambda name: (np.isnan(relative[name]), relative[name]))
    return Numerics(
        max_abs_diff=float(np.max(list(apart.values()))),
        bitwise_equal=all(_same_bits(one, b[name]) for name, one in a.items()),
        within_tolerance=all(each <= tolerance for each in relative.values()),
        mesh="",
        worst=worst,
        worst_relative=relative[worst],
        all_zero=tuple(name for name in a if not (np.any(a[name]) or np.any(b[name]))),
    )


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@functools.lru_cache(maxsize=64)
def _numbers(program: Program, mesh: MeshConfig) -> Values:
    return of_programs.numbers(program, mesh, jax.devices("cpu"))


def _pipeline(config: Config) -> str:
    count = config.pipeline.num_microbatches
    words = f"{count} microbatches" if count else "as many microbatches as fill the pipeline"
    return f"{words} × {config.pipeline.num_repeats} repeats"


def mesh_of_numbers(experiment: Experiment) -> MeshConfig:
    """Eight devices with the axes that the experiment needs."""
    if "data" in experiment.needs:
        return MeshConfig(data=2, stage=VIRTUAL_CPUS // 2)
    if "expert" in experiment.needs:
        return MeshConfig(stage=VIRTUAL_CPUS // 4, fsdp=2, expert=2)
    return MeshConfig(stage=VIRTUAL_CPUS // 2, fsdp=2)


def at_tiny(experiment: Experiment, config: Config, mesh: MeshConfig) -> tuple[Program, Program]:
    """Both arms at `tiny`, with the pipeline of `config` or one that fits the eight devices."""
    tiny = preset("tiny")
    switches = {name: getattr(config.model, name) for name in SWITCHES}
    train = dataclasses.replace(tiny.train, load_balance_weight=config.train.load_balance_weight)
    tiny = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, **switches), train=train)
    # Twice the stages: enough for a delay of two, few enough for every mesh to split a microbatch.
    microbatches = 2 * mesh.stage
    fitting = dataclasses.replace(config.pipeline, num_microbatches=microbatches, num_repeats=2)
    try:
        like = dataclasses.replace(tiny, pipeline=config.pipeline)
        like.check_mesh(mesh)
        return experiment.programs(like, mesh, sized=False)
    except InputError:
        other = dataclasses.replace(tiny, pipeline=fitting)
        return experiment.programs(other, mesh, sized=False)
