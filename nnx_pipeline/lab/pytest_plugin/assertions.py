"""A measurement as tests use it: figures, assertions on them, and the messages of failures."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from numbers import Real

from nnx_pipeline.lab._report.program_tables import rows_by_line, seconds_of
from nnx_pipeline.lab._report.view.buffers import grouped, short_line, short_operation
from nnx_pipeline.lab._report.view.figures import (
    bounded,
    compiler,
    estimated,
    megabytes,
    milliseconds,
    sign,
    subject_of,
)
from nnx_pipeline.lab._report.view.remarks import CPU_WARNING, unread_lines
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import InputError, counted, nearest, printable
from nnx_pipeline.lab.pytest_plugin._budgets import in_short

TOP = 8  # rows of buffers, or of lines of source, in a message
SMALL = 0.01  # of the heap; a message leaves out smaller buffers

Budgeted = Callable[["CompiledMemory", str, float | None], None]


class MemoryExceeded(AssertionError):
    """A program needs more memory or time than it is allowed; the message says what takes most."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


@dataclass(frozen=True, repr=False)
class CompiledMemory:
    """What a compiled program needs per device, in bytes and seconds; None where nobody knows.

    - `measurement`: everything that is known about the program.
    - `budgeted`: compares it with a budget of the test, given the budget's name and a tolerance.
    """

    measurement: Measurement
    budgeted: Budgeted = field(compare=False)

    @property
    def temp_bytes(self) -> int | None:
        """The compiler's `temp_size_in_bytes`; on a TPU it is not the heap."""
        return self.measurement.memory.temp_bytes

    @property
    def heap_bytes(self) -> int | None:
        """The heap in device memory: what is neither an argument, nor a result, nor a constant."""
        return self.measurement.memory.heap_bytes

    @property
    def peak_bytes(self) -> int | None:
        """The largest amount in use at the same time, including arguments."""
        return self.measurement.memory.peak_bytes

    @property
    def argument_bytes(self) -> int:
        """All arguments in device memory, including donated ones."""
        return self.measurement.memory.argument_bytes

    @property
    def host_argument_bytes(self) -> int:
        """The arguments in host memory."""
        return self.measurement.memory.host_argument_bytes

    @property
    def output_bytes(self) -> int:
        """All results, including those that reuse the memory of a donated argument."""
        return self.measurement.memory.output_bytes

    @property
    def alias_bytes(self) -> int:
        """The results that reuse the memory of a donated argument."""
        return self.measurement.memory.alias_bytes

    @property
    def constant_bytes(self) -> int | None:
        """Constants of the program in device memory, such as captured arrays."""
        return self.measurement.memory.constant_bytes

    @property
    def account_bytes(self) -> int | None:
        """What must fit: arguments, outputs not aliased to them, constants and heap."""
        return self.measurement.memory.account_bytes

    @property
    def host_temp_bytes(self) -> int:
        """Temporary buffers of the program in host memory."""
        return self.measurement.memory.host_temp_bytes

    @property
    def step_seconds(self) -> float | None:
        """The estimated time of one step: its compute, and what the compute waits for.

        It follows from the compiled program alone. None on a CPU, and where the time of an
        instruction is not known; `measurement.unread` names that. `measurement.time.basis` says by
        what it is known. Where `measurement.time.is_lower_bound` says so, as of every roofline, a
        step takes at least that long: that it is at most a limit is then necessary, and not enough.
        """
        return self.measurement.time.step_seconds if self.measurement.time else None

    @property
    def compute_seconds(self) -> float | None:
        """The part of `step_seconds` in which instructions run, all but collectives."""
        return self.measurement.time.compute_seconds if self.measurement.time else None

    @property
    def flops(self) -> int | None:
        """2·m·n·k for every matrix product, those in loops times the trip count.

        None if a product cannot be read from the program; `measurement.unread` names it.
        """
        return self.measurement.flops

    @property
    def collectives(self) -> dict[str, dict[str, int | None]]:
        """For each kind of collective `ops`, `executed` and `bytes`.

        That is how often it is in the program, how often it runs, and the bytes of its results.
        """
        return self.measurement.collectives

    def __repr__(self) -> str:
        """A short text, since pytest shows it beside each figure of an assertion."""
        return f"<{subject_of(self.measurement)} on {self.measurement.platform}>"

    def assert_at_most(self, **limits: float) -> None:
        """Asserts that each of the given figures is at most its limit.

        - `limits`: any figures of this class by name, such as `temp_bytes=100_000_000` or
          `step_seconds=0.02`. A figure that is not known exceeds every limit.

        Raises MemoryExceeded, which says what takes most, for a figure above its limit, and
        InputError for an unknown name, a limit that is not finite, or no limit at all.
        """
        __tracebackhide__ = True
        if not limits:
            raise InputError("assert_at_most() has no limit; give one, such as temp_bytes=10**8")
        too_large: dict[str, str] = {}
        exceeded: dict[str, tuple[float | None, float]] = {}
        for name, limit in limits.items():
            if name not in _LIMITED:
                raise InputError(f"{name}= is not a known figure; {nearest(name, _LIMITED)}")
            if not (isinstance(limit, Real) and math.isfinite(limit)):
                raise InputError(f"{name}={limit!r} is not a limit; give bytes, FLOPs or seconds")
            value = getattr(self, name)
            shown = _number(limit)
            if value is None or value > limit:
                exceeded[name] = value, limit
            if value is None:
                too_large[name] = f"{name}: there is no figure here, and the limit is {shown}"
            elif value > limit:
                share = f" ({value / limit - 1:.1%})" if limit else ""
                least = sign(self.measurement.time) if name.endswith("_seconds") else ""
                too_large[name] = (
                    f"{name} {least}{_number(value)} is {_number(value - limit)}{share} above its "
                    f"limit of {shown}"
                )
        if too_large:
            lines = [in_short(exceeded, "limit"), *too_large.values(), ""]
            raise MemoryExceeded("\n".join([*lines, self.description(too_large)]))

    def within_budget(self, name: str = "", *, tolerance: float | None = None) -> bool:
        """Asserts that temp, heap, peak, account and the estimated step keep the test's budget.

        - `name`: tells several budgets of one test and platform apart.
        - `tolerance`: the share by which a budget may be exceeded, instead of that of the project
          (`memory_budget_tolerance`, 1 %).

        Returns True or raises MemoryExceeded. Skips the test where only another version of the
        compiler has a budget, and fails it where none has. Raises InputError for a name that is
        not a string, and for a tolerance below 0 or of 1 and more.
        """
        __tracebackhide__ = True
        if not isinstance(name, str):
            raise InputError(
                f"within_budget({name!r}): a name must be a string; write {str(name)!r}"
            )
        if tolerance is not None and not (isinstance(tolerance, Real) and 0 <= tolerance < 1):
            raise InputError(f"tolerance={tolerance!r} is not a valid share; write 0.01 for 1 %")
        self.budgeted(self, name, tolerance)
        return True

    def description(self, figures: Collection[str] = ()) -> str:
        """The compiler, the figures, and what takes most of them, as lines of text.

        - `figures`: those that are too large. A time shows the lines of source that take longest,
          and any other figure, or none, the largest buffers.
        """
        memory = self.measurement.memory
        timed = [name for name in figures if name.endswith("_seconds")]
        has_buffers = not figures or len(timed) < len(figures)
        shown = ("temp", "heap", "peak", "argument", "output", "constant", "account")
        sizes = (f"{name} {megabytes(getattr(memory, f'{name}_bytes'))}" for name in shown)
        lines = [
            f"{subject_of(self.measurement)} on {compiler(self.measurement)}",
            f"MB per device: {', '.join(sizes)}",
            *_estimated(self.measurement),
            *(_longest_lines(self.measurement) if timed else ()),
            *(_largest_buffers(self.measurement) if has_buffers else ()),
            *unread_lines([self.measurement]),
            *self.measurement.notes,
        ]
        return "\n".join([*lines, CPU_WARNING] if self.measurement.is_of_cpu else lines)


_LIMITED = tuple(
    name
    for name, value in vars(CompiledMemory).items()
    if isinstance(value, property) and name != "collectives"
)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.9f}".rstrip("0").rstrip(".")


def _estimated(measurement: Measurement) -> list[str]:
    time = measurement.time
    if time is None:
        return []
    figures = (
        ("step", estimated(time, "step_seconds")),
        ("compute", estimated(time, "compute_seconds")),
        ("waiting for collectives", milliseconds(time.exposed_seconds)),
        ("waiting for transfers", milliseconds(time.memory_wait_seconds)),
    )
    return ["ms by estimate: " + ", ".join(f"{name} {shown}" for name, shown in figures)]


def _longest_lines(measurement: Measurement) -> list[str]:
    if measurement.time is None or not measurement.time.rows:
        return ["There is no list of what takes the time."]
    lines = rows_by_line(measurement.time)
    times = [bounded(measurement.time, seconds_of(rows)) for rows in lines[:TOP]]
    shown = [
        f"{time:>10} ms  {short_line(rows[0])}"
        for time, rows in zip(times, lines[:TOP], strict=True)
    ]
    return [f"longest of {counted(len(lines), 'line')} of source:", *shown]


def _largest_buffers(measurement: Measurement) -> list[str]:
    attribution = measurement.attribution
    if attribution is None or not attribution.buffers:
        return ["The compiler gave no list of buffers."]
    sizes = [(sum(it.bytes for it in group), group) for group in grouped(attribution.buffers)]
    shown = [row for row in sizes[:TOP] if row[0] >= SMALL * attribution.heap_bytes]
    cells = [
        (
            f"{megabytes(size):>10} MB" + (f" in {len(group)} buffers" if len(group) > 1 else ""),
            group[0].shape or group[0].name,
            short_line(group[0]),
            group[0].role,
            short_operation(group[0].operation),
        )
        for size, group in shown
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(map(str.ljust, row, widths)).rstrip()  # one column below the other
        for row in cells
    ]
    return [
        f"largest of {counted(len(attribution.buffers), 'buffer')} at the peak of the heap:",
        *lines,
    ]
