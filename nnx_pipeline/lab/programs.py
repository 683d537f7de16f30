"""A program of an experiment, measured or run on the CPU, whatever its kind is."""

import contextlib
import dataclasses
import functools
import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_pipeline.config import to_dict
from nnx_pipeline.decoder import Mixtral
from nnx_pipeline.lab.arms import Program
from nnx_pipeline.lab.compile import (
    Clock,
    Measurement,
    Progress,
    measure_traced,
    mesh_of,
    trace_step,
)
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.mesh import MeshConfig, make_mesh
from nnx_pipeline.sharding import variable_shardings
from nnx_pipeline.tracing import traced_afresh
from nnx_pipeline.train import loss_and_gradients, make_state
from nnx_pipeline.train.data import learnable_batches


def measure(
    program: Program,
    sizes: MeshConfig,
    platform: Platform,
    *,
    virtual_cpus: int = 1,
    progress: Progress = lambda text: None,
) -> Measurement:
    """Traces, lowers and compiles a program, without a byte of parameters.

    virtual_cpus: CPU devices that other work of this process needs beside it.
    Raises InputError when config, mesh and platform do not fit together.
    """
    mesh = mesh_of(program.config, sizes, platform, at_least=virtual_cpus)
    clock = Clock(progress)
    with jax.set_mesh(mesh), _context_of(program), traced_afresh():
        held = _held_while_tracing(program, mesh, clock) if program.kind == "trace" else None
        traced = _traced(program, mesh, clock)
        found = measure_traced(traced, platform, clock, sizes.sizes(), to_dict(program.config))
    return dataclasses.replace(found, trace_host_bytes=held)


def lower(program: Program, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """The program as it goes to the compiler; to be called under the mesh."""
    with _context_of(program):
        return _traced(program, mesh, Clock(lambda text: None)).lower()


def numbers(program: Program, sizes: MeshConfig, devices: Sequence[Any]) -> dict[str, np.ndarray]:
    """What a program computes from fresh weights and one batch, the same for every program.

    That is the loss and all gradients, or the parameters where it creates them; by name.
    """
    config, layout = program.config, program.layout
    mesh = make_mesh(sizes, devices, sharding=config.pipeline.sharding)
    with jax.set_mesh(mesh), _context_of(program):
        model = make_state(config, mesh, parts=program.parts, layout=layout).model
        if program.kind == "init":
            return _by_name(model)
        batch = next(
            learnable_batches(config, mesh, layout=layout, segment_ids=program.segment_ids)
        )
        (loss, _), gradients = jax.jit(loss_and_gradients)(model, batch)
        return {"loss": np.asarray(loss), **_by_name(gradients)}


def _traced(program: Program, mesh: jax.sharding.Mesh, clock: Clock) -> jax.stages.Traced:
    if program.kind == "init":
        return _trace_creation(program, mesh, clock)
    return trace_step(
        program.config,
        mesh,
        clock,
        parts=program.parts,
        layout=program.layout,
        segment_ids=program.segment_ids,
    )


def _trace_creation(program: Program, mesh: jax.sharding.Mesh, clock: Clock) -> jax.stages.Traced:
    config, parts, layout = program.config, program.parts, program.layout

    def create() -> Mixtral:
        return Mixtral(config, rngs=nnx.Rngs(0), layout=layout, parts=parts)

    with clock("abstract_init", "building the model abstractly"):
        shapes = jax.eval_shape(create)
        placed = variable_shardings(shapes, shapes.layout, mesh)
    with clock("trace", "tracing the creation of the parameters"):
        return jax.jit(create, out_shardings=placed).trace()


def _held_while_tracing(program: Program, mesh: jax.sharding.Mesh, clock: Clock) -> int:
    """The most bytes that Python holds on the host while a program is traced.

    Traced once before, so that what is imported and kept at first use counts for no arm.
    """
    silent = Clock(clock.progress)
    _traced(program, mesh, silent)
    jax.clear_caches()
    gc.collect()
    gc.disable()  # else the figure would depend on when rubbish is collected
    tracemalloc.start()
    try:
        _traced(program, mesh, silent)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
        jax.clear_caches()


@contextlib.contextmanager
def _context_of(program: Program) -> Iterator[None]:
    """The program's own context, in which nothing counts that JAX has traced outside it."""
    if program.under is None:
        yield
        return
    jax.clear_caches()
    try:
        with program.under():
            yield
    finally:
        jax.clear_caches()


def _by_name(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): np.asarray(leaf) for path, leaf in leaves}
