"""Whose code a Python frame runs: the user's or an installed package's. The user's is what lies
outside the folders of packages, of Python's library and of this tool. Where a program has no such
code, as a step of an installed package, its own code is that package's."""

import functools
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

Frame = tuple[str, int, str]  # file, line and function

_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
# Code without a file: typed at a prompt or given by `-c` is the user's, what else is made is not.
_TYPED = re.compile(r"<(stdin|string|console|(python|ipython)-input)\b[^>]*>")
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
_TOOL = f"{Path(__file__).parents[1]}{os.sep}"


@functools.cache
def package_of(file: str) -> str:
    """The installed package of a file, `python` for its library; "" for neither."""
    if installed := _INSTALLED.search(file):
        return installed[1]
    return "python" if file.startswith(_PYTHON) else ""


def in_program(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of a stack, innermost first, that the measured function called."""
    tool = (at for at, frame in enumerate(stack) if frame[0].startswith(_TOOL))
    inside = stack[: next(tool, len(stack))]
    return tuple(frame for frame in inside if not frame[0].startswith("<") or _is_typed(frame))


def _is_typed(frame: Frame) -> bool:
    # A method that a dataclass made has such a file too.
    file, _, function = frame
    return bool(_TYPED.fullmatch(file)) and not function.rpartition(".")[2].startswith("__")


def home_of(stacks: Iterable[Sequence[Frame]], function: str = "") -> str:
    """The package whose code a program is; "" where some of its code is the user's. A framework may
    have called the measured `function`."""
    roots: Counter[str] = Counter()
    for stack in stacks:
        if not all(package_of(frame[0]) for frame in stack):
            return ""
        named = [frame for frame in stack if frame[2].rpartition(".")[2] == function]
        roots.update(package_of(frame[0]) for frame in (named or stack)[-1:])
    return roots.most_common(1)[0][0] if roots else ""
