"""Memory by role as a picture for a pull request; matplotlib is imported only if one is wanted."""

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from nnx_pipeline.lab.attribution import ROLES, Attribution
from nnx_pipeline.lab.attribution_view import megabytes
from nnx_pipeline.lab.colours import role_colour
from nnx_pipeline.lab.compare import Outcome
from nnx_pipeline.lab.compile import Measurement
from nnx_pipeline.lab.report import GEMM_NAMES, compiler, differ_by_gemm
from nnx_pipeline.pipeline.picture import ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

_WIDTH = 10.0  # inches, at 150 points to the inch 1500 pixels
_LETTER = 0.075  # inches that a letter of 9 points takes on average
_BAR, _GAP = 0.62, 0.55  # height of a bar, and the space between experiments, in rows


class Bar(NamedTuple):
    """A bar of the chart; attribution None is a dash. group: the experiment that it belongs to."""

    group: str
    label: str
    attribution: Attribution | None


def outcomes_chart(
    title: str, outcomes: Sequence[Outcome], cublas: Sequence[Outcome] = ()
) -> "Figure":
    """Two bars per experiment, arm a above arm b, all on one scale.

    cublas: the same with cuBLASLt's matrix products; two more bars where they change something.
    """
    bars: list[Bar] = []
    for outcome, other in zip_longest(outcomes, cublas):
        bars += _bars(outcome, _heading(outcome), "")
        if other and differ_by_gemm(outcome, other):
            bars += _bars(other, _heading(outcome), f", {GEMM_NAMES['cublas']}")
    measured = [result for outcome in outcomes for result in (outcome.a, outcome.b) if result]
    return make_chart(title, bars, compiler(measured[0]) if measured else "")


def _bars(outcome: Outcome, heading: str, more: str) -> list[Bar]:
    experiment = outcome.experiment
    return [
        Bar(heading, f"{key}: {arm.label}{more}", result.attribution if result else None)
        for key, arm, result in (("a", experiment.a, outcome.a), ("b", experiment.b, outcome.b))
    ]


def program_chart(title: str, *measured: Measurement) -> "Figure":
    """One bar for each kind of matrix product that was measured."""
    bars = [
        Bar("", GEMM_NAMES[one.gemm] if one.gemm and len(measured) > 1 else "", one.attribution)
        for one in measured
    ]
    return make_chart(title, bars, compiler(measured[0]))


def _heading(outcome: Outcome) -> str:
    words = f"{outcome.verdict}, failed" if outcome.failed else outcome.verdict
    return f"{outcome.experiment.name}: {words}"


def make_chart(title: str, bars: Sequence[Bar], small_print: str) -> "Figure":
    """Horizontal bars in pieces by role, each with its total, and a legend below."""
    from matplotlib.figure import Figure

    sums = totals(bars)
    groups = list(dict.fromkeys(bar.group for bar in bars))
    head = textwrap.fill(title, int(_WIDTH / _LETTER / 1.15))
    rows = len(bars) + _GAP * len(groups)
    legend_rows = -(-len(sums) // 4)
    height = 0.34 * rows + 0.27 * legend_rows + 0.2 * head.count("\n") + 1.35
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.suptitle(head, x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = figure.add_subplot()
    places = _places(bars)
    largest = max((bar.attribution.heap_bytes for bar in bars if bar.attribution), default=0) / 1e6
    axes.set_xlim(0, largest * 1.1 or 1)
    axes.set_ylim(places[-1] + 0.5, places[0] - 0.5 - bool(bars[0].group) * _GAP)
    axes.set_yticks(places, [bar.label for bar in bars], fontsize=9)
    axes.set_xlabel("device memory at the peak, MB (10⁶ bytes) per device", fontsize=9)
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color="#e2e5ea", linewidth=0.8)
    axes.set_axisbelow(True)
    for place, bar in zip(places, bars, strict=True):
        _draw(axes, place, bar, list(sums))
    for group in groups if bars[0].group else ():
        first = next(p for p, bar in zip(places, bars, strict=True) if bar.group == group)
        axes.annotate(
            group,
            (0, first - 0.5),
            fontsize=9,
            fontweight="bold",
            va="center",
        )
    _legend(figure, sums, small_print)
    return figure


def totals(bars: Sequence[Bar]) -> dict[str, int]:
    """Bytes of each role that any bar has, all bars together, largest first."""
    found = [bar.attribution.by_role() for bar in bars if bar.attribution]
    sums = {role: sum(sizes.get(role, 0) for sizes in found) for role in ROLES}
    return dict(sorted(((r, s) for r, s in sums.items() if s), key=lambda pair: -pair[1]))


def _places(bars: Sequence[Bar]) -> list[float]:
    """Where the middle of each bar stands; a gap before each experiment but the first."""
    places, at = [], 0.0
    for index, bar in enumerate(bars):
        if index:
            at += 1 if bar.group == bars[index - 1].group else 1 + _GAP
        places.append(at)
    return places


def _draw(axes: "Axes", place: float, bar: Bar, order: Sequence[str]) -> None:
    if bar.attribution is None:
        axes.text(0, place, " –", va="center", fontsize=9)
        return
    sizes, at = bar.attribution.by_role(), 0.0
    whole = axes.get_xlim()[1]
    for role in order:
        size = sizes.get(role, 0) / 1e6
        colour = role_colour(role)
        axes.barh(place, size, _BAR, at, color=colour, edgecolor="white", linewidth=0.8)
        words = megabytes(sizes.get(role, 0))
        if size / whole > 0.011 * len(words):
            ink = ink_on(colour)
            axes.text(at + size / 2, place, words, ha="center", va="center", fontsize=8, color=ink)
        at += size
    total = f" {megabytes(bar.attribution.heap_bytes)}"
    axes.text(at, place, total, va="center", fontsize=9, fontweight="bold")


def _legend(figure: "Figure", sums: dict[str, int], small_print: str) -> "Text | None":
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=role_colour(role), label=role) for role in sums]
    if handles:
        figure.legend(
            handles=handles,
            loc="outside lower left",
            ncols=min(len(handles), 5),
            fontsize=9,
            frameon=False,
            title=f"compiler: {small_print}",
            title_fontsize=8,
            alignment="left",
        )
    return None
