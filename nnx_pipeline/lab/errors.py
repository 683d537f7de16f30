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
    r"""A text that can be shown: characters on which a terminal acts are written as escapes.

    - `text`: such as the name of a tensor or a file, which others may have chosen.
    - `keep`: characters that stay as they are, such as a newline.

    >>> printable("norm\x1b[31m")
    'norm\\x1b[31m'
    """
    return _ACTING.sub(lambda at: at[0] if at[0] in keep else repr(at[0])[1:-1], text)


MOST = 2**31 - 1  # of anything that is counted: compilers and indices have 32 bits
LARGEST = sys.float_info.max
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother = 4, 200, 200


class InputError(ValueError):
    """Something that the user gave cannot be used.

    The message states the rule, the value and what to change. The command line prints it as one
    line and exits with code 2.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


def described(error: BaseException, most: int = 300) -> str:
    """Type and first line of an exception, and the line of the user's source that it came from.

    - `error`: with its traceback. The line is the innermost one outside of Python, installed
      packages and this project, such as `(step.py:12, in loss)`; it is left out if there is none.
    - `most`: characters of the first line.
    """
    first = (str(error).strip().splitlines() or [""])[0][:most]
    paths, project = sysconfig.get_paths(), Path(__file__).parents[2]
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


def optional(module: str, extra: str, user: str) -> ModuleType:
    """The module of a package that only an extra of this one brings, imported where it is used.

    - `module`: its dotted name, such as `matplotlib.figure`.
    - `extra`: the extra, which the error names.
    - `user`: what needs the package, as the error begins.

    Raises InputError where it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(f"{user} needs {package} ({error}); {install(extra)}") from error


def install(extra: str) -> str:
    """The command that brings an extra of this package."""
    return f"pip install 'nnx-pipeline[{extra}]'"


def shown(value: object) -> str:
    """A value in a message as Python writes it, shortened if it is long, deep or huge.

    >>> shown([[["a"]]])
    "[[['a']]]"
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write some of them
    return _BRIEF.repr(value)


def once(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON, for `json.loads(…, object_pairs_hook=once)`.

    Raises ValueError where a name stands in it twice: JSON alone would take the last value.

    >>> once([("a", 1), ("b", 2)])
    {'a': 1, 'b': 2}
    """
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands there twice; keep one of the two")
        found[name] = value
    return found


def unparsed(error: Exception, cure: str | None = None) -> str:
    """Why a text of YAML or JSON cannot be read, with the cure, in one line.

    - `error`: which the parser raised.
    - `cure`: takes the place of the cure that the error has.
    """
    if isinstance(error, RecursionError):
        reason, own = "its values are nested too deeply", "give something flatter"
    else:
        # Python's own cure for a number of thousands of digits is a setting of the interpreter.
        said = " ".join(str(error).split())[:200].partition("; use sys.")[0]
        reason, _, own = said.partition("; ")
    return f"{reason}; {cure or own or 'correct the file'}"


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


def do_not_split(number: int, what: str) -> str:
    """`1 layer does not split` or `2 layers do not split`; both arguments are as of `counted`."""
    return f"{counted(number, what)} {'does' if number == 1 else 'do'} not split"


def one_of(field: str, value: object, choices: Iterable[object]) -> None:
    """Raises InputError unless `value` is among `choices`.

    - `field`: the name of the value in the error message.
    - `value`: what is checked.
    - `choices`: the values that are allowed; a value of another type is not, even if it is equal.
    """
    choices = tuple(choices)
    # The types are compared too, because True == 1 and 1.0 == 1.
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        named = value if isinstance(value, str) else shown(value)
        cure = nearest(named, map(str, choices))
        if len(choices) == 1:
            cure = f"so far {choices[0]!r} is the only choice"
        raise InputError(f"{field}={shown(value)} is not known; {cure}")


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
        small = [one for one in range(1, math.isqrt(whole) + 1) if whole % one == 0]
        fitting = ", ".join(map(str, sorted({*small, *(whole // one for one in small)})))
        raise InputError(f"{rule}; choose one of: {fitting}")


def number(config: object, name: str) -> float:
    """The value of a field; raises InputError unless it is a finite number.

    - `config`: the object that has the field.
    - `name`: the name of the field, which the message repeats.
    """
    # bool is a subclass of int, and True is not meant as a number.
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise InputError(f"{name}={shown(value)} is not a finite number")
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
            raise InputError(f"{name}={shown(value)} is out of range; choose {minimum} or more")


def above_zero(config: object, *names: str) -> None:
    """Raises InputError unless all fields `names` of `config` are numbers above 0."""
    for name in names:
        if number(config, name) <= 0:
            raise InputError(f"{name}={shown(getattr(config, name))} must be above 0")


def whole(config: object, *names: str, most: int = MOST) -> None:
    """Raises InputError unless fields are whole numbers of 1 or more.

    - `config`: the object that has the fields.
    - `names`: the names of the fields.
    - `most`: the largest number that is allowed.
    """
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={shown(value)} is not a whole number of 1 or more")
        if value > most:
            raise InputError(f"{name}={shown(value)} is out of range; choose {most} or less")
