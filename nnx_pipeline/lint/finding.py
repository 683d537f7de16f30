"""What a rule finds, and from which size on."""

from dataclasses import dataclass
from typing import Any, Literal

from nnx_pipeline.equations import Location
from nnx_pipeline.errors import at_least

Severity = Literal["warning", "advice"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes in bytes, of one device where that is known, below which nothing is reported.

    large: of an array that costs something. one_hot: of a one-hot array.
    Raises InputError when one is not a number of 0 or more.
    """

    large: float = 1e6
    one_hot: float = 256e6

    def __post_init__(self) -> None:
        at_least(self, 0, "large", "one_hot")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that costs memory without need.

    severity: `warning` for bytes that can be had back, `advice` for what usually is not meant.
    bytes: of the largest array concerned; per_device: of one device, or of all devices together
    where the sharding is not known before the compiler runs. times: how many equations of that line
    are concerned. what, cure: a sentence each.
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
