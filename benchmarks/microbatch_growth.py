"""How memory grows with the number of microbatches, for each schedule and remat policy.

    python benchmarks/microbatch_growth.py
    python benchmarks/microbatch_growth.py --row "1f1b full"

compile a training step of `mixtral-small` for 8 to 128 microbatches of the same size, and write
benchmarks/results/microbatch_growth.json and, from it, microbatch_growth.md. What a call does not
measure stays as it was, and after a row its result is on disk.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from kept_rows import write_rows

from nnx_pipeline import preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.experiments import sweep
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._report.view.figures import megabytes

RESULTS = Path(__file__).parent / "results" / "microbatch_growth"
PLATFORM, MESH = "tpu:v5p:2x2x2", "stage=4,fsdp=2"
COUNTS = (8, 16, 32, 64, 128)
SIZE = 2  # sequences of a microbatch
ROWS = (
    ("1f1b", "full"),
    ("1f1b", "qkv_proj_offloaded"),
    ("1f1b", "minimal"),
    ("1f1b", "none"),
    ("circular", "full"),
)
ABOUT = f"""# Growth with the number of microbatches

`mixtral-small` on `{MESH}` of `{PLATFORM}`, one repeat, microbatches of {SIZE} sequences of 1024
tokens; MB (10⁶ bytes) per device of temp, which has no arguments in it. The last column is the
largest growth from one column to the next. Made by `python benchmarks/microbatch_growth.py`.

"""


def measure(schedule: str, policy: str) -> dict[str, Any]:
    """Temp bytes for each number of microbatches, and the versions of the compiler."""
    config = apply_overrides(
        preset("mixtral-small"), {"pipeline.schedule": schedule, "pipeline.remat": policy}
    )
    fields = {
        "pipeline.num_microbatches": COUNTS,
        "train.global_batch": [SIZE * count for count in COUNTS],
    }
    found = sweep(config, MESH, fields, platform=PLATFORM, progress=_say)
    if found.errors:
        raise SystemExit(f"{schedule}, {policy}: {'; '.join(found.errors)}")
    ((_, points),) = found.arms
    results = [point.result for point in points if point.result]
    return {
        "versions": {name: version for name, version in results[0].versions.items() if version},
        "temp_bytes": [result.memory.temp_bytes for result in results],
        "host_temp_bytes": [result.memory.host_temp_bytes for result in results],
    }


def growth(sizes: list[int]) -> float:
    """The largest growth from one number of microbatches to twice as many, as a share."""
    return max(after / before - 1 for before, after in itertools.pairwise(sizes))


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    heads = ["schedule", "`remat`", *map(str, COUNTS), "most per doubling"]
    text = ABOUT + "| " + " | ".join(heads) + " |\n|---|---" + "|--:" * (len(heads) - 2) + "|\n"
    for schedule, policy in ROWS:
        if row := rows.get(f"{schedule} {policy}"):
            sizes = map(megabytes, row["temp_bytes"])
            most = f"{growth(row['temp_bytes']):+.1%}".replace("-", "−")
            text += f"| `{schedule}` | `{policy}` | {' | '.join(sizes)} | {most} |\n"
    if sent := [on_host(name, row) for name, row in rows.items() if is_sent(row)]:
        text += "\nOn the host: " + "; ".join(sent) + ".\n"
    versions = dict.fromkeys(str(dict(sorted(row["versions"].items()))) for row in rows.values())
    return text + "\n" + "".join(f"- {version}\n" for version in versions)


def is_sent(row: dict[str, Any]) -> bool:
    """Whether a program keeps anything in host memory."""
    return any(row.get("host_temp_bytes", ()))


def on_host(name: str, row: dict[str, Any]) -> str:
    """What a program keeps in host memory, for each number of microbatches."""
    return f"`{name}` {', '.join(map(megabytes, row['host_temp_bytes']))} MB"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    file = RESULTS.with_suffix(".json")
    names = [f"{schedule} {policy}" for schedule, policy in ROWS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", action="append", choices=names)
    chosen = parser.parse_args().row or names
    rows = json.loads(file.read_text()) if file.exists() else {}
    for name in chosen:
        rows[name] = measure(*name.split())
        write_rows(file, rows)
        write_text(str(RESULTS.with_suffix(".md")), page(rows))


if __name__ == "__main__":
    main()
