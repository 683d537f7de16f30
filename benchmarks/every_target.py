"""One training step of `mixtral-small`, compiled for eight devices of every target.

    python benchmarks/every_target.py FOLDER

takes about a minute for each target of `nnx-pipeline platforms`, and writes
`benchmarks/results/every_target.md`. FOLDER gets what `nnx-pipeline measure --json` writes for
each; a target whose file is there is not compiled again.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from nnx_pipeline.lab._cli.platforms import BASES
from nnx_pipeline.lab.compile.platform import Platform, targets

RESULTS = Path(__file__).parent / "results" / "every_target.md"
STEP = "--mesh stage=4,fsdp=2 --set pipeline.num_microbatches=8"
ABOUT = f"""# One training step on every target

`nnx-pipeline measure mixtral-small {STEP} --platform …`
for eight devices of each target, compiled without one. MB (10⁶ bytes) and milliseconds of a device;
for a GPU with matrix products by Triton, and temp also by the library of its maker (cuBLASLt or
hipBLASLt). ≥ is a lower bound, and of ≳ a part is one. Made by `python benchmarks/every_target.py`
with JAX VERSION.

| platform | arguments | temp | by the library | outputs | step, ms | time by |
|---|--:|--:|--:|--:|--:|---|
"""


def of_eight(host: Platform) -> str:
    """Eight devices of the same kind."""
    if host.is_gpu:
        return f"{host.kind}:{host.target}:8"
    larger = {"2x2": "2x4", "2x2x1": "2x2x2"}[host.topology]
    return str(host) if host.devices_per_chip == 2 else f"tpu:{host.target}:{larger}"


def measured(platform: str, file: Path) -> dict[str, Any]:
    if not file.exists():
        command = ["nnx-pipeline", "measure", "mixtral-small", *STEP.split()]
        subprocess.run([*command, "--platform", platform, "--json", str(file)], check=True)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def line(found: dict[str, Any]) -> str:
    memory, time, other = found["memory"], found["time"], found.get("other_gemm")
    sizes = [memory["argument_bytes"], memory["temp_bytes"]]
    sizes += [other["memory"]["temp_bytes"] if other else None, memory["output_bytes"]]
    cells = ["–" if size is None else f"{size / 1e6:,.1f}" for size in sizes]
    seconds = time["step_seconds"]
    sign = "≥ " * time["is_lower_bound"] + "≳ " * time["is_partial"]
    step = f"{sign}{1e3 * seconds:.2f}" if seconds else "–"
    return "| " + " | ".join([found["platform"], *cells, step, BASES[time.get("basis")]]) + " |"


def main() -> None:
    folder = Path(sys.argv[1])
    names = list(map(of_eight, targets()))
    rows = [measured(name, folder / f"{name.replace(':', '-')}.json") for name in names]
    about = ABOUT.replace("VERSION", rows[0]["versions"]["jax"])
    RESULTS.write_text(about + "\n".join([*map(line, rows), ""]), "utf-8")


if __name__ == "__main__":
    main()
