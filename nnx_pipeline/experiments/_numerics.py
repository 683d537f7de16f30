"""Checks on CPU devices whether the arms of an experiment compute the same loss and gradients."""

import dataclasses
import functools

import jax

from nnx_pipeline.config.config import Config
from nnx_pipeline.config.presets import preset
from nnx_pipeline.experiments import _programs as of_programs
from nnx_pipeline.experiments._arms import Experiment, Program
from nnx_pipeline.lab.comparison._numerics import Numerics, Values, compare_values
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile._cache_key import entry_key
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.lab.mesh import MeshConfig

VIRTUAL_CPUS = 8
# The fields of a model that are no sizes: `tiny` takes them from the given config.
SWITCHES = (
    "attention",
    "sliding_window",
    "experts",
    "embedding",
    "norm_scale_offset",
    "dropout_rate",
)


def compare_arms(
    experiment: Experiment, config: Config, cache: Cache, *, virtual_cpus: int = VIRTUAL_CPUS
) -> Numerics:
    """Compares loss and gradients of both arms, computed from the same weights and batch.

    - `experiment`: the experiment whose arms run.
    - `config`: the arms run at `tiny` with the pipeline of this config, where that fits the eight
      devices.
    - `cache`: where results are kept and looked up.
    - `virtual_cpus`: how many CPU devices this process needs, here or for other work.
    """
    mesh = mesh_of_numbers(experiment)
    programs = at_tiny(experiment, config, mesh)
    key = entry_key(Platform("cpu"), "numerics", mesh, *programs, experiment.tolerance)
    if (known := cache.get(key)) is not None:
        try:
            fields = {**known[0], "all_zero": tuple(known[0]["all_zero"]), "measured": known[1]}
            return Numerics(**fields)
        except (KeyError, TypeError):
            pass  # an entry that something else has written
    # JAX may not have been started yet, because measurements from the cache need no device.
    Platform("cpu").devices(virtual_cpus)
    difference = _compared(programs, mesh, experiment.tolerance)
    cache.put(key, dataclasses.asdict(difference))
    return difference


def _compared(programs: tuple[Program, Program], mesh: MeshConfig, tolerance: float) -> Numerics:
    a, b = (arm_values(program, mesh) for program in programs)
    pipelines = dict.fromkeys(_pipeline(program.config) for program in programs)
    return dataclasses.replace(
        compare_values(a, b, tolerance), mesh=str(mesh), pipeline=" and ".join(pipelines)
    )


@functools.lru_cache(maxsize=64)
def arm_values(program: Program, mesh: MeshConfig) -> Values:
    """What a program computes; remembered, because many experiments have an arm in common."""
    return of_programs.numbers(program, mesh, jax.devices("cpu"))


def _pipeline(config: Config) -> str:
    count = config.pipeline.num_microbatches
    words = counted(count, "microbatch") if count else "as many microbatches as fill the pipeline"
    return f"{words} × {counted(config.pipeline.num_repeats, 'repeat')}"


def mesh_of_numbers(experiment: Experiment) -> MeshConfig:
    """The mesh of eight CPU devices that has the axes the experiment needs."""
    if "data" in experiment.needs:
        return MeshConfig(data=2, stage=VIRTUAL_CPUS // 2)
    if "expert" in experiment.needs:
        return MeshConfig(stage=VIRTUAL_CPUS // 4, fsdp=2, expert=2)
    return MeshConfig(stage=VIRTUAL_CPUS // 2, fsdp=2)


def at_tiny(experiment: Experiment, config: Config, mesh: MeshConfig) -> tuple[Program, Program]:
    """Both arms at the preset `tiny`, as programs whose values can be compared on this machine.

    - `experiment`: gives the two arms.
    - `config`: gives the pipeline, the weights of the router's losses and the fields of the model
      in `SWITCHES`. Where the pipeline does not fit `tiny` on this mesh, it gets two repeats and
      two microbatches per stage.
    - `mesh`: the sizes of the mesh axes.
    """
    tiny = preset("tiny")
    switches = {name: getattr(config.model, name) for name in SWITCHES}
    if switches["attention"] == "flash":  # CPU devices have no such kernel
        switches["attention"] = "chunked"
    router = ("load_balance_weight", "router_z_loss_weight")
    train = dataclasses.replace(
        tiny.train, **{name: getattr(config.train, name) for name in router}
    )
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
