"""Compiles and measures a program of an experiment of any kind, or runs it on CPU devices."""

import contextlib
import dataclasses
import functools
import gc
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from nnx_pipeline.config.config import Config, to_dict
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.experiments._arms import Program
from nnx_pipeline.experiments._replaced import replaced
from nnx_pipeline.experiments.bound.floor import floor
from nnx_pipeline.lab._timing.band import Program as Kind
from nnx_pipeline.lab._tracing.calls import traced_afresh
from nnx_pipeline.lab.compile.measure import Clock, Measurement, Progress, lower_traced
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.mesh import MeshConfig, make_mesh
from nnx_pipeline.modules.decoder import Mixtral
from nnx_pipeline.ops._fast_attention.kernels import check_platform, chosen
from nnx_pipeline.ops._low_precision import check_package
from nnx_pipeline.sharding.layout import variable_shardings
from nnx_pipeline.train import (
    abstract_batch,
    abstract_state,
    jit_train_step,
    loss_and_gradients,
)
from nnx_pipeline.train._useful import bubble_share, useful_flops
from nnx_pipeline.train.data import learnable_batches


def measure_step(
    config: Config,
    mesh_config: MeshConfig,
    platform: Platform,
    *,
    progress: Progress = lambda text: None,
) -> Measurement:
    """Traces, lowers and compiles one training step without allocating any parameters.

    - `config`: the config of model, training and pipeline.
    - `mesh_config`: the size of each mesh axis.
    - `platform`: what to compile for.
    - `progress`: called with a text when a phase begins.

    Raises InputError when config, mesh and platform do not fit together.
    """
    return prepare(Program(config), mesh_config, platform, progress=progress)()


def prepare(
    program: Program,
    sizes: MeshConfig,
    platform: Platform,
    *,
    virtual_cpus: int = 1,
    progress: Progress = lambda text: None,
) -> Callable[[], Measurement]:
    """Traces and lowers a program, and returns the function that compiles and measures it.

    - `program`: what to compile, and which kind of figure counts.
    - `sizes`: the size of each mesh axis.
    - `platform`: what to compile for.
    - `virtual_cpus`: how many CPU devices other work of this process needs.
    - `progress`: called with a text when a phase begins.

    JAX's options may differ from thread to thread. They count here, and no longer in the function
    that is returned, which any thread may call.

    Raises InputError when config, mesh and platform do not fit together.
    """
    mesh = mesh_of(program.config, sizes, platform, at_least=virtual_cpus)
    clock = Clock(progress)
    with jax.set_mesh(mesh), _context_of(program), traced_afresh():
        host_bytes = _tracing_memory(program, clock) if program.kind == "trace" else None
        traced = _traced(program, clock)
        lowered = lower_traced(traced, platform, clock, sizes.sizes(), to_dict(program.config))
        model, length = program.config.model, program.config.train.sequence_length
        taken = {"attention": chosen(model.attention, length, model.dtype)}
    # The floor describes a config, and an arm with functions of its own is another program.
    is_plain = program == Program(program.config)

    def measured() -> Measurement:
        compiled = lowered.measure()
        time, train = compiled.time, program.config.train
        tokens = train.global_batch * train.sequence_length
        if time is not None and program.kind == "step":
            needed = useful_flops(program.config, sizes)
            kind: Kind = "experts" if program.config.model.num_experts > 1 else "dense"
            time = time.of_model(needed, bubble_share(program.config, sizes), kind)
        return dataclasses.replace(
            compiled,
            trace_host_bytes=host_bytes,
            time=time,
            floor=floor(program.config, sizes, platform) if is_plain else None,
            choices=taken,
            tokens=tokens if program.kind == "step" else None,
        )

    return measured


def mesh_of(
    config: Config, sizes: MeshConfig, platform: Platform, *, at_least: int = 1
) -> jax.sharding.Mesh:
    """The JAX mesh of a config on a platform.

    - `config`: gives the sharding mode of the axes.
    - `sizes`: the size of each mesh axis.
    - `platform`: gives the devices.
    - `at_least`: how many CPU devices other work of this process needs.

    Raises InputError when the three do not fit together, or a package is missing.
    """
    config.check_mesh(sizes)
    check_platform(config.model.attention, platform.backend)
    check_package(config.model)
    devices = platform.devices(max(at_least, sizes.num_devices if platform.kind == "cpu" else 1))
    return make_mesh(sizes, devices, sharding=config.pipeline.sharding)


def lower(program: Program) -> jax.stages.Lowered:
    """The lowered program, ready to compile; to be called under its mesh."""
    with _context_of(program):
        lowered: jax.stages.Lowered = _traced(program, Clock(lambda text: None)).lower()
        return lowered


def numbers(
    program: Program, sizes: MeshConfig, devices: Sequence[jax.Device]
) -> dict[str, np.ndarray]:
    """What a program computes, by name, from initial weights and one batch.

    - `program`: what to run; every program gets the same weights and the same batch.
    - `sizes`: the size of each mesh axis.
    - `devices`: the devices to run on.

    The result is the loss and all gradients, or the parameters if the program creates them.
    """
    config, layout = program.config, program.layout
    mesh = make_mesh(sizes, devices, sharding=config.pipeline.sharding)
    weights = None if program.kind == "init" else _initial_weights(config.model, devices[0])
    with jax.set_mesh(mesh), _context_of(program):
        create = _creation(program)
        if weights is None:
            initial = jax.jit(
                create, out_shardings=_shardings_of(create), **_soon_compiled(devices)
            )
            return _by_name(initial())
        model = _placed(weights, create)
        batch = next(
            learnable_batches(config, mesh, layout=layout, segment_ids=program.segment_ids)
        )
        step = jax.jit(loss_and_gradients, **_soon_compiled(devices))
        (loss, _), gradients = step(model, batch)
        return {"loss": np.asarray(loss), **_by_name(gradients)}


def _soon_compiled(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Options of `jax.jit` for a small program that runs once: machine code that is not optimized.

    XLA optimizes and partitions the program as ever; its CPU compiler alone knows these options.
    """
    if devices[0].platform != "cpu":
        return {}
    options = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
    return {"compiler_options": options}


@functools.lru_cache(maxsize=4)
def _initial_weights(model: ModelConfig, device: jax.Device) -> list[np.ndarray]:
    """What a model is created with on any mesh, its layers `[1, 1, layers, …]`, in tree order.

    Created once for all arms: that takes longer to compile than the gradients of a small model.
    """
    with jax.default_device(device):
        options = _soon_compiled([device])
        created = jax.jit(lambda: Mixtral(Config(model=model), rngs=nnx.Rngs(0)), **options)()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(created)]


def _placed(weights: list[np.ndarray], create: Callable[[], Mixtral]) -> Mixtral:
    """The model with these weights where its own would be; to be called under its mesh."""
    abstract, shardings = jax.eval_shape(create), _shardings_of(create)
    leaves, tree = jax.tree.flatten(abstract)
    # Row-major order of [repeats, stages, layers per stage] is the order of the layers.
    placed = [
        jax.device_put(values.reshape(leaf.shape), sharding)
        for values, leaf, sharding in zip(weights, leaves, jax.tree.leaves(shardings), strict=True)
    ]
    model: Mixtral = jax.tree.unflatten(tree, placed)
    return model


def _traced(program: Program, clock: Clock) -> jax.stages.Traced:
    return (_trace_creation if program.kind == "init" else _trace_step)(program, clock)


def _trace_step(program: Program, clock: Clock) -> jax.stages.Traced:
    config, mesh, layout = program.config, jax.sharding.get_mesh(), program.layout
    with clock("abstract_init", "building the model abstractly"):
        state = abstract_state(config, mesh, make_model=_model_of(program))
        batch = abstract_batch(config, mesh, layout=layout, segment_ids=program.segment_ids)
    with clock("trace", "tracing the training step"):
        traced: jax.stages.Traced = jit_train_step(state, mesh).trace(state, batch)
    return traced


def _trace_creation(program: Program, clock: Clock) -> jax.stages.Traced:
    create = _creation(program)
    with clock("abstract_init", "building the model abstractly"):
        placed = _shardings_of(create)
    with clock("trace", "tracing the creation of the parameters"):
        return jax.jit(create, out_shardings=placed).trace()


def _creation(program: Program) -> Callable[[], Mixtral]:
    """The function that creates the program's model; to be called under its mesh."""
    return lambda: _model_of(program)(program.config, rngs=nnx.Rngs(0))


def _model_of(program: Program) -> Callable[..., Mixtral]:
    return functools.partial(Mixtral, layout=program.layout)


def _shardings_of(create: Callable[[], Mixtral]) -> nnx.Module:
    shapes: Mixtral = jax.eval_shape(create)
    return variable_shardings(shapes, shapes.layout, jax.sharding.get_mesh())


def _tracing_memory(program: Program, clock: Clock) -> int:
    """The most bytes that Python holds on the host while a program is traced.

    The program is traced once before, so that what is imported or cached at first use counts for
    no arm.
    """
    silent = Clock(clock.progress)
    _traced(program, silent)
    jax.clear_caches()
    gc.collect()
    gc.disable()  # else the figure would depend on when garbage is collected
    tracemalloc.start()
    try:
        _traced(program, silent)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
        jax.clear_caches()


@contextlib.contextmanager
def _context_of(program: Program) -> Iterator[None]:
    """The program's own context, in which JAX reuses nothing that it traced outside it."""
    if program.under is None and not program.replaced:
        yield
        return
    under = program.under or contextlib.nullcontext
    jax.clear_caches()
    try:
        with under(), replaced(program.replaced):
            yield
    finally:
        jax.clear_caches()


def _by_name(tree: PyTree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): np.asarray(leaf) for path, leaf in leaves}
