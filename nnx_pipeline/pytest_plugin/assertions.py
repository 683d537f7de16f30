"""A measurement as tests use it: its figures, assertions on them, and what a failure says."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from nnx_pipeline.errors import InputError, nearest
from nnx_pipeline.lab.attribution_view import short_operation, short_source
from nnx_pipeline.lab.compile import Measurement
from nnx_pipeline.lab.report import CPU_WARNING, compiler, megabytes
from nnx_pipeline.lab.unread_view import unread_lines

TOP = 8  # rows of buffers in a message
SMALL = 0.01  # a smaller share of the heap is left out of it

Budgeted = Callable[["CompiledMemory", str, float | None], None]


class MemoryExceeded(AssertionError):
    """A program takes more than it may; the message names its largest buffers."""


@dataclass(frozen=True, repr=False)
class CompiledMemory:
    """What a compiled program takes, in bytes per device; None where the compiler does not say.

    measurement: all that is known of it. budgeted: compares it with the budget of a test.
    """

    measurement: Measurement
    budgeted: Budgeted = field(compare=False)

    @property
    def temp_bytes(self) -> int:
        """The compiler's `temp_size_in_bytes`; on a TPU it is not the heap."""
        return self.measurement.memory.temp_bytes

    @property
    def heap_bytes(self) -> int | None:
        """The device-memory heap: what is neither argument, result nor constant."""
        return self.measurement.memory.heap_bytes

    @property
    def peak_bytes(self) -> int | None:
        """The most that is in use at once, arguments included."""
        return self.measurement.memory.peak_bytes

    @property
    def argument_bytes(self) -> int:
        """All arguments in device memory, donated ones too."""
        return self.measurement.memory.argument_bytes

    @property
    def host_argument_bytes(self) -> int:
        """The arguments in host memory."""
        return self.measurement.memory.host_argument_bytes

    @property
    def output_bytes(self) -> int:
        """All results, those in the place of a donated argument too."""
        return self.measurement.memory.output_bytes

    @property
    def alias_bytes(self) -> int:
        """The results that take the place of a donated argument."""
        return self.measurement.memory.alias_bytes

    @property
    def constant_bytes(self) -> int | None:
        """What the program brings along in device memory, such as captured arrays."""
        return self.measurement.memory.constant_bytes

    @property
    def account_bytes(self) -> int | None:
        """Arguments, outputs that alias none of them, constants and heap: what must fit."""
        return self.measurement.memory.account_bytes

    @property
    def host_temp_bytes(self) -> int:
        """What the program holds in host memory."""
        return self.measurement.memory.host_temp_bytes

    @property
    def flops(self) -> int | None:
        """2·m·n·k of every matrix product, loops multiplied by their trip counts.

        None if one cannot be read from the program: `measurement.unread` names it.
        """
        return self.measurement.flops

    @property
    def collectives(self) -> dict[str, dict[str, int | None]]:
        """`ops` in the program, times `executed` and `bytes` of results, by kind of collective."""
        return self.measurement.collectives

    def __repr__(self) -> str:
        """Short, since pytest shows it beside each figure of an assertion."""
        return f"<{_subject(self.measurement)} on {self.measurement.platform}>"

    def assert_at_most(self, **limits: int) -> None:
        """Raises MemoryExceeded, with the largest buffers, unless each figure is within its limit.

        limits: any figures of this class by name, such as `temp_bytes=100_000_000`. A figure that
        the compiler does not give is within no limit. Raises InputError for an unknown name.
        """
        __tracebackhide__ = True
        if not limits:
            raise InputError("assert_at_most() has no limit; give one, such as temp_bytes=10**8")
        too_large = []
        for name, limit in limits.items():
            if name not in _LIMITED:
                raise InputError(f"{name}= is no figure with a limit; {nearest(name, _LIMITED)}")
            if not math.isfinite(limit):
                raise InputError(f"{name}={limit} is no limit; give a number of bytes or FLOPs")
            value = getattr(self, name)
            if value is None:
                too_large.append(
                    f"{name}: no figure of this compiler, where the limit is {limit:,}"
                )
            elif value > limit:
                share = f" ({value / limit - 1:.1%})" if limit else ""
                too_large.append(
                    f"{name} {value:,} is {value - limit:,}{share} above its limit of {limit:,}"
                )
        if too_large:
            raise MemoryExceeded("\n".join([*too_large, "", self.description()]))

    def within_budget(self, name: str = "", *, tolerance: float | None = None) -> bool:
        """Compares temp, heap, peak and account with this test's entry in `memory-budgets.toml`.

        name: tells several budgets of one test and platform apart. tolerance: the share by which a
        budget may be exceeded, instead of that of the project (`memory_budget_tolerance`, 1 %).
        Gives True or raises MemoryExceeded; skips the test where only another version of the
        compiler has a budget. Raises InputError for a name that is no text and for a tolerance
        below 0 or of 1 and more.
        """
        __tracebackhide__ = True
        if not isinstance(name, str):
            raise InputError(f"within_budget({name!r}): a name is a text; write {str(name)!r}")
        if tolerance is not None and not 0 <= tolerance < 1:
            raise InputError(f"tolerance={tolerance} is no share; write 0.01 for 1 %")
        self.budgeted(self, name, tolerance)
        return True

    def description(self) -> str:
        """Compiler, figures and the largest buffers at the peak, as lines of text."""
        memory = self.measurement.memory
        shown = ("temp", "heap", "peak", "argument", "output", "constant", "account")
        sizes = (f"{name} {megabytes(getattr(memory, f'{name}_bytes'))}" for name in shown)
        lines = [
            f"{_subject(self.measurement)} on {compiler(self.measurement)}",
            f"MB per device: {', '.join(sizes)}",
            *_largest_buffers(self.measurement),
            *unread_lines([self.measurement]),
            *self.measurement.notes,
        ]
        return "\n".join([*lines, CPU_WARNING] if self.measurement.platform == "cpu" else lines)


_LIMITED = tuple(
    name
    for name, value in vars(CompiledMemory).items()
    if isinstance(value, property) and name != "collectives"
)


def _subject(measurement: Measurement) -> str:
    """The name of the function, or what the training step is of."""
    name = measurement.config.get("function", "training step")
    mesh = ",".join(f"{axis}={size}" for axis, size in measurement.mesh.items() if size > 1)
    return f"{name} ({mesh})" if mesh else name


def _largest_buffers(measurement: Measurement) -> list[str]:
    """The rows at the peak, largest first, each with where in the source it comes from."""
    attribution = measurement.attribution
    if attribution is None or not attribution.buffers:
        return ["The compiler gave no list of buffers."]
    rows = attribution.buffers
    shown = [row for row in rows[:TOP] if row.bytes >= SMALL * attribution.heap_bytes]
    cells = [
        (
            f"{megabytes(row.bytes):>10} MB",
            row.shape or row.name,
            short_source(row.source),
            row.role,
            short_operation(row.operation),
        )
        for row in shown
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(map(str.ljust, row, widths)).rstrip()  # one column below the other
        for row in cells
    ]
    return [f"largest of {len(rows)} buffers at the peak of the heap:", *lines]
