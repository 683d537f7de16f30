"""The sentences beside the figures of a report: compiler, settings, notes and warnings."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nnx_pipeline.lab._hlo.cost import Unread
from nnx_pipeline.lab._report.view.buffers import buffer_rows
from nnx_pipeline.lab._report.view.figures import (
    TRITON,
    band,
    compiler,
    library,
    megabytes,
    most,
    products_by,
    sign,
)
from nnx_pipeline.lab._timing.rate import MILLION, TRILLION
from nnx_pipeline.lab.attribution._result import ADVICE
from nnx_pipeline.lab.comparison._numerics import Numerics
from nnx_pipeline.lab.comparison.outcome import Outcome
from nnx_pipeline.lab.compile._settings import written
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import counted

CPU_WARNING = (
    "CPU figures mislead: remat can raise them, and the peak leaves out the temporaries of a loop. "
    "Compare on the platform of a TPU or a GPU."
)
TOO_LARGE = " ✗"
FIGURES = {
    "flops": "the matrix products",
    "collectives": "the collectives",
    "buffers": "the list of buffers",
    "account": "the account",
    "time": "the estimated time",
    "time_bound": "the estimated time",
    "time_rule": "the estimated time",
}
_HOW = {"time_bound": "only with the least that it takes", "time_rule": "only by a rule"}
SHOWN = 3  # instructions that a line names
Tone = Literal["plain", "strong", "warning", "error", "alarm"]


@dataclass(frozen=True)
class Remark:
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Kept:
    """Arguments that are not donated, although results could take their memory.

    - `arrays`: how many arrays of these arguments.
    - `bytes`: what the account loses by their donation at least.
    - `function`, `source`: what takes them, and where that is defined.
    """

    arguments: tuple[str, ...]
    arrays: int
    bytes: int
    function: str
    source: str

    @property
    def remark(self) -> Remark:
        names = ", ".join(self.arguments[:SHOWN])
        more = f" and {len(self.arguments) - SHOWN} more" if self.arguments[SHOWN:] else ""
        return Remark(
            f"not donated: {names}{more} ({counted(self.arrays, 'array')}), whose memory results "
            f"could take: {megabytes(self.bytes)} MB or more of the account; {self.function} is at "
            f"{self.source}; donate what its caller does not read again",
            "warning",
        )


def warnings(texts: Iterable[str]) -> list[Remark]:
    return [Remark(text, "warning") for text in texts]


def settings_remarks(measured: Sequence[Measurement]) -> list[Remark]:
    left_out = dict.fromkeys(
        f"left out, because the compiler for {one.platform} does not take it: {setting}"
        for one in measured
        for setting in one.xla_left_out
    )
    return [*map(Remark, settings_lines(measured)), *warnings(left_out)]


def rate_remarks(measured: Measurement) -> list[Remark]:
    """Tokens per second and, where the user gave a price, what they cost."""
    rate, time = measured.rate, measured.time
    if rate is None or time is None:
        return []
    text = (
        f"{rate.tokens:,} tokens in a step, {most(time)}{rate.per_chip_second:,.0f} per chip-second"
    )
    if rate.price is not None:
        million, trillion = rate.cost_of(MILLION), rate.cost_of(TRILLION)
        text += (
            f"; at {rate.price:g} per chip-hour {sign(time)}{million:,.4f} per million tokens and "
        )
        text += f"{sign(time)}{trillion:,.0f} per trillion"
    return [Remark(text)]


def cpu_remarks(measured: Sequence[Measurement]) -> list[Remark]:
    return warnings([CPU_WARNING] if measured and measured[0].is_of_cpu else [])


def gemm_remarks(measured: Sequence[Measurement], *, hint: bool) -> list[Remark]:
    """By which library matrix products are; `hint` names the option that measures both."""
    kinds = list(dict.fromkeys(products_by(one) for one in measured if one.gemm))
    if not kinds:
        return []
    text = f"matrix products by {' and by '.join(kinds)}"
    band = "; --gemm both shows the range" if hint and len(kinds) == 1 else ""
    libraries = dict.fromkeys(library(one.platform) for one in measured if one.gemm)
    either = f"{TRITON} or {' or '.join(libraries)}"
    return [Remark(f"{text}; autotuning on a GPU may pick {either}{band}")]


def blind_spots(measured: Sequence[Measurement]) -> list[Remark]:
    """What a figure counts unexpectedly, and where two reports of the compiler disagree."""
    peaks = [one for one in measured if one.memory.peak_bytes is not None]
    on_chip = [one.account.on_chip_bytes for one in peaks if one.account.on_chip_bytes]
    notes = warnings(dict.fromkeys(note for one in measured for note in one.account.notes))
    if not on_chip:
        return notes
    most = megabytes(max(on_chip))
    text = f"peak includes the on-chip memory of a TPU, here up to {most} MB; "
    return [Remark(f"{text}program code includes the constants"), *notes]


def closing_remarks(
    measured: Sequence[Measurement],
    compared: Sequence[Numerics] = (),
    *,
    hint: bool = True,
    fresh: bool = False,
) -> list[Remark]:
    """The remarks below a table: compiler, blind spots, what does not fit.

    - `hint`: as for `gemm_remarks`.
    - `fresh`: whether the command has `--fresh`, so that what is cached is said with it.
    """
    # Arms that are compiled with other packages have a line each.
    remarks = [Remark(f"compiler: {one}") for one in dict.fromkeys(map(compiler, measured))]
    remarks += [*settings_remarks(measured), *cpu_remarks(measured)]
    remarks += [*gemm_remarks(measured, hint=hint), *blind_spots(measured), *_too_large(measured)]
    remarks += warnings(unread_lines(measured))
    timed = [one.time for one in measured if one.time and one.time.step_seconds]
    remarks += [Remark(f"step: {line}") for line in dict.fromkeys(map(band, timed))]
    remarks += [
        Remark(f"same numbers: losses and gradients at tiny on CPU devices, {where}")
        for where in dict.fromkeys(f"{one.mesh}, {one.pipeline}" for one in compared)
    ]
    return [*remarks, *(_from_earlier(measured, compared) if fresh else [])]


def _from_earlier(measured: Sequence[Measurement], compared: Sequence[Numerics]) -> list[Remark]:
    once = {id(one): one.measured for one in measured}  # arms may share a program
    dates = [*once.values(), *(one.measured for one in compared)]
    earlier = sorted(filter(None, dates))
    if not earlier:
        return []
    span = earlier[0] if earlier[0] == earlier[-1] else f"{earlier[0]} to {earlier[-1]}"
    text = f"{len(earlier)} of {len(dates)} results are from earlier runs, {span}"
    return [Remark(f"{text}; --fresh measures them again")]


def _too_large(measured: Sequence[Measurement]) -> list[Remark]:
    large = [one for one in measured if one.exceeds_device_memory]
    if not large:
        return []
    most, size = max(one.needed_bytes for one in large), large[0].device_memory_bytes
    text = f"does not fit{TOO_LARGE}: {megabytes(most)} MB of arguments, outputs, constants and "
    text += f"heap, and a device has {megabytes(size)} MB"
    if any(one.is_refused for one in large):
        text += "; the compiler refused it, so that temp, peak and time are not known"
    return [Remark(text, "error")]


def settings_lines(measured: Sequence[Measurement]) -> list[str]:
    """The settings that all programs have in common; those of each arm are in `arm_lines`."""
    texts = {written(one.xla) for one in measured}
    return [f"compiler settings: {text}" for text in texts if text and len(texts) == 1]


def arm_lines(outcome: Outcome) -> list[str]:
    measured = [(key, one) for key, (_, one) in zip("ab", outcome.arms, strict=True) if one]
    if all(one.xla == measured[0][1].xla for _, one in measured):
        return []
    return [
        f"{key}: compiler settings: {written(one.xla) or 'none of your own'}"
        for key, one in measured
    ]


def headed(title: str, outcomes: Sequence[Outcome]) -> str:
    measured = [one for outcome in outcomes for one in (outcome.a, outcome.b) if one]
    arms = dict.fromkeys(line for outcome in outcomes for line in arm_lines(outcome))
    return "\n".join([title, *arms, *settings_lines(measured)])


def unread_lines(measured: Sequence[Measurement]) -> list[str]:
    """One line for each reason why figures leave out instructions or texts."""
    groups: dict[tuple[tuple[str, ...], str], dict[tuple[str, str], Unread]] = defaultdict(dict)
    for measurement in measured:
        for item in measurement.unread:
            groups[item.figures, item.reason][item.what, item.name] = item
    return [_line(list(items.values())) for items in groups.values()]


def _line(items: list[Unread]) -> str:
    first = items[0]
    figures = " and in ".join(FIGURES[figure] for figure in first.figures)
    # The first of each kind first, and those of a kind beside each other.
    by_kind = [
        [one for one in items if one.what == what]
        for what in dict.fromkeys(one.what for one in items)
    ]
    shown = [one for turn in itertools.zip_longest(*by_kind) for one in turn if one][:SHOWN]
    kinds = [
        f"{kind[0].what} {', '.join(_called(one) for one in kind if one in shown and one.name)}"
        for kind in by_kind
        if kind[0] in shown
    ]
    rest = [f"{len(items) - SHOWN} more"] if len(items) > SHOWN else []
    how = _HOW.get(first.figures[0], "not")
    return f"{how} in {figures}: {', '.join([*map(str.strip, kinds), *rest])}: {first.reason}"


def _called(item: Unread) -> str:
    known = item.executed is not None
    times = counted(item.executed, "time") if known else "an unknown number of times"
    return f"{item.name} ({times} per step)"


NAMED = 3  # the largest buffers that are named
_WORTH_NAMING = 0.01  # of what must fit
_PARTS = {
    "kept_argument_bytes": "arguments",
    "donated_argument_bytes": "arguments",
    "output_bytes": "outputs",
    "constant_bytes": "constants",
    "heap_bytes": "heap",
}


def fit_remarks(measurement: Measurement, advice: Mapping[str, str] = ADVICE) -> list[Remark]:
    """Whether a program fits and, if not, the `advice` for the roles of its largest buffers."""
    if not measurement.exceeds_device_memory:
        return [Remark(_sum(measurement), "strong")]
    rows = buffer_rows(measurement.attribution.buffers) if measurement.attribution else []
    least = _WORTH_NAMING * measurement.needed_bytes
    largest = [row for row in rows[:NAMED] if row.bytes >= least]
    lines = [
        f"  {megabytes(row.bytes)} MB: {row.role}, {row.shape or 'no array'}, {row.source}"
        for row in largest
    ]
    roles = [row.role for row in largest]
    account, half = measurement.account, measurement.needed_bytes / 2
    arguments = account.kept_argument_bytes + account.donated_argument_bytes
    if arguments + account.output_bytes > half:  # most outputs are as large as the arguments
        roles.insert(0, "arguments")
    tried = dict.fromkeys(advice[role] for role in roles if role in advice)
    lines += [f"  to try: {cure}" for cure in tried]
    return [Remark(_sum(measurement), "alarm"), *map(Remark, lines)]


def _sum(measurement: Measurement) -> str:
    """Such as `arguments 20.1 + heap 4.5 = 24.6 of 102.8 GB: fits`."""
    account, size = measurement.account, measurement.device_memory_bytes
    parts: dict[str, int] = {}
    for field, name in _PARTS.items():
        parts[name] = parts.get(name, 0) + (getattr(account, field) or 0)
    # Not GB for a small program on a large device: each of its parts would be 0.00.
    is_large = max(size or 0, measurement.needed_bytes) >= 1e9 and measurement.needed_bytes >= 1e8
    unit, scale = ("GB", 1e9) if is_large else ("MB", 1e6)
    digits = 2 if measurement.needed_bytes < 10 * scale else 1
    shown = [f"{name} {part / scale:,.{digits}f}" for name, part in parts.items() if part]
    text = f"{' + '.join(shown)} = {measurement.needed_bytes / scale:,.{digits}f}"
    if size is None:
        return f"{text} {unit} per device, whose memory is not known here"
    text += f" of {size / scale:,.{digits}f} {unit}"
    verdict = {True: "does not fit ✗", False: "fits", None: "fits, if it holds no constants"}
    return f"{text}: {verdict[measurement.exceeds_device_memory]}"
