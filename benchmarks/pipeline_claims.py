"""Every claim of the lab at `mixtral-small`, on the compilers of four makers.

    python benchmarks/pipeline_claims.py tpu:v5p:2x2x2
    python benchmarks/pipeline_claims.py "cuda:h100:8"
    python benchmarks/pipeline_claims.py "cuda:h100:8 cublas"
    python benchmarks/pipeline_claims.py "rocm:mi300x:8"
    python benchmarks/pipeline_claims.py "rocm:mi355x:8"
    python benchmarks/pipeline_claims.py cpu
    python benchmarks/pipeline_claims.py cpu --experiment delay --experiment backward

each measure with one compiler and write benchmarks/results/pipeline_claims.json and, from it,
pipeline_claims.md; without a compiler it is all of them, one after the other. What a call does not
measure stays as it was; each experiment names its compiler. After an experiment its result is on
disk, and each arm is in the cache of `nnx-pipeline compare` as soon as it is measured: a call that
was stopped goes on where it was when it is repeated with the same versions and source. --fresh
measures again. Arms that are one program are compiled once, and numbers are compared once for all
compilers.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

# Half the time goes into machine code for the CPU, which no figure here depends on.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from kept_rows import write_rows

from nnx_pipeline import MeshConfig, preset
from nnx_pipeline.experiments._registry import EXPERIMENTS
from nnx_pipeline.experiments._run import run_experiments
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab._report.view.remarks import CPU_WARNING
from nnx_pipeline.lab.comparison.outcome import Outcome
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile.platform import Platform

RESULTS = Path(__file__).parent / "results" / "pipeline_claims.json"
H100 = Platform.parse("cuda:h100:8")
PLATFORMS = {
    "tpu:v5p:2x2x2": Platform.parse("tpu:v5p:2x2x2"),
    "cuda:h100:8": H100,
    "cuda:h100:8 cublas": dataclasses.replace(H100, gemm="cublas"),
    "rocm:mi300x:8": Platform.parse("rocm:mi300x:8"),
    "rocm:mi355x:8": Platform.parse("rocm:mi355x:8"),
    "cpu": Platform.parse("cpu"),
}
MESH, MICROBATCHES = "stage=4,fsdp=2", 8
MESHES = {"zero-1": "data=2,stage=4", "expert-reshard": "stage=4,expert=2"}
HEAD = (
    "| experiment | claim | arm a | arm b | temp a | temp b | b/a | heap a | heap b | b/a "
    "| peak a | peak b | compute a | compute b | b/a | verdict | numbers apart by |\n"
    + "|---" * 4
    + "|--:" * 11
    + "|---|--:|"
)
GEMM = {
    "cuda:h100:8": "Matrix products by Triton. A device would choose by trying: the band is from "
    "here to the next table.",
    "cuda:h100:8 cublas": "Matrix products by cuBLASLt.",
    **dict.fromkeys(("rocm:mi300x:8", "rocm:mi355x:8"), "Matrix products by Triton."),
}
ABOUT = f"""# The claims, measured

`mixtral-small` on `{MESH}` with {MICROBATCHES} microbatches, where an experiment sets nothing else
({", ".join(f"`{name}` is on `{mesh}`" for name, mesh in MESHES.items())}); MB (10⁶ bytes) per
device. Arm b does what the claim says is better: `holds` is fewer temp bytes in b, `opposite` more,
`no effect` a difference below 1 %: a note says whether the compiler makes one program of both arms,
or two programs. On a TPU temp counts other memory spaces too, and the heap is the better figure;
whether a program fits is decided by the account: where either disagrees, a note says so. Compute is
ms of a step without its collectives: on a TPU by the cycles that the compiler estimates, and on a
GPU by what its table says. `shard-variable` is about the creation of the parameters,
`stage-metadata` about what the host holds while the step is traced. The last column is the largest
difference of any loss or gradient between the arms, relative to the largest value of its array, at
`tiny` on 8 CPU devices. Made by

    python benchmarks/pipeline_claims.py

for each compiler.

Other versions of a compiler give other figures.
"""


def entry(outcome: Outcome) -> dict[str, Any]:
    """What the table needs of one outcome."""
    full = outcome.to_json()
    arms = {}
    for key, result in (("a", outcome.a), ("b", outcome.b)):
        arms[key] = {"label": full["arms"][key]["label"]}
        if result:
            arms[key] |= result.memory.to_json()
            arms[key]["compute_seconds"] = result.time and result.time.compute_seconds
            arms[key]["basis"] = result.time and result.time.basis
    measured = outcome.a or outcome.b
    return {
        "claim": full["claim"],
        "difference": full["difference"],
        "arms": arms,
        "ratio_temp": full["ratio_temp"],
        "numerics": full["numerics"],
        "verdict": full["verdict"],
        "same_program": full["same_program"],
        "note": full["note"],
        "compiler": {k: v for k, v in measured.versions.items() if v} if measured else None,
    }


def line(name: str, found: dict[str, Any]) -> str:
    """The row of the table."""
    a, b = found["arms"]["a"], found["arms"]["b"]
    numerics = found["numerics"]
    cells = [name, found["claim"], a["label"], b["label"]]
    for key in ("temp_bytes", "heap_bytes"):
        before, after = a.get(key), b.get(key)
        ratio = f"{after / before:.3f}" if before and after is not None else "–"
        cells += [megabytes(before), megabytes(after), ratio]
    cells += [megabytes(arm.get("peak_bytes")) for arm in (a, b)]
    before, after = (arm.get("compute_seconds") for arm in (a, b))
    cells += ["–" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in (before, after)]
    cells.append(f"{after / before:.3f}" if before and after else "–")
    apart = numerics and numerics.get("worst_relative", numerics["max_abs_diff"])
    cells += [found["verdict"], f"{apart:.1e}" if numerics else "–"]
    return "| " + " | ".join(cells) + " |"


def summary(found: dict[str, dict[str, Any]]) -> str:
    """How many of the source documents' claims hold with one compiler, and which are moot."""
    claims = {name: one for name, one in found.items() if one["claim"] != "design"}
    named = {verdict: [] for verdict in ("holds", "opposite", "no effect", "not applicable")}
    for name, one in claims.items():
        named[one["verdict"]].append(name)
    one_program = [name for name in named["no effect"] if claims[name].get("same_program")]
    two = [name for name in named["no effect"] if name not in one_program]

    def listed(names: list[str]) -> str:
        return f"{len(names)} ({', '.join(f'`{name}`' for name in names)})" if names else "none"

    text = f"Of {len(claims)} claims of the source documents {len(named['holds'])} hold, "
    text += f"{len(named['opposite'])} are opposite, and {len(one_program) + len(two)} are moot: "
    text += (
        f"one program is what the compiler makes of both arms in {listed(one_program)}, and two "
    )
    text += f"with the same memory in {listed(two)}. "
    return text + f"Not applicable: {listed(named['not applicable'])}."


def basis(platform: str, found: dict[str, dict[str, Any]]) -> str:
    """By what the compute of a GPU is known."""
    why = PLATFORMS[platform].why_a_roofline
    arms = [arm for one in found.values() for arm in one["arms"].values() if "temp_bytes" in arm]
    if not why and all("basis" in arm for arm in arms):
        return "Compute is by XLA's own model."
    why = why or "it was measured before XLA's own model was read"
    return f"Compute is a roofline, because {why}."


def section(platform: str, found: dict[str, dict[str, Any]]) -> str:
    """What one compiler gives: the table, the compiler and the notes."""
    why = PLATFORMS[platform].why_a_roofline
    said = [CPU_WARNING] if platform == "cpu" else []
    said += [GEMM[platform]] if platform in GEMM else []
    said += [basis(platform, found)] if PLATFORMS[platform].is_gpu else []
    said += [summary(found), "\n".join([HEAD, *(line(*pair) for pair in found.items())])]
    compilers = {
        json.dumps(one["compiler"], sort_keys=True) for one in found.values() if one["compiler"]
    }
    lines = []
    for compiler in sorted(compilers):
        packages = ", ".join(f"{name} {value}" for name, value in json.loads(compiler).items())
        lines.append(f"Compiler: {packages}.")
    text = f"## {platform}\n\n" + "\n\n".join([*said, "\n".join(lines)]) + "\n"
    for name, one in found.items():
        notes = [note for note in one["note"].split("; ") if not (why and why in note)]
        text += f"\n- {name}: {'; '.join(notes)}" if any(notes) else ""
    missing = [name for name in EXPERIMENTS if name not in found]
    text += f"\n- not measured: {', '.join(missing)}" if missing else ""
    return text.rstrip("\n") + "\n"


def document(results: dict[str, dict[str, Any]]) -> str:
    """The Markdown file: one table per platform, then what differs between the arms."""
    parts = [ABOUT]
    for platform in PLATFORMS:
        found = results.get(platform, {})
        if there := {name: found[name] for name in EXPERIMENTS if name in found}:
            parts.append(section(platform, there))
    differences = "".join(f"- `{one.name}`: {one.difference}.\n" for one in EXPERIMENTS.values())
    return "\n".join([*parts, f"## The differences\n\n{differences}"])


def read() -> dict[str, dict[str, Any]]:
    """All results on disk, by platform and experiment."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(results: dict[str, dict[str, Any]]) -> None:
    """Both files."""
    write_rows(RESULTS, dict(sorted(results.items())))
    write_text(str(RESULTS.with_suffix(".md")), document(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platforms", nargs="*", metavar="COMPILER", help=", ".join(PLATFORMS))
    parser.add_argument("--experiment", action="append", choices=EXPERIMENTS)
    parser.add_argument("--fresh", action="store_true", help="measure what the cache has, too")
    asked = parser.parse_args()
    if unknown := set(asked.platforms) - set(PLATFORMS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(PLATFORMS)}")
    cache = Cache.of_user(fresh=asked.fresh)
    config = preset("mixtral-small")
    pipeline = dataclasses.replace(config.pipeline, num_microbatches=MICROBATCHES)
    config = dataclasses.replace(config, pipeline=pipeline)
    for name in asked.platforms or PLATFORMS:

        def keep(outcome: Outcome, platform: str = name) -> None:
            results, found = read(), entry(outcome)  # another call may have written meanwhile
            results.setdefault(platform, {})[outcome.question.name] = found
            write(results)
            print(line(outcome.question.name, found), file=sys.stderr, flush=True)

        for key in asked.experiment or EXPERIMENTS:
            mesh = MeshConfig.parse(MESHES.get(key, MESH))
            chosen = [EXPERIMENTS[key]]
            run_experiments(chosen, config, mesh, PLATFORMS[name], cache=cache, finished=keep)


if __name__ == "__main__":
    main()
