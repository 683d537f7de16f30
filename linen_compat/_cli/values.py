"""The values of options of a command, apart from what does the work, which imports JAX."""

from dataclasses import dataclass

# How far given logits may be off, as parts of the largest: by default, and those of bfloat16.
WITHIN, BFLOAT16 = 1e-3, 0.03


@dataclass(frozen=True)
class Checks:
    """The values of the options of `linen-compat check` that say what is checked."""

    read: bool
    numerics: bool
    allow_nan: bool
    adapter: str | None
    logits: str | None
    within: float | None
