"""What changes of a function gained in memory and cost in time, each compiled."""

from dataclasses import dataclass, field
from typing import Any

from nnx_pipeline.lab.comparison.changes import Change
from nnx_pipeline.lab.compile.measure import Measurement


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A change with the program that it made, None where it did not compile, as `error` says."""

    change: Change
    result: Measurement | None = None
    error: str = ""


@dataclass
class Trials:
    """A program as it is, and what became of it by each change.

    - `left_out`: a sentence for each kind of change that was not tried, which says why.
    - `promised`: what a kind of change was to gain at least, by the places of the buffers of the
      program as it is.
    - `waiting`: how many changes are still to be compiled.
    """

    base: Measurement
    tried: list[Trial] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    promised: dict[str, int] = field(default_factory=dict)
    waiting: int = 0

    def gain(self, trial: Trial) -> int | None:
        """By how much the account gets smaller; None for a change that did not compile."""
        return self.base.needed_bytes - trial.result.needed_bytes if trial.result else None

    def promise(self, trial: Trial) -> int | None:
        """What the change was to gain at least; None where nothing is promised. Of loops that is
        for a checkpoint in all of them that keeps nothing."""
        change = trial.change
        if len(change.kinds) > 1 or change.keeps is not None:
            return None
        most = max((len(one.change.loops) for one in self.tried), default=0)
        return self.promised.get(change.kinds[0]) if len(change.loops) in (0, most) else None

    def best(self) -> list[Change]:
        """The change of each kind with the largest gain, of those that gain and assume nothing."""
        found: dict[object, Change] = {}
        for trial in self.by_gain():
            if (self.gain(trial) or 0) > 0 and not trial.change.assumes:
                found.setdefault(trial.change.kinds, trial.change)
        return [*found.values()]

    def by_gain(self) -> list[Trial]:
        """Single changes, the largest gain first, of equal gains the shorter step; then changes
        together."""

        def order(trial: Trial) -> tuple[object, ...]:
            gain, result = self.gain(trial), trial.result
            step = result.time.step_seconds if result and result.time else None
            return len(trial.change.kinds) > 1, gain is None, -(gain or 0), step or 0.0

        return sorted(self.tried, key=order)

    def to_json(self) -> dict[str, Any]:
        """What `memory --try --json` writes under `tried` and `left_out`."""
        rows = [
            {
                "name": trial.change.name,
                "kinds": list(trial.change.kinds),
                "cure": trial.change.cure,
                "assumes": trial.change.assumes or None,
                "gain_bytes": self.gain(trial),
                "promised_bytes": self.promise(trial),
                "is_same_program": self.is_same(trial),
                "error": trial.error or None,
                "result": trial.result and trial.result.to_json(),
            }
            for trial in self.by_gain()
        ]
        return {"tried": rows, "left_out": self.left_out}

    def is_same(self, trial: Trial) -> bool:
        """Whether the change made no other program."""
        result = trial.result
        return result is not None and result.fingerprint == self.base.fingerprint
