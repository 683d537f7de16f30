"""Says in words what a comparison has shown."""

from collections.abc import Callable, Sequence

from nnx_pipeline.lab._report.view import figures
from nnx_pipeline.lab._report.view.remarks import Remark
from nnx_pipeline.lab.comparison.outcome import NO_EFFECT, Outcome
from nnx_pipeline.lab.compile.measure import Measurement

Figure = Callable[[Measurement], float | None]
# Of a step, by the sign before it.
_NAMES = {
    "": "the estimated step",
    "≳ ": "the estimated step (≳)",
    "≥ ": "the lower bound of the step",
}
_BY = {"": "", "≳ ": " by figures with ≳", "≥ ": " by lower bounds"}


def closing_sentences(outcomes: Sequence[Outcome]) -> list[Remark]:
    """What each comparison means for account and step, and which has the largest effects."""
    known = [one for one in outcomes if one.a and one.b and one.question.kind == "step"]
    texts = [Remark(_sentence(one), "strong") for one in known]
    if len(known) < 2:
        return texts
    parts: list[str] = []
    for figure, show, what, per in (
        (_needed, _as_memory, "memory", "per device"),
        (_step, _as_time, "time", "per step"),
    ):
        saved = {index: _saved(one, figure) for index, one in enumerate(known)}
        best = max(saved, key=lambda index: saved[index])
        if saved[best] > 0 and not _is_small(known[best], figure):
            name = known[best].question.name
            arm = known[best].b
            if figure is _step and arm:
                per += _BY[figures.sign(arm.time)]
            who = "" if parts and parts[-1].startswith(f"{name} ") else f"{name} saves "
            parts.append(f"{who}most {what}, {show(saved[best])} {per}")
    summary = f"Of these {len(known)} changes " + ", and ".join(parts) + "."
    return [*texts, Remark(summary, "strong")] if parts else texts


def _sentence(outcome: Outcome) -> str:
    a, b = outcome.question.labels
    return f"{outcome.question.name}: from {a} to {b} {changes_of(outcome)}."


def changes_of(outcome: Outcome) -> str:
    """Such as `the account falls from 534.2 to 431.6 MB (−19.2%)`, and what becomes of the step."""
    parts = [_change("the account", outcome, _needed, _as_memory)]
    if outcome.a and outcome.b and outcome.a.time and outcome.b.time:
        parts.append(_change_of_step(outcome))
    return " and ".join(parts)


def _change_of_step(outcome: Outcome) -> str:
    times = [result.time if result else None for result in (outcome.a, outcome.b)]
    signs = [figures.sign(time) for time in times]
    before, after = _pair(outcome, _step)
    if signs[0] == signs[1] or before is None or after is None:
        return _change(_NAMES[signs[1]], outcome, _step, _as_time)
    texts = [f"{sign}{_as_time(s)}" for s, sign in zip((before, after), signs, strict=True)]
    longer, shorter = (before, after) if signs[0] else (after, before)
    is_either = all(signs) or longer <= shorter
    if is_either or any(time and time.is_open for time in times):
        return f"the estimated step is {' and '.join(texts)}, which leaves open which is shorter"
    part = figures.relative_change(before, after) if before else "from nothing"
    verb = "falls" if signs[0] else "rises"
    return f"the estimated step {verb} from {' to '.join(texts)} ({part} or more)"


def _change(name: str, outcome: Outcome, figure: Figure, show: Callable[..., str]) -> str:
    """What became of a figure; two values that would read the same are written out."""
    before, after = _pair(outcome, figure)
    if before is None or after is None:
        return f"{name} is not known"
    if before == after:
        return f"{name} stays at {show(after)}"
    part = figures.relative_change(before, after) if before else "from nothing"
    verb = "falls" if after < before else "rises"
    if _is_small(outcome, figure):
        verb = "hardly changes,"
    exactly = show(before) == show(after)
    texts = (show(value, exactly=exactly) for value in (before, after))
    return f"{name} {verb} from {' to '.join(texts)} ({part})"


def _saved(outcome: Outcome, figure: Figure) -> float:
    """What b saves of a figure; 0 where only one of the two times counts a part at its least."""
    one, other = (result.time if result else None for result in (outcome.a, outcome.b))
    if figure is _step and not figures.are_alike(one, other):
        return 0.0
    before, after = _pair(outcome, figure)
    return 0.0 if before is None or after is None else before - after


def _is_small(outcome: Outcome, figure: Figure) -> bool:
    before, after = _pair(outcome, figure)
    return before is None or after is None or abs(after - before) < NO_EFFECT * before


def _pair(outcome: Outcome, figure: Figure) -> tuple[float | None, float | None]:
    one, other = (figure(result) if result else None for result in (outcome.a, outcome.b))
    return one, other


def _needed(result: Measurement) -> float | None:
    return result.memory.account_bytes


def _step(result: Measurement) -> float | None:
    return result.time.step_seconds if result.time else None


def _as_memory(size: float, *, exactly: bool = False) -> str:
    return f"{size:,.0f} bytes" if exactly else f"{figures.megabytes(size)} MB"


def _as_time(seconds: float, *, exactly: bool = False) -> str:
    return f"{1e6 * seconds:,.3f} µs" if exactly else f"{figures.milliseconds(seconds)} ms"
