"""Where in the source an equation of a jaxpr comes from, and the jaxprs inside it. Only this file
reads `source_info`, which is not documented: `traceback` and `name_stack`."""

import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from nnx_pipeline.lab._tracing.installed import Frame, home_of, in_program, package_of
from nnx_pipeline.lab._tracing.visits import each_once

# What JAX writes into the name stack of a recomputation, and into that of an equation of a backward
# pass that is the transpose of one of the forward pass.
RECOMPUTED = "rematted_computation"
TRANSPOSED = "transpose("
_FORWARD = "jvp("

_JAX = tuple(f"{Path(str(package.__file__)).parent}/" for package in (jax, jaxlib))
_NUMPY, _PMAP = f"{_JAX[0]}_src/numpy/", f"{_JAX[0]}_src/pmap.py"
# Functions of jax.numpy that ask for a cast.
_CASTS = {"astype", "asarray", "array"}


@dataclass(frozen=True, order=True)
class Location:
    file: str  # empty if the line is not known
    line: int
    function: str
    caller: str = ""  # `file:line (function)`; empty if not known

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})" if self.file else "unknown"


NOWHERE = Location("", 0, "")


def location_of(equations: Sequence[JaxprEqn]) -> Location:
    """The innermost line of the program's own code that made an equation, which comes first, with
    those around it: JAX's own jits, as in `jax.nn.one_hot`, do not record who calls them."""
    stacks = [_outside_jax(equation) for equation in equations]
    home = home_of(stacks)
    own = ([one for one in stack if package_of(one[0]) == home] for stack in stacks)
    return next((_location(frames) for frames in own if frames), NOWHERE)


def place_of(function: object) -> Location:
    """Where a function is defined; of a partial or a jitted one, where what is inside is."""
    inner: Any = function
    while outer := getattr(inner, "__wrapped__", None) or getattr(inner, "func", None):
        inner = outer
    method = inner if hasattr(inner, "__code__") else getattr(inner, "__call__", None)  # noqa: B004
    code = getattr(method, "__code__", None)
    return Location(code.co_filename, code.co_firstlineno, code.co_name) if code else NOWHERE


def function_of(equation: JaxprEqn) -> tuple[str, str]:
    """File and name of the innermost function outside JAX in which an equation was traced."""
    own = [frame for frame in _frames(equation) if not _is_in(frame, _JAX)]
    return (own[-1].filename, own[-1].name) if own else ("", "")


def is_made_in_jax_by(equation: JaxprEqn, name: str) -> bool:
    """Whether a function of JAX of this name made an equation, perhaps through a callback."""
    return any(frame.name == name and _is_in(frame, _JAX) for frame in _frames(equation))


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs that an equation calls, loops over or reduces with."""
    for parameter in equation.params.values():
        for one in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(one, Jaxpr | ClosedJaxpr):
                yield open_jaxpr(one)


def with_bodies(program: ClosedJaxpr) -> Iterator[JaxprEqn]:
    """The equations that hold jaxprs, at any depth; each jaxpr is visited once."""
    return (equation for equation in equations_of(program) if any(inner_jaxprs(equation)))


def equations_of(program: ClosedJaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program at any depth; each jaxpr is visited once."""
    pending = [program.jaxpr]
    for jaxpr in each_once(pending):
        for equation in jaxpr.eqns:
            pending += inner_jaxprs(equation)
            yield equation


def is_pmap(function: object) -> bool:
    return getattr(getattr(function, "__code__", None), "co_filename", "") == _PMAP


def raised_in_pmap(error: BaseException) -> bool:
    # `error` must have the frames of JAX.
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename == _PMAP for frame, _ in frames)


def calls_pmap(program: ClosedJaxpr) -> bool:
    calls = with_bodies(program)
    return any(frame.filename == _PMAP for call in calls for frame in _frames(call))


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def called_from_one_line(program: ClosedJaxpr) -> frozenset[str]:
    """Names of the jitted functions, JAX's own included, that only one line of source calls. The
    compiler gets a function once, with the stack of its first call, which is right for these alone.
    A call inside one of JAX's own functions counts for the line that calls the latter."""
    lines: dict[str, set[tuple[str, int]]] = defaultdict(set)
    pending: list[tuple[Jaxpr, tuple[str, int]]] = [(program.jaxpr, ("", 0))]
    for jaxpr, around in each_once(pending):
        for equation in jaxpr.eqns:
            own = location_of([equation])
            here = (own.file, own.line) if own.file else around
            if equation.primitive.name in ("jit", "pjit"):
                lines[equation.params["name"]].add(here)
            pending += [(inner, here) for inner in inner_jaxprs(equation)]
    return frozenset(name for name, places in lines.items() if len(places) == 1)


def is_promotion(equation: JaxprEqn) -> bool:
    """Whether a cast was made because dtypes differ: by jax.numpy inside a function other than
    `astype`, `asarray` and `array`, or by Flax's `promote_dtype`. Where the stack is lost, as in a
    `jax.custom_vjp`, the answer is no."""
    frames = _frames(equation)
    last = max((i for i, frame in enumerate(frames) if not _is_in(frame, _JAX)), default=-1)
    # The cast of Flax is in a comprehension of `promote_dtype`, which may have a frame of its own.
    if any(frame.name.startswith("promote_") for frame in frames[max(last - 1, 0) :]):
        return True
    inner = [frame for frame in frames[last + 1 :] if _is_in(frame, (_NUMPY,))]
    return bool(inner) and not any(frame.name in _CASTS for frame in inner)


def is_transposed(equations: Sequence[JaxprEqn]) -> bool:
    """Whether an equation of a backward pass, the first of these from the inside, is the transpose
    of one of the forward pass: a loop's mark holds for its body."""
    for equation in equations:
        # What a backward pass recomputes is the forward pass again, not a transpose.
        if is_recomputed(equation):
            return False
        if TRANSPOSED in str(equation.source_info.name_stack):
            return True
    return False


def is_differentiated(equations: Sequence[JaxprEqn]) -> bool:
    """Whether an equation, the first of these from the inside, is part of what is differentiated,
    or of its backward pass."""
    stacks = [str(equation.source_info.name_stack) for equation in equations]
    return any(mark in stack for stack in stacks for mark in (_FORWARD, TRANSPOSED))


def is_recomputed(equation: JaxprEqn) -> bool:
    return RECOMPUTED in str(equation.source_info.name_stack)


def _frames(equation: JaxprEqn) -> list[traceback.FrameSummary]:
    noted = equation.source_info.traceback
    if noted is None:
        return []
    stack = traceback.walk_tb(noted.as_python_traceback())
    return list(traceback.StackSummary.extract(stack, lookup_lines=False))


def _is_in(frame: traceback.FrameSummary, folders: tuple[str, ...]) -> bool:
    return frame.filename.startswith(folders)


def _outside_jax(equation: JaxprEqn) -> tuple[Frame, ...]:
    frames = [frame for frame in reversed(_frames(equation)) if not _is_in(frame, _JAX)]
    return in_program([(frame.filename, frame.lineno or 0, frame.name) for frame in frames])


def _location(frames: Sequence[Frame]) -> Location:
    (file, line, function), *around = frames
    caller = "{}:{} ({})".format(*around[0]) if around else ""
    return Location(file, line, function, caller)
