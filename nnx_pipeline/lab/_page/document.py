"""The page as a whole: what was compared, the verdicts, and a card for each experiment."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest

from nnx_pipeline.lab._page import tables
from nnx_pipeline.lab._page.charts import DrawnArm, role_bars
from nnx_pipeline.lab._page.flame import flame
from nnx_pipeline.lab._page.markup import Markup, element, fragment
from nnx_pipeline.lab._page.script import SCRIPT
from nnx_pipeline.lab._page.style import STYLE
from nnx_pipeline.lab._page.sweep import sweep_sections
from nnx_pipeline.lab._page.timeline import timeline
from nnx_pipeline.lab._report.view import figures
from nnx_pipeline.lab._report.view.buffers import buffer_rows, outside_the_heap
from nnx_pipeline.lab._report.view.figures import QUANTITIES, TRITON, megabytes
from nnx_pipeline.lab._report.view.remarks import Remark, closing_remarks
from nnx_pipeline.lab._report.view.sentences import closing_sentences
from nnx_pipeline.lab._report.view.words import BUFFERS, MEMORY, TIME, VERDICTS
from nnx_pipeline.lab.attribution._result import difference
from nnx_pipeline.lab.comparison.outcome import Outcome
from nnx_pipeline.lab.comparison.sweep import Sweep
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import counted

MOST_ROWS = 12  # of buffers; all of them are in the JSON
NO_ATTRIBUTION = "This compiler gave no buffer assignment: what the bytes hold is not known (–)."


def outcomes_page(
    title: str, outcomes: Sequence[Outcome], cublas: Sequence[Outcome] = (), *, command: str = ""
) -> str:
    measured = [m for outcome in (*outcomes, *cublas) for m in (outcome.a, outcome.b) if m]
    both = list(zip_longest(outcomes, cublas))
    summary = element("section", _summary(both), class_="card") if len(outcomes) > 1 else None
    cards = [_card(*pair) for pair in both]
    compared = [outcome.numerics for outcome in outcomes if outcome.numerics]
    sentences = [element("p", line.text) for line in closing_sentences(outcomes)]
    shown = element("section", sentences, class_="card") if sentences else None
    words = MEMORY | TIME | VERDICTS | BUFFERS
    body = fragment(shown, summary, cards)
    return _page(title, closing_remarks(measured, compared, fresh=True), command, words, body)


def measurement_page(
    title: str,
    *measured: Measurement,
    command: str = "",
    top: int = MOST_ROWS,
    notes: Sequence[Remark] = (),
) -> str:
    arms = [tables.LabelledProgram("", title, measured[0])]
    if len(measured) > 1:
        arms = [
            tables.LabelledProgram(key, figures.products_by(one), one)
            for key, one in zip("ab", measured, strict=True)
        ]
    body = element(
        "section",
        _headline(arms),
        tables.account_table(arms),
        tables.floors(arms),
        _memory(arms, top),
        _rest(arms),
        class_="card",
    )
    said = [*closing_remarks(measured, hint=not notes), *notes]
    return _page(title, said, command, MEMORY | TIME | BUFFERS, body)


def sweep_page(title: str, sweep: Sweep, *, command: str = "") -> str:
    measured = [point.result for _, points in sweep.arms for point in points if point.result]
    failed = [Remark(error, "error") for error in sweep.errors]
    notes = [*failed, *closing_remarks(measured, hint=False, fresh=True)]
    return _page(title, notes, command, MEMORY | TIME, sweep_sections(sweep))


def frontier_page(
    title: str, sections: Sequence[Markup], measured: Sequence[Measurement], *, command: str = ""
) -> str:
    """Programs by memory and time; the sections are those of `frontier_sections`."""
    notes = closing_remarks(measured, hint=False)
    return _page(title, notes, command, MEMORY | TIME, fragment(list(sections)))


def _page(
    title: str, notes: Sequence[Remark], command: str, words: Mapping[str, str], body: Markup
) -> str:
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    header = element(
        "header",
        element("h1", title),
        element("p", element("code", command), class_="quiet") if command else None,
        [
            element("p", note.text, class_="quiet" if note.tone == "plain" else "warning")
            for note in notes
        ],
    )
    explained = [(element("dt", word), element("dd", said)) for word, said in words.items()]
    footer = element(
        "footer",
        element("details", element("summary", "What the words mean"), element("dl", explained)),
        element("p", f"MB are 10⁶ bytes per device; – marks a figure that is not known. {now}"),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(STYLE)),
    )
    # A page without a chart that can be moved has no script.
    moves = any(f'class="{name}"' in body for name in ("timeline", "flame"))
    script = element("script", Markup(SCRIPT)) if moves else None
    shown = element("body", header, element("main", body), footer, script)
    page = element("html", head, shown, lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _summary(both: Sequence[tuple[Outcome, Outcome | None]]) -> Markup:
    rows = []
    for outcome, other in both:
        name = outcome.question.name
        link = element("a", name, href=f"#{name}")
        rows.append(([link, " ", element("span", outcome.question.claim, class_="claim")], outcome))
        if other and figures.differ_by_gemm(outcome, other):
            by = figures.library_of(other)
            rows.append(([element("span", f"{name}, {by}", class_="quiet")], other))
    head = ("experiment", *_VERDICT)
    cells = [(named, *_verdict_and_memory(outcome)) for named, outcome in rows]
    return tables.table(counted(len(both), "experiment"), head, cells, numbers=len(_VERDICT) - 1)


_VERDICT = ("verdict", "its b / a", *(f"{name}, MB" for name in QUANTITIES), "step, ms")


def _verdict_and_memory(outcome: Outcome) -> tuple[Markup | str, ...]:
    ratio = outcome.ratio(outcome.question.judged_by)
    return (
        _pill(outcome),
        figures.DASH if ratio is None else f"{ratio:.3f}",
        *(_pair(outcome.bytes_of(name)) for name in QUANTITIES),
        _pair_of_steps((outcome.a, outcome.b)),
    )


def _by_gemm(outcome: Outcome, other: Outcome | None) -> Markup | None:
    if other is None:
        return None
    library = figures.library_of(other)
    if not figures.differ_by_gemm(outcome, other):
        words = f"With {library}’s matrix products instead of {TRITON}’s: the same memory."
        return element("p", words, class_="quiet")
    rows = [(TRITON, *_verdict_and_memory(outcome)), (library, *_verdict_and_memory(other))]
    head = ("matrix products", *_VERDICT)
    why = element("p", f"{library}: {other.note}", class_="note") if other.note else None
    return element("section", tables.table(None, head, rows, numbers=len(_VERDICT) - 1), why)


def _pair(values: Sequence[int | None]) -> str:
    return " → ".join(map(megabytes, values))


def _pair_of_steps(results: Sequence[Measurement | None]) -> str:
    times = [result.time if result else None for result in results]
    return " → ".join(figures.estimated(time, "step_seconds") for time in times)


def _pill(outcome: Outcome) -> Markup:
    css = "failed" if outcome.failed else outcome.verdict.replace(" ", "-")
    return element("span", figures.verdict_words(outcome), class_=f"pill {css}")


def _card(outcome: Outcome, other: Outcome | None) -> Markup:
    question = outcome.question
    arms = [tables.LabelledProgram(key, *arm) for key, arm in zip("ab", outcome.arms, strict=True)]
    return element(
        "section",
        element(
            "header",
            element("h2", question.name),
            _pill(outcome),
            element("span", f"claim: {question.claim}", class_="claim") if question.claim else None,
        ),
        element("p", question.difference, class_="difference"),
        tables.changed_fields(outcome.a, outcome.b) if outcome.a and outcome.b else None,
        element("p", outcome.note, class_="note") if outcome.note else None,
        _headline(arms),
        _by_gemm(outcome, other),
        element("p", f"Same numbers: {figures.same_numbers(outcome.numerics)}.", class_="quiet")
        if outcome.numerics
        else None,
        tables.account_table(arms) if outcome.a or outcome.b else None,
        tables.floors(arms),
        _memory(arms, MOST_ROWS),
        _rest(arms) if outcome.a or outcome.b else None,
        class_="card",
        id=question.name,
    )


def _headline(arms: Sequence[tables.LabelledProgram]) -> Markup | None:
    results = [arm.result for arm in arms]
    memories = [result.memory if result else None for result in results]
    if not any(memories):
        return None
    items = []
    for label in figures.COLUMNS:
        values = [getattr(memory, f"{label}_bytes") if memory else None for memory in memories]
        items.append(
            element("div", element("dt", label), element("dd", _pair(values), _unit(values, "MB")))
        )
    times = [result.time if result else None for result in results]
    steps = [time.step_seconds if time else None for time in times]
    if any(steps):
        alike = steps if figures.are_alike(times[0], times[-1]) else ()  # else no ratio is known
        shown = element("dd", _pair_of_steps(results), _unit(alike, "ms"))
        items.append(element("div", element("dt", "estimated step"), shown))
    return element("dl", items, class_="headline")


def _unit(values: Sequence[float | None], unit: str) -> Markup:
    before, after = values if len(values) == 2 else (None, None)
    if not before or after is None:
        return element("small", f" {unit}")
    changed = figures.relative_change(before, after)
    # What rounds to nothing has no colour.
    css = ("more" if after > before else "less") if changed.strip("+−0.%") else None
    return element("small", f" {unit} (", element("span", changed, class_=css), ")")


def _memory(arms: Sequence[tables.LabelledProgram], top: int) -> Markup | None:
    is_alone = len(arms) == 1
    measured = [arm for arm in arms if arm.result]
    if not measured:
        return None
    # A program on its own has no letter; it is drawn in the colour of b.
    drawn = [
        DrawnArm(
            arm.key or "b",
            "this program" if is_alone else arm.label,
            heap,
            is_alone,
            _room(arm.result),
        )
        for arm in measured
        if arm.result and (heap := arm.result.attribution)
    ]
    if not drawn:
        return element("p", NO_ATTRIBUTION, class_="quiet")
    lists = []
    if len(drawn) == 2 and (changes := difference(*(arm.attribution for arm in drawn))):
        caption = f"What changed, {_of(MOST_ROWS, changes)}"
        lists.append(tables.differences_table(caption, changes[:MOST_ROWS]))
    for arm in drawn:
        whose = f" of {arm.key}: {arm.label}" if len(arms) == 2 else ""
        lists_of = {"Largest buffers of the heap": buffer_rows(arm.attribution.buffers)}
        for title, rows in (lists_of | outside_the_heap(arm.attribution)).items():
            caption = f"{title}{whose}, {_of(top, rows)}"
            lists.append(tables.buffers_table(caption, rows[:top]))
    return fragment(
        role_bars(drawn),
        tables.roles_table(drawn),
        timeline(drawn),
        flame(drawn),
        element("p", NO_ATTRIBUTION, class_="quiet") if len(drawn) < len(measured) else None,
        [element("section", part) for part in lists],
    )


def _room(result: Measurement) -> int | None:
    """What the memory of a device leaves for the heap; None where that is not known."""
    if result.device_memory_bytes is None or result.memory.heap_bytes is None:
        return None
    return result.device_memory_bytes - (result.needed_bytes - result.memory.heap_bytes)


def _of(most: int, rows: Sequence[object]) -> str:
    return f"{min(most, len(rows))} of {len(rows)} rows"


def _rest(arms: Sequence[tables.LabelledProgram]) -> Markup:
    config = tables.config_table(arms)
    return fragment(
        element("details", element("summary", "All figures"), tables.figures_table(arms)),
        config and element("details", element("summary", "Config"), config),
    )
