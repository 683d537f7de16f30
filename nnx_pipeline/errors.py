"""The exception raised for bad input, suggestions for unknown names, and checks of values."""

import difflib
import math
import os
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path


class InputError(ValueError):
    """Something that the user gave cannot be used.

    The message states the rule, the value and what to change. The command line prints it as one
    line and exits with code 2.
    """


def described(error: BaseException, most: int = 300) -> str:
    """Type and first line of an exception, and the line of the user's source that it came from.

    - `error`: with its traceback. The line is the innermost one outside of Python, installed
      packages and this project, such as `(step.py:12, in loss)`; it is left out if there is none.
    - `most`: characters of the first line.
    """
    first = (str(error).strip().splitlines() or [""])[0][:most]
    paths, project = sysconfig.get_paths(), Path(__file__).parents[1]
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [str(project / name) for name in ("nnx_pipeline", "linen_compat")]
    others = ("<", *(f"{folder}{os.sep}" for folder in folders))  # such as `<frozen importlib>`
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    if not own:
        return f"{type(error).__name__}: {first}"
    place = f"{os.path.relpath(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name}"
    return f"{type(error).__name__}: {first} ({place})"


class Note(UserWarning):
    """Something about what the user gave that stops nothing; commands print it as one line."""


def note(message: str) -> None:
    """Warns of something that the user should know, and that stops nothing."""
    warnings.warn(message, Note, stacklevel=2)


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name: the nearest known one, or the list of all known ones.

    >>> nearest("mixtral-smal", ["tiny", "mixtral-small"])
    "did you mean 'mixtral-small'?"
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    return f"did you mean {close[0]!r}?" if close else f"choose one of: {', '.join(known)}"


def kind_of(value: object) -> str:
    """What a value is, in a message: dtype and shape of an array, of anything else its type.

    >>> kind_of([1, 2])
    'list'
    """
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else f"{dtype}{[*getattr(value, 'shape', ())]}"


def counted(number: int | None, what: str) -> str:
    """A number of things: `1 repeat`, `2 stages`, `2 branches`.

    - `number`: how many; None where it is not known.
    - `what`: one of them.
    """
    ending = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{'' if number == 1 else ending}"


def one_of(field: str, value: object, choices: Iterable[object]) -> None:
    """Raises InputError unless `value` is among `choices`.

    - `field`: the name of the value in the error message.
    - `value`: what is checked.
    - `choices`: the values that are allowed; a value of another type is not, even if it is equal.
    """
    choices = tuple(choices)
    # The types are compared too, because True == 1 and 1.0 == 1.
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        cure = nearest(str(value), map(str, choices))
        if len(choices) == 1:
            cure = f"so far {choices[0]!r} is the only choice"
        raise InputError(f"{field}={value!r} is not known; {cure}")


def of_type(name: str, value: object, kind: type) -> None:
    """Raises InputError unless a value is of a type.

    - `name`: what to call the value in the error message.
    """
    if not isinstance(value, kind):
        raise InputError(f"{name} is of type {type(value).__name__}; give {kind.__name__}")


def divides(divisor: int, value: int, *, rule: str, cure: str = "") -> None:
    """Raises InputError unless `divisor` divides `value`.

    - `divisor`: a whole number of 1 or more.
    - `value`: the number that it must divide.
    - `rule`: the text that says what does not divide; the error adds the nearest fitting values.
    - `cure`: another cure, which the error adds after those.
    """
    if value % divisor:
        below, above = value // divisor * divisor, -(-value // divisor) * divisor
        fitting = f"{below} or {above}" if below else f"{above}"
        cure = f", {cure}" if cure else ""
        raise InputError(f"{rule}; choose a multiple of {divisor}, such as {fitting}{cure}")


def is_divisor(value: int, whole: int, *, rule: str) -> None:
    """Raises InputError unless `value` divides `whole`.

    - `value`: a whole number of 1 or more.
    - `whole`: the number that it must divide.
    - `rule`: the text that says what does not divide; the error adds all values that do.
    """
    if whole % value:
        fitting = ", ".join(str(one) for one in range(1, whole + 1) if whole % one == 0)
        raise InputError(f"{rule}; choose one of: {fitting}")


def number(config: object, name: str) -> float:
    """The value of a field; raises InputError unless it is a finite number.

    - `config`: the object that has the field.
    - `name`: the name of the field, which the message repeats.
    """
    # bool is a subclass of int, and True is not meant as a number.
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name}={value!r} is not a finite number")
    return value


def at_least(config: object, minimum: float, *names: str) -> None:
    """Raises InputError unless some fields are finite numbers, and not below a minimum.

    - `config`: the object that has the fields.
    - `minimum`: the smallest number that is allowed.
    - `names`: the names of the fields.
    """
    for name in names:
        if number(config, name) < minimum:
            value = getattr(config, name)
            raise InputError(f"{name}={value!r} is out of range; choose {minimum} or more")


def above_zero(config: object, *names: str) -> None:
    """Raises InputError unless all fields `names` of `config` are numbers above 0."""
    for name in names:
        if number(config, name) <= 0:
            raise InputError(f"{name}={getattr(config, name)!r} must be above 0")


def whole(config: object, *names: str) -> None:
    """Raises InputError unless all fields `names` of `config` are whole numbers of 1 or more."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r} is not a whole number of 1 or more")
