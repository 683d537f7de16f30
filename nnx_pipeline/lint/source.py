"""Where in the source an equation comes from: the one place that reads what JAX notes about it.

`JaxprEqn` is public (`jax.extend.core`), what its field `source_info` holds is not written down
anywhere; of it this file reads `traceback.as_python_traceback()` and `name_stack`.
"""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import optax

RECOMPUTED = "rematted_computation"  # what JAX writes into the name stack of a recomputation

_JAX = tuple(f"{Path(str(package.__file__)).parent}/" for package in (jax, jaxlib))
_LIBRARIES = tuple(f"{Path(str(package.__file__)).parent}/" for package in (flax, optax))
# Functions of jax.numpy and jax.lax by which a cast is asked for.
_CASTS = {"astype", "asarray", "array", "convert_element_type"}


@dataclass(frozen=True, order=True)
class Location:
    """A line of source and the function it stands in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})" if self.file else "unknown"


NOWHERE = Location("", 0, "")


def location_of(equations: Sequence[Any]) -> Location:
    """The line that an equation stands for: the innermost one outside JAX, Flax and Optax.

    equations: the equation and those around it, from the inside out. A function that JAX itself
    jits, such as `jax.nn.one_hot`, knows nothing of who calls it; the call around it does. Where
    there is no such line, it is the innermost one outside JAX.
    """
    stacks = [[frame for frame in _frames(e) if not _is_in(frame, _JAX)] for e in equations]
    for frames in stacks:
        for frame in reversed(frames):
            if not _is_in(frame, _LIBRARIES):
                return _location(frame)
    return next((_location(frames[-1]) for frames in stacks if frames), NOWHERE)


def is_asked_for(equation: Any) -> bool:
    """Whether a cast was written down, rather than made because the dtypes of operands differ.

    Flax's `promote_dtype` is of the second kind: a layer without `dtype` takes that of its
    parameters.
    """
    frames = _frames(equation)
    if any(frame.name.startswith("promote_") for frame in frames):
        return False
    return any(frame.name in _CASTS and _is_in(frame, _JAX) for frame in frames)


def is_recomputed(equation: Any) -> bool:
    """Whether the equation of a backward pass computes again what the forward pass had computed."""
    return RECOMPUTED in str(equation.source_info.name_stack)


def _frames(equation: Any) -> list[traceback.FrameSummary]:
    """The stack when the equation was traced, innermost last."""
    noted = equation.source_info.traceback
    if noted is None:
        return []
    stack = traceback.walk_tb(noted.as_python_traceback())
    return list(traceback.StackSummary.extract(stack, lookup_lines=False))


def _is_in(frame: traceback.FrameSummary, folders: tuple[str, ...]) -> bool:
    return frame.filename.startswith(folders)


def _location(frame: traceback.FrameSummary) -> Location:
    return Location(frame.filename, frame.lineno or 0, frame.name)
