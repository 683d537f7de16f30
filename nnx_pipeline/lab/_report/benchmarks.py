"""`--json` in the forms that other tools keep a history of: github-action-benchmark and Bencher."""

from collections.abc import Iterable, Iterator

from nnx_pipeline.lab._report.view.figures import compiler, products_by
from nnx_pipeline.lab.compile.measure import Measurement

BENCHER = "bencher"
_BYTES = ("account", "heap", "temp", "peak")


def benchmark_json(form: str, titled: Iterable[tuple[str, Measurement]]) -> object:
    """The figures of programs, each with its title; one that is not known is left out.

    - `form`: `github-action-benchmark` (its customSmallerIsBetter) or `bencher`.
    """
    measured = [(_named(title, one), one) for title, one in titled]
    if form == BENCHER:
        return {
            name: {measure: {"value": value} for measure, value, _, _ in _figures(one)}
            for name, one in measured
        }
    return [
        {
            "name": f"{name}: {measure.partition('-')[0]}",
            "unit": unit,
            "value": round(value / size, 6),
            "extra": compiler(one),
        }
        for name, one in measured
        for measure, value, unit, size in _figures(one)
    ]


def _named(title: str, result: Measurement) -> str:
    """What a program is called in a history: with all that tells it from others of one run."""
    by = f", matrix products by {products_by(result)}" if result.gemm else ""
    return f"{title}, {result.platform}{by}"


def _figures(result: Measurement) -> Iterator[tuple[str, float, str, float]]:
    """The name of each known figure with its unit, its value in bytes or seconds, and what the
    value is divided by for people."""
    for name in _BYTES:
        if (size := getattr(result.memory, f"{name}_bytes")) is not None:
            yield f"{name}-bytes", size, "MB", 1e6
    if result.time and result.time.step_seconds is not None:
        yield "step-seconds", result.time.step_seconds, "ms", 1e-3
