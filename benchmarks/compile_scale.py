"""What it takes to compile more stages, repeats and layers per stage.

    python benchmarks/compile_scale.py

compiles a training step of `mixtral-small`'s layers for TPU v5p and writes
benchmarks/results/compile_scale.md. Times are CPU seconds of all threads of the compiler, which
other work on the machine changes little, and their ratio to those of the row above.
"""

import dataclasses
import sys
import time
from pathlib import Path

import jax

from nnx_pipeline import Config, MeshConfig, preset
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab.compile.platform import Platform

RESULTS = Path(__file__).parent / "results" / "compile_scale.md"
POD, SLICE = "tpu:v5p:4x4x4", "tpu:v5p:2x2x2"
HEAD = (
    "| {} | layers | CPU seconds | of the row above | temp | heap | compute, ms "
    "| size of the HLO text |\n"
)
RULE = "|---|--:|--:|--:|--:|--:|--:|--:|\n"


def config_of(layers: int, batch: int, **pipeline: object) -> Config:
    """`mixtral-small` with that many layers and sequences."""
    small = preset("mixtral-small")
    return dataclasses.replace(
        small,
        model=dataclasses.replace(small.model, num_layers=layers),
        pipeline=dataclasses.replace(small.pipeline, **pipeline),  # type: ignore[arg-type]
        train=dataclasses.replace(small.train, global_batch=batch),
    )


class Table:
    """Rows that are measured one after the other."""

    def __init__(self, title: str, first: str) -> None:
        self.text = f"## {title}\n\n{HEAD.format(first)}{RULE}"
        self.before: float | None = None

    def add(self, name: str, config: Config, mesh: str, platform: str) -> None:
        """Compiles one case."""
        jax.clear_caches()
        started = time.process_time()
        result = measure_step(config, MeshConfig.parse(mesh), Platform.parse(platform))
        took = time.process_time() - started
        memory = result.memory
        cells = [
            name,
            config.model.num_layers,
            f"{took:.1f}",
            f"{took / self.before:.2f}" if self.before else "–",
            megabytes(memory.temp_bytes),
            megabytes(memory.heap_bytes),
            f"{1e3 * result.time.compute_seconds:.1f}" if result.time else "–",
            f"{len(result.hlo) / 1e6:.2f} MB",
        ]
        row = "| " + " | ".join(map(str, cells)) + " |\n"
        print(row, end="", file=sys.stderr, flush=True)
        self.text += row
        self.before = took
        self.versions = {name: found for name, found in result.versions.items() if found}


def main() -> None:
    grid = Table(
        f"Stages and repeats, on `{POD}` (64 chips, fsdp over the rest)", "stages × repeats"
    )
    for stages, repeats in ((2, 1), (4, 4), (8, 8), (16, 1), (16, 4), (16, 16)):
        config = config_of(
            stages * repeats, 2 * 64, num_repeats=repeats, num_microbatches=2 * stages
        )
        grid.add(f"{stages} × {repeats}", config, f"stage={stages},fsdp={64 // stages}", POD)
    tables = [grid]
    loops: dict[str, dict[str, object]] = {
        "": {},
        ", `backward=accumulate`": {"backward": "accumulate"},
        ", 1F1B": {"schedule": "1f1b"},
    }
    for name, pipeline in loops.items():
        deep = Table(f"Layers per stage, 4 stages × fsdp 2 on `{SLICE}`{name}", "layers per stage")
        for layers in (1, 2, 4, 8, 16):
            config = config_of(4 * layers, 16, num_microbatches=8, **pipeline)
            deep.add(str(layers), config, "stage=4,fsdp=2", SLICE)
            if 1 < layers <= config.pipeline.unrolled_layers:
                looped = dataclasses.replace(config.pipeline, unrolled_layers=1)
                config = dataclasses.replace(config, pipeline=looped)
                deep.add(f"{layers} in a loop", config, "stage=4,fsdp=2", SLICE)
        tables.append(deep)
    text = "# Compiling more stages, repeats and layers\n\n"
    text += "Made by `python benchmarks/compile_scale.py`; MB (10⁶ bytes) per device.\n\n"
    text += "\n".join(table.text for table in tables)
    write_text(str(RESULTS), f"{text}\nCompiler: {grid.versions}.\n")


if __name__ == "__main__":
    main()
