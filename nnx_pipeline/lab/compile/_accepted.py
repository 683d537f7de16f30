"""Compiles with a user's settings, and says which of them the compiler does not take."""

import re
from typing import NamedTuple

import jax

from nnx_pipeline.lab.compile._heap import TooLarge, compile_with_dump
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError

# What the compilers say of a setting before they do anything (JAX 0.10 to 0.12).
_UNKNOWN = re.compile(r"No such compile option: '(?P<name>.*?)'")
_REFUSED = (
    re.compile(r"While setting option (?P<name>\w+), '.*' is (?P<why>not a valid \w+ value)"),
    re.compile(r"Failed to parse '.*' into flag (?P<name>\w+): *(?P<why>.*)"),
)


class Accepted(NamedTuple):
    """A compiled program, and what its compiler made of the settings."""

    compiled: jax.stages.Compiled | TooLarge
    buffer_assignment: str | None  # see `compile_with_dump`
    applied: dict[str, bool | str]  # what the user set
    left_out: tuple[str, ...]  # settings of a set that the compiler does not take


def compile_with_settings(lowered: jax.stages.Lowered, platform: Platform) -> Accepted:
    """Compiles a program with the settings of a platform.

    A setting of a named set that this compiler does not take is left out, because sets are made for
    other versions and other generations of TPUs. Raises InputError for one that the user gave, and
    what the compiler raises for other reasons.
    """
    settings = {one.name: one for one in platform.xla}
    options, left_out = dict(platform.compiler_options), []
    while True:
        try:
            compiled, text = compile_with_dump(lowered, options)
            break
        except jax.errors.JaxRuntimeError as error:
            name, why = _refused(str(error), platform)
            setting = settings.get(name)
            if setting is None:
                raise
            if not setting.of_set:
                raise InputError(f"compiler setting {setting}: {why}") from error
            del options[name], settings[name]
            left_out.append(f"{setting} of {setting.of_set}")
    applied = {name: one.value for name, one in settings.items()}
    # The compiler names them in an order that differs from process to process.
    return Accepted(compiled, text, applied, tuple(sorted(left_out)))


def _refused(message: str, platform: Platform) -> tuple[str, str]:
    """The name of the setting that an error of a compiler is about, and what is wrong with it; the
    name is "" where the error is about something else."""
    if found := _UNKNOWN.search(message):
        why = f"the compiler for {platform} does not know it; correct the name or leave it out"
        return found["name"], why
    for pattern in _REFUSED:
        if found := pattern.search(message):
            said = found["why"].strip().rstrip(".") or "a value that it cannot read"
            return found["name"], f"the compiler for {platform} says: {said}; give another value"
    return "", ""
