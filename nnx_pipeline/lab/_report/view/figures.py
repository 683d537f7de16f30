"""How figures read in a report: numbers with their units, and what figures are called."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.text import Text

from nnx_pipeline.lab._timing.result import Time
from nnx_pipeline.lab.attribution.account import ROWS, Memory
from nnx_pipeline.lab.comparison._numerics import Numerics
from nnx_pipeline.lab.comparison.outcome import (
    NAMES,
    NO_EFFECT,
    NOT_APPLICABLE,
    Outcome,
    Quantity,
)
from nnx_pipeline.lab.compile.measure import Measurement

DASH = "–"
TRITON = "Triton"
QUANTITIES: tuple[Quantity, ...] = ("temp", "heap", "account")
COLUMNS = ("temp", "heap", "peak", "account")  # of a table of arms
TOTAL = "the account: what must fit"
OTHER_ROWS = {  # figures of `Memory` that are no part of the account
    "temp": "temp_bytes",
    "peak": "peak_bytes",
    "program code": "generated_code_bytes",
    "host temp": "host_temp_bytes",
    "host arguments": "host_argument_bytes",
    "host outputs": "host_output_bytes",
}
_BOUNDED = ("compute_seconds", "step_seconds")


def library(platform: str) -> str:
    """The library of a GPU's maker that makes matrix products with `--gemm cublas`."""
    return "hipBLASLt" if platform.startswith("rocm") else "cuBLASLt"


def library_of(outcome: Outcome) -> str:
    return library(next((one.platform for one in (outcome.a, outcome.b) if one), ""))


def products_by(measured: Measurement) -> str:
    """What made a program's matrix products; "" where there is no choice."""
    return {None: "", "triton": TRITON}.get(measured.gemm, library(measured.platform))


def same_memory(platform: str) -> Text:
    return Text(f"matrix products by {library(platform)}: the same memory")


def in_place_of_report(first: Measurement, other: Measurement) -> Text | None:
    """The line that stands for the report of a program by another kind of matrix products; None
    where its heap or its account differs by 1 % or more."""
    line = same_memory(other.platform)
    if other.memory != first.memory:
        pairs = [(first.bytes_of(name), other.bytes_of(name)) for name in ("heap", "account")]
        for before, after in pairs:
            if before is None or after is None or abs(after - before) >= NO_EFFECT * before:
                return None
            words = f"the account is {megabytes(after)} MB ({relative_change(before, after)})"
            line = Text(f"matrix products by {library(other.platform)}: {words}")
    if other.time and other.time.step_seconds is not None:
        line.append(f", the estimated step {estimated(other.time, 'step_seconds')} ms")
    return line


def megabytes(value: float | None, decimals: int = 1) -> str:
    """Bytes as MB (10⁶) with one decimal, a dash where there is no figure."""
    return DASH if value is None else f"{value / 1e6:,.{decimals}f}"


def decimals_apart(*sizes: int | None) -> int:
    """How many decimals it takes that `megabytes` shows different sizes differently."""
    known = {size for size in sizes if size is not None}
    for decimals in range(1, 6):
        if len({megabytes(size, decimals) for size in known}) == len(known):
            return decimals
    return 6  # bytes


def milliseconds(seconds: float | None) -> str:
    """With two decimals, and two digits at least: 0.045 and 0.063 ms differ by 40 %."""
    if seconds is None:
        return DASH
    value = 1e3 * seconds
    if 0 < value < 0.0995:
        return f"{value:.1e}" if value < 0.995e-4 else f"{value:#.2g}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def teraflops(flops: int | None) -> str:
    return DASH if flops is None else f"{flops / 1e12:,.3f} TFLOP"


def relative_change(before: float, after: float) -> str:
    """By what share a figure grows, such as `−19.2%`; or that it is much more."""
    share = after / before - 1
    return "over +9,999%" if share > 99.99 else f"{share:+.1%}".replace("-", "−")


def basis_of(time: Time) -> str:
    if time.basis == "cycles":
        return "by the compiler's cycles"
    if time.basis == "xla-model":
        return "by XLA's own model of the GPU"
    return (
        "a roofline of the longest branches"
        if time.is_open
        else "a roofline: no program reaches it"
    )


def band(time: Time) -> str:
    """How far from an estimated step the measured ones of its kind were."""
    return str(time.band or "no step that is estimated so was measured, and the error is not known")


def estimated(time: Time | None, figure: str) -> str:
    """A figure of the estimate in milliseconds, with the sign of a bound."""
    if time is None:
        return DASH
    seconds: float | None = getattr(time, figure)
    return bounded(time, seconds) if figure in _BOUNDED else milliseconds(seconds)


def bounded(time: Time, seconds: float | None) -> str:
    return (sign(time) if seconds is not None else "") + milliseconds(seconds)


def sign(time: Time | None) -> str:
    """What stands before its seconds: ≥ for a lower bound, ≳ where a part of it is one."""
    if not time or not time.counts_least:
        return ""
    return "≥ " if time.is_lower_bound else "≳ "


def most(time: Time | None) -> str:
    """What stands before a rate that follows from its seconds."""
    return sign(time).replace("≥", "≤").replace("≳", "≲")


def are_alike(a: Time | None, b: Time | None) -> bool:
    return bool(a and b and sign(a) == sign(b))


def shares(time: Time) -> str:
    values = {"MFU": time.mfu, "HFU": time.hfu, "bubble": time.bubble_share}
    parts = [
        f"{name} {'' if name == 'bubble' else most(time)}{value:.1%}"
        for name, value in values.items()
        if value is not None
    ]
    count = DASH if time.launches is None else f"{time.launches:,}"
    return ", ".join([*parts, f"{count} launches"])


def compiler(measurement: Measurement) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in measurement.versions.items() if value)
    return f"{measurement.platform} ({versions})" if versions else measurement.platform


def subject_of(measurement: Measurement) -> str:
    """What was compiled, with its mesh: `my_model:step (data=8)`, or `training step`."""
    name = measurement.config.get("function", "training step")
    mesh = ",".join(f"{axis}={size}" for axis, size in measurement.mesh.items() if size > 1)
    return f"{name} ({mesh})" if mesh else name


def account_rows(measurement: Measurement) -> dict[str, int | None]:
    """The parts of the account, then their sum; an indented part is within the one above."""
    account = measurement.account
    rows: dict[str, int | None] = {}
    for label, size in account.rows().items():
        rows[label] = size
        if label == ROWS["output_bytes"] and account.scratch_bytes:
            rows["  of these, used by temporaries first"] = account.scratch_bytes
    return {**rows, TOTAL: account.total_bytes}


def verdict_words(outcome: Outcome) -> str:
    """The verdict with its figure, such as `holds by temp` or `less memory by the account`."""
    words = outcome.question.in_words(outcome.verdict)
    if words != NOT_APPLICABLE:
        words += f" by {NAMES[outcome.question.judged_by]}"
    return f"{words}, failed" if outcome.failed else words


def same_numbers(numerics: Numerics) -> str:
    if numerics.bitwise_equal:
        return "to the bit"
    return f"{'' if numerics.within_tolerance else 'NO: '}to {numerics.max_abs_diff:.1e}"


def differ_by_gemm(triton: Outcome, cublas: Outcome) -> bool:
    """Whether the other kind of matrix product changes the memory of an arm, or the verdict."""

    def figures(outcome: Outcome) -> list[Memory | None]:
        return [m.memory if m else None for m in (outcome.a, outcome.b)]

    return (triton.verdict, figures(triton)) != (cublas.verdict, figures(cublas))


def role_totals(programs: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Bytes of each role over all programs, largest first; roles without bytes are left out."""
    totals: Counter[str] = Counter()
    for sizes in programs:
        totals.update(sizes)
    return {role: size for role, size in totals.most_common() if size}


# The colours of Okabe and Ito, which colour-blind readers can tell apart, and related ones; roles
# that are no value of the program are grey. Roles that are often side by side have colours that are
# far apart.
ROLE_COLOURS = {
    "activation": "#56b4e9",
    "saved residual": "#d55e00",
    "scan carry": "#0072b2",
    "logits": "#f0e442",
    "gathered weight": "#009e73",
    "parameter cast": "#9a7b2f",
    "parameter copy": "#6a9a3a",
    "gradient accumulator": "#cc79a7",
    "gradient": "#8e3f6f",
    "optimizer update": "#7a5fd0",
    "collective buffer": "#e69f00",
    "partial sums": "#a3423c",
    "library workspace": "#2f5d62",
    "constant": "#3d4f9f",
    "kept argument": "#8b6f5a",
    "donated argument": "#c4b5a5",
    "argument": "#75604f",
    "output": "#5b8f8a",
    "other": "#5f6a77",
    "padding": "#b9bfc7",
    "fragmentation": "#929aa5",
    "other memory space": "#a8a0c8",
}
