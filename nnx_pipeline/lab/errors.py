"""The exception raised for bad input, names in messages, and checks of values."""

import difflib
import importlib
import math
import os
import re
import reprlib
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

# What a terminal acts on, what reorders a line, and what UTF-8 cannot write: control characters,
# marks and overrides of the direction of text, separators of lines, and lone surrogates.
_ACTING = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    """Writes characters on which a terminal acts as escapes, except those in `keep`."""
    return _ACTING.sub(lambda at: at[0] if at[0] in keep else repr(at[0])[1:-1], text)


MOST = 2**31 - 1  # of anything that is counted: compilers and indices have 32 bits
LARGEST = sys.float_info.max
BYTES = {  # the units in which users write them
    **{"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother = 4, 200, 200


class InputError(ValueError):
    """Something that the user gave cannot be used.

    The message states the rule, the value and what to change. The command line prints it as one
    line and exits with code 2.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class Unavailable(Exception):
    """What is asked for cannot be had here, and the user's input is not why."""


def described(error: BaseException, most: int = 300) -> str:
    """Type and first line of an exception, and the line of the user's source that it came from.

    That is the innermost line outside of Python, installed packages and this project, if any.
    """
    first = (str(error).strip().splitlines() or [""])[0][:most]
    paths, project = sysconfig.get_paths(), Path(__file__).parents[2]
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [str(project / name) for name in ("nnx_pipeline", "linen_compat")]
    others = ("<", *(f"{folder}{os.sep}" for folder in folders))  # such as `<frozen importlib>`
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if not one.filename.startswith(others)), None)
    place = f" ({os.path.relpath(frame.filename)}:{frame.lineno}, in {frame.name})" if frame else ""
    return f"{type(error).__name__}: {first}{place}"


class Note(UserWarning):
    """A warning about what the user gave; commands print it as one line and go on."""


def note(message: str) -> None:
    warnings.warn(message, Note, stacklevel=2)


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name: the nearest known one, or the list of all known ones."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    return f"did you mean {close[0]!r}?" if close else f"choose one of: {', '.join(known)}"


def optional(module: str, extra: str, user: str) -> ModuleType:
    """Imports a module that an extra brings; raises InputError, which begins with `user`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(f"{user} needs {package} ({error}); {install(extra)}") from error


def install(extra: str) -> str:
    return f"pip install 'nnx-pipeline[{extra}]'"


def shown(value: object) -> str:
    """A value in a message as Python writes it, shortened if it is long, deep or huge."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write some of them
    return _BRIEF.repr(value)


def once(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """The object of JSON with these pairs; raises ValueError for a name that stands there twice."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands there twice; keep one of the two")
        found[name] = value
    return found


def unparsed(error: Exception, cure: str | None = None) -> str:
    """Why a text of YAML or JSON cannot be read; `cure` replaces the cure that the error has."""
    if isinstance(error, RecursionError):
        reason, own_cure = "its values are nested too deeply", "give something flatter"
    else:
        # Python's own cure for a number of thousands of digits is a setting of the interpreter.
        said = " ".join(str(error).split())[:200].partition("; use sys.")[0]
        reason, _, own_cure = said.partition("; ")
    return f"{reason}; {cure or own_cure or 'correct the file'}"


def kind_of(value: object) -> str:
    """Dtype and shape of an array, and of anything else its type."""
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else f"{dtype}{[*getattr(value, 'shape', ())]}"


def counted(number: int | None, what: str) -> str:
    """A number of things, of which `what` names one: `1 repeat`, `2 stages`, `2 branches`."""
    ending = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{'' if number == 1 else ending}"


def do_not_split(number: int, what: str) -> str:
    return f"{counted(number, what)} {'does' if number == 1 else 'do'} not split"


def one_of(field: str, value: object, choices: Iterable[object]) -> None:
    """Raises InputError unless `value` is among `choices` and of the same type as that choice."""
    choices = tuple(choices)
    # The types are compared too, because True == 1 and 1.0 == 1.
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        named = value if isinstance(value, str) else shown(value)
        cure = nearest(named, map(str, choices))
        if len(choices) == 1:
            cure = f"so far {choices[0]!r} is the only choice"
        raise InputError(f"{field}={shown(value)} is not known; {cure}")


def of_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InputError(f"{name} is of type {type(value).__name__}; give {kind.__name__}")


def divides(divisor: int, value: int, *, rule: str, cure: str = "") -> None:
    """Raises InputError with the nearest multiples unless `divisor` divides `value`."""
    if value % divisor:
        below, above = value // divisor * divisor, -(-value // divisor) * divisor
        fitting = f"{below} or {above}" if below else f"{above}"
        cure = f", {cure}" if cure else ""
        raise InputError(f"{rule}; choose a multiple of {divisor}, such as {fitting}{cure}")


def is_divisor(value: int, whole: int, *, rule: str) -> None:
    """Raises InputError with all divisors of `whole` unless `value` is one of them."""
    if whole % value:
        raise InputError(f"{rule}; choose one of: {', '.join(map(str, divisors(whole)))}")


def divisors(whole: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(whole) + 1) if whole % one == 0]
    return sorted({*small, *(whole // one for one in small)})


def number(config: object, name: str) -> float:
    """Returns a field of `config`; raises InputError unless it is a finite number."""
    # bool is a subclass of int, and True is not meant as a number.
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise InputError(f"{name}={shown(value)} is not a finite number")
    return value


def at_least(config: object, minimum: float, *names: str) -> None:
    """Raises InputError unless these fields are finite numbers of `minimum` or more."""
    for name in names:
        if (value := number(config, name)) < minimum:
            raise InputError(f"{name}={shown(value)} is out of range; choose {minimum} or more")


def above_zero(config: object, *names: str) -> None:
    for name in names:
        if number(config, name) <= 0:
            raise InputError(f"{name}={shown(getattr(config, name))} must be above 0")


def whole(config: object, *names: str, least: int = 1, most: int = MOST) -> None:
    """Raises InputError unless these fields are whole numbers from `least` to `most`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}={shown(value)} is not a whole number of {least} or more")
        if value > most:
            raise InputError(f"{name}={shown(value)} is out of range; choose {most} or less")
