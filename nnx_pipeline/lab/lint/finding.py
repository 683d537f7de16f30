"""The findings of the rules, and the sizes from which they are reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nnx_pipeline.lab.errors import at_least

if TYPE_CHECKING:
    from nnx_pipeline.lab._tracing.jaxpr import Location

Severity = Literal["warning", "advice"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes below which arrays are not reported, in bytes per device where the sharding is known.

    One-hot arrays have a limit of their own. Raises InputError when one is no number of 0 or more.
    """

    large: float = 1e6
    one_hot: float = 256e6

    def __post_init__(self) -> None:
        at_least(self, 0, "large", "one_hot")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that costs memory without need.

    - `rule`: the name of the rule, such as `hidden-upcast`.
    - `severity`: `warning` for memory that can be saved, `advice` for code that usually does not do
      what was intended.
    - `location`: the line of source.
    - `bytes`: the size of the largest array concerned.
    - `per_device`: whether `bytes` are those of one device; otherwise they are those of all devices
      together, because the sharding is not known before the compiler runs.
    - `what`, `cure`: one sentence that says what was found, and one that says what to do about it.
    - `times`: how many findings of the rule at that line it stands for.
    """

    rule: str
    severity: Severity
    location: Location
    bytes: int
    per_device: bool
    what: str
    cure: str
    times: int = 1

    def to_json(self) -> dict[str, Any]:
        """One entry of `lint --json`."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "file": self.location.file or None,
            "line": self.location.line or None,
            "function": self.location.function or None,
            "caller": self.location.caller or None,
            "bytes": self.bytes,
            "bytes_of": "one device" if self.per_device else "all devices",
            "times": self.times,
            "what": self.what,
            "cure": self.cure,
        }
