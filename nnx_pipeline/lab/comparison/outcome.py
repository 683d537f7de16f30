"""Defines the comparison of two programs: the question, their figures and the verdict."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from nnx_pipeline.lab.attribution._result import BufferDifference, difference
from nnx_pipeline.lab.comparison._numerics import Numerics
from nnx_pipeline.lab.compile.measure import Measurement

# Figures of a measurement that a verdict may be about.
Quantity = Literal["temp", "heap", "account", "trace_host"]
Kind = Literal["step", "init", "trace"]

NOT_APPLICABLE = "not applicable"
NO_EFFECT = 0.01  # a relative difference below this is no effect
# What people read in the place of a verdict where nobody claimed that arm b needs less.
UNCLAIMED = {"holds": "less memory", "no effect": "same memory", "opposite": "more memory"}
NAMES: dict[Quantity, str] = {
    "temp": "temp",
    "heap": "the heap",
    "account": "the account",
    "trace_host": "host memory during tracing",
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question whether the second of two programs, the arms, needs less memory than the first.

    - `claim`: where it is claimed that the second arm needs less, such as `S3.2`.
    - `difference`: how the arms differ, in one sentence.
    - `kind`: what is measured: a training step (`step`), the creation of parameters (`init`), or
      what the host holds while a step is traced (`trace`).
    - `judged_by`: the figure that should be smaller for the second arm.
    - `same_program`: why both arms are the same program even before they are compiled, or "".
    """

    name: str
    claim: str
    difference: str
    labels: tuple[str, str]
    kind: Kind = "step"
    judged_by: Quantity = "temp"
    same_program: str = ""

    def in_words(self, verdict: str) -> str:
        """A verdict as people read it: `opposite` is `more memory` where nothing was claimed."""
        return verdict if self.claim else UNCLAIMED.get(verdict, verdict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The answer to a question on one platform.

    - `verdict`: whether the second arm needs less; see `verdict_by`.
    - `note`: what else there is to say, and the error of an arm that did not compile.
    - `failed`: whether an arm did not compile, the numbers could not be compared, or the arms
      compute different numbers.
    - `a`, `b`: the measurement of each arm, None where it did not compile.
    - `numerics`: how far apart the arms' numbers are, None where they were not compared.
    """

    question: Question
    verdict: str
    note: str
    failed: bool = False
    a: Measurement | None = None
    b: Measurement | None = None
    numerics: Numerics | None = None

    @property
    def arms(self) -> tuple[tuple[str, Measurement | None], tuple[str, Measurement | None]]:
        """The label and the measurement of each arm."""
        one, other = self.question.labels
        return (one, self.a), (other, self.b)

    @property
    def same_program(self) -> bool | None:
        """Whether both arms compile to the same program; None where one did not compile."""
        return self.a.fingerprint == self.b.fingerprint if self.a and self.b else None

    @property
    def buffers(self) -> tuple[BufferDifference, ...] | None:
        """How the heap of b differs from the heap of a; None where one is not known."""
        one, other = (result.attribution if result else None for result in (self.a, self.b))
        return difference(one, other) if one and other else None

    def bytes_of(self, quantity: Quantity) -> tuple[int | None, int | None]:
        """One figure of both arms, in bytes; None for an arm whose figure is not known."""
        before, after = (arm.bytes_of(quantity) if arm else None for arm in (self.a, self.b))
        return before, after

    def ratio(self, quantity: Quantity) -> float | None:
        """Arm b's figure divided by arm a's; None where one is not known, or arm a's is 0."""
        before, after = self.bytes_of(quantity)
        return after / before if before and after is not None else None

    def verdict_by(self, quantity: Quantity) -> str:
        """The verdict by one figure: `holds` where arm b's is smaller, `opposite` if larger.

        It is `no effect` where they are equal or differ by less than NO_EFFECT of arm a's, and
        `not applicable` where one is not known.
        """
        before, after = self.bytes_of(quantity)
        if before is None or after is None:
            return NOT_APPLICABLE
        if abs(after - before) < NO_EFFECT * before or after == before:
            return "no effect"
        return "holds" if after < before else "opposite"

    def to_json(self) -> dict[str, Any]:
        """One entry of `compare --json`."""
        buffers = self.buffers
        return {
            "name": self.question.name,
            "claim": self.question.claim,
            "difference": self.question.difference,
            "kind": self.question.kind,
            "same_program": self.same_program,
            "arms": {
                key: {
                    "label": label,
                    **({"measured": result.measured, **result.to_json()} if result else {}),
                }
                for key, (label, result) in zip("ab", self.arms, strict=True)
            },
            **self._changes("temp"),
            **self._changes("account"),
            "judged_by": self.question.judged_by,
            "numerics": dataclasses.asdict(self.numerics) if self.numerics else None,
            "verdict": self.verdict,
            "note": self.note,
            "buffers": None if buffers is None else [dataclasses.asdict(row) for row in buffers],
        }

    def _changes(self, quantity: Quantity) -> dict[str, float | None]:
        before, after = self.bytes_of(quantity)
        delta = None if before is None or after is None else after - before
        return {f"delta_{quantity}_bytes": delta, f"ratio_{quantity}": self.ratio(quantity)}


def compare_measurements(question: Question, a: Measurement | str, b: Measurement | str) -> Outcome:
    """The outcome by figures alone; an arm that did not compile is its error as text."""
    pairs = zip(question.labels, (a, b), strict=True)
    notes = [f"{label} did not compile: {arm}" for label, arm in pairs if isinstance(arm, str)]
    failed = bool(notes)
    one, other = (None if isinstance(arm, str) else arm for arm in (a, b))
    outcome = Outcome(question=question, a=one, b=other, verdict="", note="", failed=failed)
    judged_by = question.judged_by
    verdict = outcome.verdict_by(judged_by)
    if not failed:
        notes += _why_no_effect(outcome, verdict)
        if verdict == NOT_APPLICABLE:
            notes.append(f"{NAMES[judged_by]} is not known")
        if judged_by == "trace_host":
            sizes = ("–" if n is None else f"{n / 1e6:.1f} MB" for n in outcome.bytes_of(judged_by))
            notes.append(f"the verdict is about {NAMES[judged_by]}: {' and '.join(sizes)}")
        else:
            notes += _other_verdicts(outcome, verdict)
    notes += _notes_of_arms(outcome)
    return dataclasses.replace(outcome, verdict=verdict, note="; ".join(notes))


def _notes_of_arms(outcome: Outcome) -> list[str]:
    labels: dict[str, list[str]] = {}
    for label, result in outcome.arms:
        for note in result.notes if result else ():
            labels.setdefault(note, []).append(label)
    return [f"{' and '.join(those)}: {note}" for note, those in labels.items()]


def _other_verdicts(outcome: Outcome, verdict: str) -> list[str]:
    """The verdicts by temp, heap and account, where they differ from the verdict.

    The account has all arguments: that it changes by less than 1 % says little and is left out.
    """
    others: tuple[Quantity, ...] = ("temp", "heap")
    if outcome.verdict_by("account") != "no effect":
        others += ("account",)
    said: dict[str, list[str]] = {}
    for quantity in others:
        said.setdefault(outcome.verdict_by(quantity), []).append(NAMES[quantity])
    return [
        f"by {' and '.join(names)}: {outcome.question.in_words(other)}"
        for other, names in said.items()
        if other not in (verdict, NOT_APPLICABLE)
    ]


def _why_no_effect(outcome: Outcome, verdict: str) -> list[str]:
    question = outcome.question
    if outcome.same_program:
        why = f", as {question.same_program}" if question.same_program else ""
        return [f"both arms compile to the same program{why}"]
    if verdict != "no effect" or question.kind == "trace":
        return []
    before, after = outcome.bytes_of(question.judged_by)
    if before == after:
        return [f"two programs with the same {question.judged_by}"]
    return [f"two programs whose {question.judged_by} is less than 1 % apart"]
