"""The option `--fail-above`: by how much arm b may exceed arm a. Imports no JAX."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from nnx_pipeline.lab.errors import InputError, nearest

if TYPE_CHECKING:
    from nnx_pipeline.lab.comparison.outcome import Outcome
    from nnx_pipeline.lab.compile.measure import Measurement

BYTES = ("account", "heap", "temp", "peak")
STEP = "step"


class Limit(NamedTuple):
    """The share of arm a's figure by which arm b's may be larger."""

    figure: str
    share: float

    def broken_by(self, outcome: Outcome) -> str:
        """How an outcome exceeds the limit, "" if it does not; what is not known exceeds it."""
        name = outcome.question.name
        what = "the estimated step" if self.figure == STEP else f"the {self.figure}"
        figures = [_figure(arm, self.figure) for arm in (outcome.a, outcome.b)]
        if self.figure == STEP and not _are_alike(outcome):
            figures = [None, None]
        before, after = figures
        if before is None or after is None:
            return f"{name}: {what} is not known, and --fail-above limits it to {self._shown}"
        if after <= before * (1 + self.share):
            return ""
        unit, size = ("ms", 1e-3) if self.figure == STEP else ("MB", 1e6)
        share = f"{after / before - 1:+.2%}" if before else "from nothing"
        return (
            f"{name}: {what} rises from {before / size:,.3f} to {after / size:,.3f} {unit} "
            f"({share}), more than --fail-above {self._shown}"
        )

    @property
    def _shown(self) -> str:
        return f"{self.figure}={100 * self.share:g}%"


def parse_limit(text: str) -> Limit:
    """`5%` of the account, or `step=10%`; raises InputError for anything else."""
    found = re.fullmatch(r"(?:(\w+)=)?([\d.]+)\s*%", text.strip())
    figure = (found and found[1]) or "account"
    try:
        share = float(found[2]) / 100 if found else -1.0
    except ValueError:
        share = -1.0
    if not (math.isfinite(share) and share >= 0):
        raise InputError(f"--fail-above {text} is no share; write one such as 5% or step=10%")
    known = (*BYTES, STEP)
    if figure not in known:
        raise InputError(f"--fail-above {text}: {figure} is no figure; {nearest(figure, known)}")
    return Limit(figure, share)


def _figure(arm: Measurement | None, figure: str) -> float | None:
    if arm is None:
        return None
    if figure == STEP:
        return arm.time.step_seconds if arm.time else None
    size: int | None = getattr(arm.memory, f"{figure}_bytes")
    return size


def _are_alike(outcome: Outcome) -> bool:
    """A lower bound beside an estimate says nothing of which is longer."""
    times = [arm.time if arm else None for arm in (outcome.a, outcome.b)]
    return len({time.is_lower_bound if time else None for time in times}) == 1
