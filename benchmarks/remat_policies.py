"""What each remat policy holds, on the device and on the host, and what time it takes.

    python benchmarks/remat_policies.py

compiles a training step of `mixtral-small` with every policy and writes
benchmarks/results/remat_policies.md.
"""

import dataclasses
import sys
from pathlib import Path

from nnx_pipeline import MeshConfig, preset
from nnx_pipeline.config._remat import POLICIES
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab.compile.platform import Platform

RESULTS = Path(__file__).parent / "results" / "remat_policies.md"
PLATFORMS = ("tpu:v5p:2x2x2", "cuda:h100:8")
ABOUT = """# Remat policies

`mixtral-small` on `stage=4,fsdp=2` with 8 microbatches and 2 repeats, one layer per stage; MB (10⁶
bytes) per device. The times are by estimate, in ms: on a TPU by the compiler's cycles, on H100 a
roofline; `wait` is for transfers between memories, those of the host among them. A dash where
something has no known time. Made by `python benchmarks/remat_policies.py`.

| policy | platform | heap | host | TFLOP | compute | wait | step |
|---|---|--:|--:|--:|--:|--:|--:|
"""


def main() -> None:
    small, text, versions = preset("mixtral-small"), ABOUT, {}
    for policy in POLICIES:
        for platform in PLATFORMS:
            pipeline = dataclasses.replace(
                small.pipeline,
                num_microbatches=8,
                num_repeats=2,
                remat=policy,
            )
            config = dataclasses.replace(small, pipeline=pipeline)
            result = measure_step(
                config, MeshConfig.parse("stage=4,fsdp=2"), Platform.parse(platform)
            )
            versions[platform] = {name: found for name, found in result.versions.items() if found}
            sizes = (result.memory.heap_bytes, result.memory.host_temp_bytes)
            flops = "–" if result.flops is None else f"{result.flops / 1e12:.2f}"
            time = result.time
            assert time is not None
            parts = time.compute_seconds, time.memory_wait_seconds, time.step_seconds
            times = ["–" if part is None else f"{part * 1e3:.2f}" for part in parts]
            cells = [f"`{policy}`", platform, *map(megabytes, sizes), flops, *times]
            text += "| " + " | ".join(cells) + " |\n"
            print(text.splitlines()[-1], file=sys.stderr, flush=True)
    text += "\n" + "".join(f"- {platform}: {found}\n" for platform, found in versions.items())
    write_text(str(RESULTS), text)


if __name__ == "__main__":
    main()
