"""What the functions of a pipeline close over, turned into an argument of theirs.

A loop over ticks must know these arrays: no tick changes them, so that none needs a copy of its
own, and each has a gradient, which adds up over the ticks as that of a parameter does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, PyTree

from nnx_pipeline.sharding import P, is_explicit, place

Function = Callable[..., Any]


@dataclass(frozen=True)
class _Program:
    """What a function does to arrays, and the pytree that it gives."""

    jaxpr: ClosedJaxpr
    gives: Any

    def __call__(self, closed: Sequence[Array], arguments: PyTree) -> Any:
        """The same again, with `closed` in the place of the arrays that it closed over."""
        program = ClosedJaxpr(self.jaxpr.jaxpr, [*closed])
        return jax.tree.unflatten(self.gives, jaxpr_as_fun(program)(*jax.tree.leaves(arguments)))


def hoist(
    functions: tuple[Function, ...], call: Callable[..., Any]
) -> tuple[tuple[Function, ...], tuple[list[Array], ...]]:
    """The functions with a new first argument, and for each of them what that is to be.

    It is the list of the arrays that the function closes over: constants and tracers of any dtype,
    whole on every stage. With an empty list the function is called as it stands, and the program
    is what it would be without this.

    functions: from pytrees of arrays to pytrees of arrays. call: is given one function for each of
    them and calls all as the loop will, under `jax.eval_shape`, so that the arguments are of the
    shapes, dtypes and shardings that they have in the loop.
    """
    seen: list[list[_Program]] = [[] for _ in functions]

    def watched(index: int) -> Function:
        def look(*arguments: PyTree) -> Any:
            # A function of its own for every trace, as JAX remembers what it traced, tracers and
            # all, by the function.
            trace = jax.make_jaxpr(lambda *given: functions[index](*given), return_shape=True)
            jaxpr, gives = trace(*arguments)
            program = _Program(jaxpr, jax.tree.structure(gives))
            seen[index].append(program)
            return program(jaxpr.consts, arguments)

        return look

    call(*map(watched, range(len(functions))))
    programs = [found[0] for found in seen]
    closed = tuple([_on_mesh(leaf) for leaf in program.jaxpr.consts] for program in programs)
    pairs = zip(functions, programs, strict=True)
    return tuple(_with_closed(*pair) for pair in pairs), closed


def _with_closed(function: Function, program: _Program) -> Function:
    def apply(closed: list[Array], *arguments: PyTree) -> Any:
        return program(closed, arguments) if closed else function(*arguments)

    return apply


def _on_mesh(leaf: Array) -> Array:
    """The array as the loop can add to its gradient: in explicit mode its type names the mesh.

    A constant of numpy's, or of one device, has a type without a mesh.
    """
    if is_explicit() and jax.typeof(leaf).sharding.mesh.empty:
        return place(leaf, P(*[None] * leaf.ndim))
    return leaf
