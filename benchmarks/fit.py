"""Whether `nnx-pipeline fit` finds what a compile of every value finds, and what it proves.

    python benchmarks/fit.py scan tpu:v5p:2x2x1
    python benchmarks/fit.py prove tpu:v5p:2x2x1
    python benchmarks/fit.py

compile every value of small programs; search the largest value of training steps, and compile it
and the next one afresh; and write benchmarks/results/fit.md from both. The first two continue where
they stopped: their results are in fit.json.
"""

import dataclasses
import fcntl
import functools
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fit_steps
from kept_rows import write_rows

from nnx_pipeline import MeshConfig, lab, preset
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.search.bracket import bracket
from nnx_pipeline.lab.search.effort import Effort
from nnx_pipeline.lab.search.largest import Largest, NotUsable, find_largest
from nnx_pipeline.lab.search.over import MemoryLimit, Over

RESULTS = Path(__file__).parent / "results" / "fit.json"
PLATFORMS = ("tpu:v5p:2x2x1", "cuda:h100:1", "rocm:mi300x:1")
LIMITS = 70  # of each scan, between the lowest and the highest account
CACHE = Cache(Path(tempfile.gettempdir()) / "nnx-pipeline-fit")  # of searches that were stopped
FEWEST = 64  # values that a scan must have compiled, from the lowest on
DASH = "–"
Found = dict[str, Any]


class Scan(NamedTuple):
    function: Callable[..., object]
    inputs: Callable[..., tuple[object, ...]]
    over: Over


SCANS = {
    "scores": Scan(fit_steps.scores, fit_steps.scores_inputs, Over.parse("rows=64..8192:64")),
    "mlp": Scan(fit_steps.mlp, fit_steps.mlp_scan_inputs, Over.parse("batch=1..128")),
}
MIXTRAL = preset("mixtral-small")


def of_function(name: str) -> Callable[[str, int, Platform], Measurement]:
    """Measures a step of fit_steps.py whose inputs take a number."""

    def make(number: str, value: int, platform: Platform) -> Measurement:
        arguments = getattr(fit_steps, f"{name}_inputs")(**{number: value})
        return lab.measure(getattr(fit_steps, f"{name}_step"), *arguments, platform=platform)

    return make


def of_mixtral(
    number: str, value: int, platform: Platform, mesh: MeshConfig = MeshConfig()
) -> Measurement:
    """Measures a training step of two layers of mixtral-small."""
    config = dataclasses.replace(
        MIXTRAL,
        model=dataclasses.replace(MIXTRAL.model, num_layers=2),
        train=dataclasses.replace(MIXTRAL.train, **{number: value}),
    )
    return measure_step(config, mesh, platform)


on_four = functools.partial(of_mixtral, mesh=MeshConfig(fsdp=4))


ASKED = (  # what, how a value is measured, the range, the limit, and on which platforms
    ("mlp", of_function("mlp"), "batch=1..8192", "95%", PLATFORMS),
    ("mlp", of_function("mlp"), "batch=1..512", "4GB", PLATFORMS),
    ("attention", of_function("attention"), "sequence=128..65536:128", "90%", PLATFORMS),
    ("nnx", of_function("nnx"), "batch=1..4096", "100%", PLATFORMS),
    ("nnx", of_function("nnx"), "batch=1..4096", "20GB", PLATFORMS),
    ("nnx", of_function("nnx"), "layers=1..64", "10GB", PLATFORMS),
    ("mixtral-small, 2 layers", of_mixtral, "global_batch=1..4096", "95%", PLATFORMS[1:]),
    (
        "mixtral-small, 2 layers",
        of_mixtral,
        "sequence_length=128..16384:128",
        "20GB",
        PLATFORMS[1:],
    ),
    ("mixtral-small, 2 layers, fsdp=4", on_four, "global_batch=4..16384:4", "95%", PLATFORMS[:1]),
    (
        "mixtral-small, 2 layers, fsdp=4",
        on_four,
        "sequence_length=128..16384:128",
        "20GB",
        PLATFORMS[:1],
    ),
)


def read() -> Found:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"scans": {}, "proofs": {}}


def keep(kind: str, key: str, name: str, value: Any) -> None:
    """Adds a result to the file, which several processes may write to."""
    with open(Path(tempfile.gettempdir()) / "nnx-pipeline-fit.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = read()
        results[kind].setdefault(key, {})[name] = value
        write_rows(RESULTS, results)


def scan(platform: str) -> None:
    """Compiles every value; of a program that its compiler refuses the account is known too."""
    for name, (function, inputs, over) in SCANS.items():
        key = f"{name}, {platform}"
        for value in over.values:
            if str(value) in read()["scans"].get(key, {}):
                continue
            try:
                measured = lab.measure(function, *inputs(value), platform=platform)
                found: int | str = measured.needed_bytes
            except Exception as error:
                found = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            keep("scans", key, str(value), found)
            say(f"{key} {value} {found}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prove(name: str) -> None:
    """Searches, then compiles what it says fits and the next value once more, without a cache."""
    platform = Platform.parse(name)
    for subject, make, over_text, limit_text, platforms in ASKED:
        key = f"{subject}: --over {over_text} --limit {limit_text}"
        if name not in platforms or name in read()["proofs"].get(key, {}):
            continue
        over, limit = Over.parse(over_text), MemoryLimit.parse(limit_text, platform)
        found = Largest(over, limit, name)
        made = functools.partial(make, over.name, platform=platform)
        effort = Effort(what=f"{key}, {name}", most=0, cache=CACHE, say=say)
        try:
            find_largest(found, made, effort)
        except (InputError, NotUsable) as error:
            keep("proofs", key, name, {"error": str(error).splitlines()[0][:200]})
            continue
        ends = [found.value, found.too_large]
        result = {
            "limit_bytes": limit.bytes,
            "ends": ends,
            "afresh": [None if one is None else made(one).needed_bytes for one in ends],
            "compiles": len(found.tried),
            "tried": {str(one.value): one.needed_bytes for one in found.rows},
        }
        keep("proofs", key, name, result)
        say(f"{key} {name} {result}")


class Search(NamedTuple):
    """One search in a scan: what it found, the true best, and what both compiled."""

    found: int | None
    best: int | None
    compiles: int
    all: int


def searches(values: range, sizes: dict[int, float | None]) -> list[Search]:
    """A search for each of the limits, which takes the figures of the scan."""
    known = [size for size in sizes.values() if size is not None]
    low, high = min(known), max(known)
    results = []
    for number in range(LIMITS):
        limit = low + (high - low) * (number + 0.5) / LIMITS
        asked: list[int] = []

        def size_of(value: int, asked: list[int] = asked) -> float | None:
            asked.append(value)
            return sizes[value]

        found = bracket(values, limit, size_of).fits
        fitting = [value for value, size in sizes.items() if size is not None and size <= limit]
        results.append(Search(found, max(fitting, default=None), len(asked), len(sizes)))
    return results


ABOUT = f"""# The largest that fits, beside a compile of every value

Made by `python benchmarks/fit.py scan PLATFORM`, `prove PLATFORM`, and without a word. The programs
are in [fit_steps.py](../fit_steps.py). For NVIDIA and AMD their matrix products are Triton's.

## Beside exhaustive search

Every value of a range was compiled once, of `scores` from 64 rows on in steps of 64, of `mlp` from
a batch of 1 on. Then {LIMITS} limits, in equal steps between the lowest
and the highest account, were asked for: each search takes the account of a value from the scan, and
counts it as a compile. `right` are the searches whose answer is the largest of all that fit.
"""
HEAD = (
    "| program and platform | values | did not compile | accounts that fall | searches | right "
    "| compiles, mean | most | share of all values |\n|---|" + "--:|" * 8
)
PROVED = """
## Beside fresh compiles

Each was searched, and then the value that fits and the next one were compiled once more, without
a cache. `of limit` is the account by that compile.
"""
HEAD_PROVED = (
    "| asked | platform | limit, GB | fits | of limit | does not | of limit | compiles | proved |"
    "\n|---|---|" + "--:|" * 6 + "---|"
)


def scan_rows(scans: Found) -> tuple[list[str], list[Search]]:
    rows, every = [], []
    for key, found in sorted(scans.items()):
        values = SCANS[key.split(", ")[0]].over.values
        done = [*itertools.takewhile(lambda value, found=found: str(value) in found, values)]
        sizes = {
            value: None if isinstance(size := found[str(value)], str) else float(size)
            for value in done
        }
        if len(done) < FEWEST:
            continue
        results = searches(values[: len(done)], sizes)
        known = [size for size in sizes.values() if size is not None]
        fall = sum(b < a for a, b in itertools.pairwise(known))
        counts = [one.compiles for one in results]
        right = sum(one.found == one.best for one in results)
        mean = statistics.mean(counts)
        cells = (key, len(sizes), len(sizes) - len(known), fall, len(results), right)
        rows.append(
            "| " + " | ".join(map(str, cells)) + f" | {mean:.1f} | {max(counts)} "
            f"| {mean / len(sizes):.1%} |"
        )
        every += results
    return rows, every


def proof_rows(proofs: Found) -> tuple[list[str], str]:
    """The rows, and in words how many answers and values were proved."""
    rows, proved, too_large, asked = [], 0, 0, 0
    for key, platforms in sorted(proofs.items()):
        for platform, found in sorted(platforms.items()):
            asked += 1
            if "error" in found:
                rows.append(f"| {key} | {platform} | | | | | | | {found['error']} |")
                continue
            limit, (fits, above) = found["limit_bytes"], found["ends"]
            sizes = [*found["afresh"], None][:2]
            shares = [DASH if size is None else f"{size / limit:.4f}" for size in sizes]
            holds = sizes[0] is not None and sizes[0] <= limit
            holds = holds and (above is None or (sizes[1] is not None and sizes[1] > limit))
            proved += holds
            too_large += holds and above is not None
            rows.append(
                f"| {key} | {platform} | {limit / 1e9:.2f} | {fits} | {shares[0]} "
                f"| {above or 'all fit'} | {shares[1]} | {found['compiles']} "
                f"| {'yes' if holds else 'NO'} |"
            )
    said = (
        f"{proved} of {asked} answers were proved: {proved} values fit, and of the next "
        f"{too_large} do not; else all of the range fits."
    )
    return rows, said


def document() -> str:
    results = read()
    rows, every = scan_rows(results["scans"])
    proofs, said = proof_rows(results["proofs"])
    right = sum(one.found == one.best for one in every)
    few = sum(10 * one.compiles <= one.all for one in every)
    compiles, all_of_them = sum(one.compiles for one in every), sum(one.all for one in every)
    found = (
        f"{right} of {len(every)} searches found the largest of all values that fit, "
        f"{few} of them with at most a tenth of the compiles: {compiles:,} in the place of "
        f"{all_of_them:,}, as many as each search alone would make."
    )
    wrong = "".join(
        f"\nOne found {one.found}, where {one.best} fits too, above values that do not."
        for one in every
        if one.found != one.best
    )
    parts = (ABOUT, HEAD, *rows, "", found + wrong, PROVED, HEAD_PROVED, *proofs, "", said)
    return "\n".join(parts) + "\n"


def main() -> None:
    match sys.argv[1:]:
        case ["scan", platform]:
            scan(platform)
        case ["prove", platform]:
            prove(platform)
        case []:
            write_text(str(RESULTS.with_suffix(".md")), document())
        case words:
            sys.exit(f"{' '.join(words)}: write scan PLATFORM, prove PLATFORM, or nothing")


if __name__ == "__main__":
    main()
