"""Says with which settings of the compiler programs were compiled."""

from collections.abc import Sequence

from nnx_pipeline.lab.comparison.outcome import Outcome
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.settings import written

_NONE = "none of your own"


def settings_lines(measured: Sequence[Measurement]) -> list[str]:
    """A line with the settings that all programs have; none if they have none of their own.

    - `measured`: the programs. Where their settings differ, `arm_lines` says which arm has which.
    """
    texts = {written(one.xla) for one in measured}
    return [f"compiler settings: {text}" for text in texts if text and len(texts) == 1]


def left_out_lines(measured: Sequence[Measurement]) -> list[str]:
    """A line for each setting of a set that a compiler does not take."""
    return list(
        dict.fromkeys(
            f"left out, because the compiler for {one.platform} does not take it: {setting}"
            for one in measured
            for setting in one.xla_left_out
        )
    )


def arm_lines(outcome: Outcome) -> list[str]:
    """A line with the settings of each arm; none where both arms have the same."""
    measured = [(key, one) for key, (_, one) in zip("ab", outcome.arms, strict=True) if one]
    if all(one.xla == measured[0][1].xla for _, one in measured):
        return []
    return [f"{key}: compiler settings: {written(one.xla) or _NONE}" for key, one in measured]


def headed(title: str, outcomes: Sequence[Outcome]) -> str:
    """The title of a chart, with the settings of the arms below it.

    - `title`: what was compiled.
    - `outcomes`: the experiments of the chart.
    """
    measured = [one for outcome in outcomes for one in (outcome.a, outcome.b) if one]
    arms = dict.fromkeys(line for outcome in outcomes for line in arm_lines(outcome))
    return "\n".join([title, *arms, *settings_lines(measured)])
