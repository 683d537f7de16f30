"""The values of options of a command, apart from what does the work, which imports JAX."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Checks:
    """The values of the options of `linen-compat check` that say what is checked."""

    read: bool
    numerics: bool
    allow_nan: bool
    adapter: str | None
    logits: str | None
