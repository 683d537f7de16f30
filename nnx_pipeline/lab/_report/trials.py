"""What changes of a function gain and cost, as a table for the terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from nnx_pipeline.lab._report.columns import Column, Columns, texts
from nnx_pipeline.lab._report.view import figures
from nnx_pipeline.lab._report.view.figures import DASH, megabytes
from nnx_pipeline.lab._report.view.remarks import TOO_LARGE, Remark, closing_remarks
from nnx_pipeline.lab.comparison.changes import AS_IT_IS
from nnx_pipeline.lab.comparison.trials import Trial, Trials
from nnx_pipeline.lab.compile.measure import Measurement

# The figures of a program and the order in which a narrow screen leaves them out.
_COLUMNS = {
    "account MB": 0,
    "heap MB": 3,
    "temp MB": 4,
    "step ms": 0,
    "TFLOP": 1,
    "sent MB": 5,
    "launches": 6,
}


def trials_view(title: str, trials: Trials) -> RenderableType:
    heads = [Column(name, order, is_number=True) for name, order in _COLUMNS.items()]
    promise = [Column("promised", 2, is_number=True)] if trials.promised else []
    first = [Column("change", is_prose=True), Column("gain MB", is_number=True), *promise]
    table = Columns([*first, *heads], title=title, is_bare=True)
    table.add_row(AS_IT_IS.name, *[""] * (1 + len(promise)), *_figures(trials.base))
    table.add_section()
    for trial in trials.by_gain():
        if len(trial.change.kinds) > 1:
            table.add_section()
        cells = _figures(trial.result) if trial.result else [DASH] * len(_COLUMNS)
        promised = trials.promise(trial)
        least = "" if promised is None else f"≥ {megabytes(promised)}"
        table.add_row(
            trial.change.name, _gain(trials, trial), *([least] if promise else []), *cells
        )
    waiting = [Text(f"{trials.waiting} not tried yet", style="yellow")] if trials.waiting else []
    measured = [trials.base, *(one.result for one in trials.tried if one.result)]
    closing = closing_remarks(measured[:1], hint=False)
    return Group(table, *waiting, *texts([*trials_remarks(trials), *closing]))


def _gain(trials: Trials, trial: Trial) -> str:
    gain = trials.gain(trial)
    return "failed" if gain is None else megabytes(gain).replace("-", "−")


def _figures(measured: Measurement) -> list[str]:
    memory, time = measured.memory, measured.time
    flops = measured.flops
    sent = [count["bytes"] for count in measured.collectives.values()]
    return [
        f"{megabytes(measured.needed_bytes)}{TOO_LARGE if measured.exceeds_device_memory else ''}",
        megabytes(memory.heap_bytes),
        megabytes(memory.temp_bytes),
        figures.estimated(time, "step_seconds"),
        DASH if flops is None else f"{flops / 1e12:,.3f}",
        DASH if None in sent else megabytes(sum(filter(None, sent))),
        DASH if time is None or time.launches is None else f"{time.launches:,}",
    ]


def trials_remarks(trials: Trials, *, gains: bool = False) -> list[Remark]:
    """What to write for each change that gains, why others failed, and what was not tried.

    - `gains`: whether the lines have the gains, where no table shows them.
    """
    untried = (Remark(f"not tried: {why}") for why in trials.left_out)
    return [*_lines(trials, gains=gains), *untried]


def _lines(trials: Trials, *, gains: bool) -> Iterator[Remark]:
    for trial in trials.by_gain():
        name, gain = trial.change.name, trials.gain(trial)
        if gain is None:
            yield Remark(f"{name} failed: {trial.error}", "warning")
        elif trials.is_same(trial):
            yield Remark(f"{name}: the same program")
        elif gain > 0:
            assumed = f"; only with {trial.change.assumes}" if trial.change.assumes else ""
            less = f": {megabytes(gain)} MB less" if gains else ""
            yield Remark(f"{name}{less} → {trial.change.cure}{assumed}", "strong")
