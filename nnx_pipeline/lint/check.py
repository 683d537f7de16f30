"""Traces a function and applies the rules to its jaxpr; nothing is computed or compiled."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab.compile.functions import called_with, check_array, check_arrays
from nnx_pipeline.lab.compile.places import check_places
from nnx_pipeline.lint.facts import Program
from nnx_pipeline.lint.finding import Finding, Limits
from nnx_pipeline.lint.rules_arrays import hidden_upcasts, one_hot_arrays, trivial_constraints
from nnx_pipeline.lint.rules_loops import gradients_per_microbatch, parameters_in_loops
from nnx_pipeline.lint.rules_remat import remat_policies
from nnx_pipeline.tracing.calls import Call, jaxpr_of, traced_afresh
from nnx_pipeline.train import abstract_batch, abstract_state, jit_train_step

Rule = Callable[[Program, Limits], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    parameters_in_loops,
    remat_policies,
    hidden_upcasts,
    one_hot_arrays,
    gradients_per_microbatch,
    trivial_constraints,
)


def lint(
    function: Callable[..., Any],
    *arguments: Any,
    mesh: Mesh | AbstractMesh | None = None,
    parameters: Any = None,
    limits: Limits = Limits(),
) -> list[Finding]:
    """Finds what costs memory without need in a function, largest first.

    - `function`: jitted or not, see `lab.measure`. It is traced afresh. To have the backward pass
      checked, give a function that contains it, such as a training step.
    - `arguments`: pytrees of arrays or of `jax.ShapeDtypeStruct`, with a sharding where it matters.
    - `mesh`: the mesh under which the function is traced, which needs no devices.
    - `parameters`: the part of the arguments, as the same objects, whose arrays are the parameters.
      Without it they are the `nnx.Param`s of the first argument, or, if that has no variables, its
      floating-point arrays.
    - `limits`: the sizes in bytes below which nothing is reported.

    Raises InputError for arguments that are no arrays, or not sharded over this mesh.
    """
    check_arrays(arguments)
    if mesh is not None:
        check_places(arguments, mesh)
    call = Call.of(function, arguments)
    for leaf in jax.tree.leaves(call.given):
        if id(leaf) not in call.static and not isinstance(leaf, bool | int | float | complex):
            check_array(leaf)
    chosen = _parameters_of(call.arguments) if parameters is None else jax.tree.leaves(parameters)
    wanted = {id(leaf) for leaf in chosen}
    with _under(mesh), traced_afresh(), called_with(call):
        traced, leaves = jaxpr_of(call)
    program = Program(
        traced,
        frozenset(number for number, leaf in enumerate(leaves) if id(leaf) in wanted),
        [getattr(leaf, "sharding", None) for leaf in leaves],
        mesh.size if mesh is not None else 1,
    )
    return check(program, limits)


def _under(mesh: Mesh | AbstractMesh | None) -> contextlib.AbstractContextManager[Any]:
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def lint_step(config: Config, mesh: Mesh, *, limits: Limits = Limits()) -> list[Finding]:
    """Lints one training step, the one that `nnx-pipeline compile` compiles.

    - `config`: the model, the pipeline and the training.
    - `mesh`: the JAX mesh that the step is traced under.
    - `limits`: the sizes in bytes below which nothing is reported.
    """
    with jax.set_mesh(mesh):
        state, batch = abstract_state(config, mesh), abstract_batch(config, mesh)
        step = jit_train_step(state, mesh)
    return lint(step, state, batch, mesh=mesh, parameters=state.model, limits=limits)


def check(program: Program, limits: Limits) -> list[Finding]:
    """The findings of all rules, largest first; of one rule and line only that with most bytes."""
    found: dict[Any, list[Finding]] = {}
    for rule in RULES:
        for finding in rule(program, limits):
            found.setdefault((finding.rule, finding.location), []).append(finding)
    merged = [_merged(same) for same in found.values()]
    return sorted(merged, key=lambda finding: (-finding.bytes, finding.rule, finding.location))


def _merged(same: Sequence[Finding]) -> Finding:
    """The finding of the largest array, with the number of findings that it stands for."""
    largest = max(same, key=lambda finding: finding.bytes)
    return dataclasses.replace(largest, times=len(same))


def _parameters_of(arguments: tuple[Any, ...]) -> list[Any]:
    """The `nnx.Param` arrays of the first argument, or its float arrays if it has no variables.

    An argument without arrays, such as a static `self`, is passed over.
    """
    for argument in arguments:
        first = jax.tree.leaves(argument, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        variables = [leaf for leaf in first if isinstance(leaf, nnx.Variable)]
        if variables:
            return jax.tree.leaves([leaf for leaf in variables if isinstance(leaf, nnx.Param)])
        if arrays := [leaf for leaf in first if hasattr(leaf, "dtype")]:
            return [leaf for leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return []
