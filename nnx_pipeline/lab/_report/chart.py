"""What memory holds, as a bar chart for a pull request, for instance."""

import textwrap
from collections.abc import Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from nnx_pipeline.lab._files import ink_on
from nnx_pipeline.lab._report.view import figures
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab._report.view.remarks import headed, settings_lines
from nnx_pipeline.lab.comparison.outcome import NAMES, NOT_APPLICABLE, Outcome, Quantity
from nnx_pipeline.lab.compile.measure import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 10.0  # inches; 1500 pixels at 150 dots per inch
_LETTER = 0.075  # inches; average width of a letter of 9 points
_BAR, _GAP = 0.62, 0.55  # height of a bar and space between experiments, in rows
_HEAP = "heap of device memory at its peak"
_ACCOUNT = "device memory of the account: arguments, outputs, constants and heap"


class Bar(NamedTuple):
    """A bar with the heading of its experiment; None for `sizes`, bytes by role, draws a dash."""

    group: str
    label: str
    sizes: dict[str, int] | None


def outcomes_chart(
    title: str, outcomes: Sequence[Outcome], cublas: Sequence[Outcome] = ()
) -> "Figure":
    """Two bars per experiment, and two more where a library's matrix products change something.

    They show the heap, or the account where every verdict is about that.
    """
    judged = {outcome.question.judged_by for outcome in outcomes}
    drawn: Quantity = "account" if judged == {"account"} else "heap"
    bars: list[Bar] = []
    for outcome, other in zip_longest(outcomes, cublas):
        bars += _bars(outcome, group_heading(outcome, drawn), "", drawn)
        if other and figures.differ_by_gemm(outcome, other):
            by = f", {figures.library_of(other)}"
            bars += _bars(other, group_heading(other, drawn, by), by, drawn)
    measured = [result for outcome in outcomes for result in (outcome.a, outcome.b) if result]
    what = _ACCOUNT if drawn == "account" else _HEAP
    small_print = "; ".join(dict.fromkeys(map(figures.compiler, measured)))
    return make_chart(headed(title, outcomes), bars, small_print, what)


def _bars(outcome: Outcome, heading: str, more: str, drawn: Quantity) -> list[Bar]:
    return [
        Bar(heading, f"{key}: {label}{more}", pieces(result, drawn) if result else None)
        for key, (label, result) in zip("ab", outcome.arms, strict=True)
    ]


def pieces(result: Measurement, drawn: Quantity) -> dict[str, int] | None:
    """Bytes by role of what a bar shows; None where the compiler wrote no buffer assignment."""
    if result.attribution is None:
        return None
    heap = result.attribution.by_role()
    if drawn == "heap":
        return heap
    account = result.account
    outside = {
        "kept argument": account.kept_argument_bytes,
        "donated argument": account.donated_argument_bytes,
        "output": account.output_bytes,
        "constant": account.constant_bytes or 0,
    }
    return {**outside, **heap}


def program_chart(title: str, *measured: Measurement) -> "Figure":
    bars = [
        Bar("", figures.products_by(one) if len(measured) > 1 else "", pieces(one, "heap"))
        for one in measured
    ]
    head = "\n".join([title, *settings_lines(measured)])
    return make_chart(head, bars, figures.compiler(measured[0]), _HEAP)


def group_heading(outcome: Outcome, drawn: Quantity, more: str = "") -> str:
    """The verdict with its figures, and what the bars say if they show other ones."""
    judged = outcome.question.judged_by
    words = f"{outcome.question.name}{more}: {figures.verdict_words(outcome)}"
    if outcome.verdict == NOT_APPLICABLE:
        return words
    words += f", {' → '.join(map(megabytes, outcome.bytes_of(judged)))} MB"
    if drawn == judged:
        return words
    by_bars = outcome.verdict_by(drawn)
    known = (
        "which is not known" if by_bars == NOT_APPLICABLE else outcome.question.in_words(by_bars)
    )
    return f"{words}; the bars are {NAMES[drawn]}: {known}"


def make_chart(title: str, bars: Sequence[Bar], small_print: str, what: str) -> "Figure":
    from matplotlib.figure import Figure

    sums = figures.role_totals([bar.sizes or {} for bar in bars])
    groups = list(dict.fromkeys(bar.group for bar in bars))
    letters = int(_WIDTH / _LETTER / 1.25)
    head = "\n".join(textwrap.fill(line, letters) for line in title.splitlines())
    rows = len(bars) + _GAP * len(groups)
    legend_rows = -(-len(sums) // 4)
    height = 0.34 * rows + 0.27 * legend_rows + 0.2 * head.count("\n") + 1.35
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.suptitle(head, x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = figure.add_subplot()
    steps = [1 if one.group == other.group else 1 + _GAP for one, other in pairwise(bars)]
    places = list(accumulate(steps, initial=0.0))
    largest = max((sum(bar.sizes.values()) for bar in bars if bar.sizes), default=0) / 1e6
    axes.set_xlim(0, largest * 1.1 or 1)
    # From the last bar up to the first, so that the first one is at the top.
    axes.set_ylim(places[-1] + 0.5, places[0] - 0.5 - bool(bars[0].group) * _GAP)
    axes.set_yticks(places, [bar.label for bar in bars], fontsize=9)
    axes.set_xlabel(f"{what}, MB (10⁶ bytes) per device", fontsize=9)
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color="#e2e5ea", linewidth=0.8)
    axes.set_axisbelow(True)
    for place, bar in zip(places, bars, strict=True):
        _draw(axes, place, bar, list(sums))
    for group in groups if bars[0].group else ():
        first = next(p for p, bar in zip(places, bars, strict=True) if bar.group == group)
        axes.annotate(group, (0, first - 0.5), fontsize=9, fontweight="bold", va="center")
    _legend(figure, sums, small_print)
    return figure


def _draw(axes: "Axes", place: float, bar: Bar, order: Sequence[str]) -> None:
    if bar.sizes is None:
        axes.text(0, place, f" {figures.DASH}", va="center", fontsize=9)
        return
    sizes, at = bar.sizes, 0.0
    whole = axes.get_xlim()[1]
    for role in order:
        size = sizes.get(role, 0) / 1e6
        colour = figures.ROLE_COLOURS[role]
        axes.barh(place, size, _BAR, at, color=colour, edgecolor="white", linewidth=0.8)
        words = megabytes(sizes.get(role, 0))
        # Only a piece that is wide enough for its figure gets one.
        if size / whole > 0.011 * len(words):
            ink = ink_on(colour)
            axes.text(at + size / 2, place, words, ha="center", va="center", fontsize=8, color=ink)
        at += size
    total = f" {megabytes(sum(sizes.values()))}"
    axes.text(at, place, total, va="center", fontsize=9, fontweight="bold")


def _legend(figure: "Figure", sums: dict[str, int], small_print: str) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=figures.ROLE_COLOURS[role], label=role) for role in sums]
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
