"""Turns the arrays that the functions of a pipeline close over into an explicit argument.

No tick needs a copy of them, and each has a gradient, which is summed over the ticks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.tree_util import PyTreeDef
from jaxtyping import Array, PyTree

from nnx_pipeline.sharding.layout import P, is_explicit, place

Function = Callable[..., PyTree]


@dataclass(frozen=True)
class _Program:
    jaxpr: ClosedJaxpr
    gives: PyTreeDef

    def __call__(self, captured: Sequence[Array], arguments: PyTree) -> PyTree:
        program = ClosedJaxpr(self.jaxpr.jaxpr, [*captured])
        return jax.tree.unflatten(self.gives, jaxpr_as_fun(program)(*jax.tree.leaves(arguments)))


def hoist(
    functions: tuple[Function, ...], call: Callable[..., None]
) -> tuple[tuple[Function, ...], tuple[list[Array], ...], tuple[ClosedJaxpr, ...]]:
    """Gives functions of pytrees a new first argument for the arrays that they close over.

    `call` is given a stand-in for each and must call all of them as the loop will, under
    `jax.eval_shape`. Returns the new functions, for each the arrays to pass (constants and tracers
    of any dtype, whole on every stage), and what it was traced to. A function with no arrays is
    called unchanged, so that the program stays the same.
    """
    seen: list[list[_Program]] = [[] for _ in functions]

    def watched(index: int) -> Function:
        def look(_: list[Array], *arguments: PyTree) -> PyTree:
            # A new function object for every trace: JAX caches a trace by its function, together
            # with the tracers that it closed over, which are not valid in another trace.
            trace = jax.make_jaxpr(lambda *args: functions[index](*args), return_shape=True)
            jaxpr, gives = trace(*arguments)
            program = _Program(jaxpr, jax.tree.structure(gives))
            seen[index].append(program)
            return program(jaxpr.consts, arguments)

        return look

    # The call may reach a function more than once; each time it closes over the same arrays.
    call(*map(watched, range(len(functions))))
    programs = [traces[0] for traces in seen]
    captured = tuple([_on_mesh(leaf) for leaf in program.jaxpr.consts] for program in programs)
    pairs = zip(functions, programs, strict=True)
    traced = tuple(program.jaxpr for program in programs)
    return tuple(_with_captured(*pair) for pair in pairs), captured, traced


def _with_captured(function: Function, program: _Program) -> Function:
    return lambda captured, *args: program(captured, args) if captured else function(*args)


def _on_mesh(leaf: Array) -> Array:
    """The array placed on the mesh, so that the loop can add up its gradient in explicit mode."""
    # The type of a numpy constant, or of an array on one device, names no mesh. A number that is
    # differentiated in forward mode comes as a Python number.
    leaf = jnp.asarray(leaf)
    if is_explicit() and jax.typeof(leaf).sharding.mesh.empty:
        return place(leaf, P(*[None] * leaf.ndim))
    return leaf
