"""What sharding constraints force: its line, and a note where an array becomes whole."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import mesh_of, missing
from jax import Array
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline import lab
from nnx_pipeline.lab._hlo.dataflow import collective
from nnx_pipeline.lab._hlo.module import parse
from nnx_pipeline.lab._tracing.constraints import Constraint, constraints_of
from nnx_pipeline.lab.attribution._constraints import at_constraints
from nnx_pipeline.lab.attribution._origins import source_of
from nnx_pipeline.lab.compile.measure import Measurement

SIZE, MESH = 2048, "data=4,fsdp=2"
PLATFORMS = {"cpu": (), "tpu:v5e:2x4": ("libtpu",), "cuda:h100:8": ("jax_cuda13_plugin",)}


def replicated(x: Array, w: Array) -> Array:
    h = with_sharding_constraint(jnp.tanh(x @ w), P("data", None))
    h = jnp.sin(h)
    h = with_sharding_constraint(h, P(None, "fsdp"))  # the constraint
    return jnp.cos(h) @ w.T


def two_steps(x: Array, w: Array) -> Array:
    """The cure that the note names: no array is whole."""
    h = with_sharding_constraint(jnp.tanh(x @ w), P("data", None))
    h = jnp.sin(h)
    h = with_sharding_constraint(h, P("data", "fsdp"))
    h = with_sharding_constraint(h, P(None, "fsdp"))  # the constraint
    return jnp.cos(h) @ w.T


def scanned(x: Array, w: Array) -> Array:
    def turn(h: Array, _: None) -> tuple[Array, None]:
        h = jax.nn.relu(with_sharding_constraint(h @ w, P("data", None)))
        return with_sharding_constraint(h, P(None, "fsdp")), None  # the constraint

    return jax.lax.scan(turn, x, length=4)[0]


def exchanged(x: Array, w: Array) -> Array:
    """An all-to-all, in which every device has a part of its own."""
    h = jnp.sin(with_sharding_constraint(x @ w, P("data", None)))
    h = with_sharding_constraint(h, P(None, "data"))  # the constraint
    return jnp.cos(h) @ w.T


def asked_for(x: Array, w: Array) -> Array:
    """Whole on every device because the constraint says so."""
    h = jnp.sin(with_sharding_constraint(x @ w, P("data", None)))
    h = with_sharding_constraint(h, P(None, None))  # the constraint
    return jnp.cos(h) @ w.T


def read_twice(x: Array, w: Array) -> tuple[Array, Array]:
    """Something else reads the array, so that the program does not tell for what it is whole."""
    h = jnp.sin(with_sharding_constraint(x @ w, P("data", None)))  # made
    y = with_sharding_constraint(h, P(None, "fsdp"))  # the constraint
    return jnp.cos(y) @ w.T, h


def of_a_helper(x: Array, w: Array) -> Array:
    """One line makes two arrays, of which one alone is constrained."""

    def wave(x: Array) -> Array:
        return jnp.sin(x)  # made

    first = wave(with_sharding_constraint(x @ w, P("data", None)))
    h = with_sharding_constraint(first, P(None, "fsdp"))  # the constraint
    return wave(jnp.cos(h) @ w.T)


def line_of(function: Callable[..., Any], mark: str = "the constraint") -> str:
    first = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()[first - 1 :]
    return f"{__file__}:{first + next(n for n, line in enumerate(lines) if line.endswith(mark))}"


def measured(
    function: Callable[..., Any], platform: str
) -> tuple[Measurement, set[str | None], str]:
    """The measurement, the lines of its collectives, and the note on an array that is whole."""
    if missing(*PLATFORMS[platform]):
        pytest.skip(f"{PLATFORMS[platform]} is not installed")
    mesh = mesh_of(MESH, "auto")
    arguments = [
        jax.ShapeDtypeStruct((SIZE, SIZE), "float32", sharding=NamedSharding(mesh, spec))
        for spec in (P("data", None), P(None, None))
    ]
    found = lab.measure(function, *arguments, mesh=mesh, platform=platform)
    module, notes = at_constraints(parse(found.hlo), traced(function))
    assert [note for note in found.notes if "whole on every device" in note] == list(notes)
    lines = {
        source_of(item)
        for computation in module.computations.values()
        for item in computation.instructions.values()
        if collective(item)
    }
    return found, lines, " ".join(notes)


def traced(function: Callable[..., Any]) -> tuple[Constraint, ...]:
    x = jax.ShapeDtypeStruct((SIZE, SIZE), "float32")
    with jax.set_mesh(mesh_of(MESH, "auto")):
        return constraints_of(jax.make_jaxpr(function)(x, x))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("function", [replicated, scanned], ids=lambda one: one.__name__)
def test_an_array_that_a_constraint_makes_whole(
    function: Callable[..., Array], platform: str
) -> None:
    found, lines, note = measured(function, platform)
    size = f"f32[{SIZE},{SIZE}]"
    assert note.count(size) == 1
    whole = rf"is whole on every device \({SIZE * SIZE * 4:,} bytes\) for the constraint at "
    assert re.match(rf"{re.escape(size)}( made at \S+)? {whole}", note)
    assert f"{os.path.relpath(line_of(function))}, which asks for P(None, 'fsdp'): " in note
    assert f"from parts of f32[{SIZE // 4},{SIZE}] the compiler found no other way" in note
    assert line_of(function) in lines
    assert found.attribution
    rows = (*found.attribution.buffers, *found.attribution.in_outputs)
    held = {row.source for row in rows if row.role == "collective buffer" and row.shape == size}
    assert held <= {line_of(function)}
    assert held or platform.startswith("tpu")  # which has it in on-chip memory


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    "function", [two_steps, exchanged, asked_for], ids=lambda one: one.__name__
)
def test_a_collective_that_a_constraint_forces(
    function: Callable[..., Array], platform: str
) -> None:
    """No note where each device has its part, as after the cure of a note, or all, as asked for."""
    _, lines, note = measured(function, platform)
    assert line_of(function) in lines
    assert not note


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("function", [read_twice, of_a_helper], ids=lambda one: one.__name__)
def test_what_the_program_does_not_tell_is_said(
    function: Callable[..., Any], platform: str
) -> None:
    _, lines, note = measured(function, platform)
    if function is of_a_helper and "which the program does not tell" not in note:
        assert line_of(function) in lines, "a newer compiler names the constraint before it"
        return
    assert "or for another operation beside it, which the program does not tell" in note
    assert line_of(function, "made") in lines
    assert line_of(function) not in lines


def test_constraints_of_a_traced_program() -> None:
    found = traced(replicated)
    names = [(one.operation, one.operands, one.certain) for one in found]
    own, before = ("sharding_constraint", 1, True), ("sin", 1, True)
    assert names == [own, ("tanh", 1, True), ("dot_general", 0, True), own, before, own]
    assert {one.part for one in found[3:]} == {(SIZE, SIZE // 2)}
    assert {f"{one.at.file}:{one.at.line}" for one in found[3:]} == {line_of(replicated)}
    unsure = {one.certain for one in traced(read_twice) if one.operation == "sin"}
    assert unsure == {False}


def test_a_size_that_does_not_divide_and_an_open_dimension() -> None:
    """The largest part, and the whole size."""

    def uneven(x: Array) -> Array:
        return with_sharding_constraint(jnp.sin(x), P("data", P.UNCONSTRAINED))

    with jax.set_mesh(mesh_of(MESH, "auto")):
        program = jax.make_jaxpr(uneven)(jax.ShapeDtypeStruct((1023, 7), "float32"))
    assert {one.part for one in constraints_of(program)} == {(256, 7)}
