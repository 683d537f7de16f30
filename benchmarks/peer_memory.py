"""Memory of one training step beside MaxText's, same model, shapes and compiler.

    python benchmarks/peer_memory.py tpu:v5p:2x2x2 cuda:h100:8

prints a Markdown table and writes it to benchmarks/results/peer_memory.md when all is measured.
MaxText's figures: its NNX path of August 2026, JAX 0.10.2 with libtpu 0.0.42.1 or jax-cuda13-pjrt
0.10.2, remat full, dense experts, dot-product attention. Another version of a compiler gives other
figures, so compare only at these.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

from nnx_pipeline import MeshConfig, preset
from nnx_pipeline.lab.compile import Measurement, measure_step
from nnx_pipeline.lab.platform import Platform

RESULTS = Path(__file__).parent / "results" / "peer_memory.md"
TPU, H100 = "tpu:v5p:2x2x2", "cuda:h100:8"


class Row(NamedTuple):
    """A case and MaxText's bytes per device; None where it does not compile."""

    platform: str
    mesh: str
    repeats: int
    batch: int
    microbatches: int
    peer_argument: int | None
    peer_temp: int | None
    peer_peak: int | None


PIPELINE = "stage=4,fsdp=2"
ROWS = (
    Row(TPU, PIPELINE, 2, 16, 8, 357_199_360, 414_764_672, 674_285_888),
    Row(TPU, PIPELINE, 1, 16, 8, 357_191_680, 427_690_528, 704_159_200),
    Row(TPU, "fsdp=8", 1, 16, 1, 219_288_064, 374_825_568, 553_261_376),
    Row(TPU, PIPELINE, 2, 32, 16, 357_240_320, 688_147_456, 963_828_544),
    Row(TPU, PIPELINE, 2, 64, 32, 357_322_240, 1_292_356_544, 1_534_533_952),
    Row(TPU, PIPELINE, 1, 64, 32, 357_314_560, 1_358_850_784, 1_564_419_552),
    Row(H100, PIPELINE, 2, 16, 8, None, None, None),
    Row(H100, PIPELINE, 1, 16, 8, 357_161_812, 574_115_464, 931_233_840),
    Row(H100, PIPELINE, 1, 64, 32, 357_284_692, 1_049_408_392, 1_405_608_104),
    Row(H100, "fsdp=8", 1, 16, 1, 209_779_780, 534_835_304, 744_596_236),
)
HEAD = (
    "| platform | mesh | repeats | batch | microbatches | arguments | temp | heap | peak | "
    "temp, of MaxText's | peak, of MaxText's | TFLOP |\n" + "|---" * 12 + "|"
)


def measure(row: Row) -> Measurement:
    """Compiles the case at `mixtral-small`."""
    config = preset("mixtral-small")
    config = dataclasses.replace(
        config,
        pipeline=dataclasses.replace(
            config.pipeline, num_microbatches=row.microbatches, num_repeats=row.repeats
        ),
        train=dataclasses.replace(config.train, global_batch=row.batch),
    )
    return measure_step(config, MeshConfig.parse(row.mesh), Platform.parse(row.platform))


def share(ours: int | None, peer: int | None) -> str:
    """Ours as a share of MaxText's."""
    return "does not compile" if peer is None or ours is None else f"{ours / peer:.2f}"


def line(row: Row, result: Measurement) -> str:
    """The row of the table; bytes as MB of 10⁶."""
    memory = result.memory
    sizes = (memory.argument_bytes, memory.temp_bytes, memory.heap_bytes, memory.peak_bytes)
    cells = [
        *row[:5],
        *("–" if size is None else f"{size / 1e6:.1f}" for size in sizes),
        share(memory.temp_bytes, row.peer_temp),
        share(memory.peak_bytes, row.peer_peak),
        "–" if result.flops is None else f"{result.flops / 1e12:.2f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platforms", nargs="*", default=[TPU, H100])
    chosen = parser.parse_args().platforms
    lines, versions = [], {}
    for row in ROWS:
        if row.platform in chosen:
            result = measure(row)
            versions[row.platform] = {k: v for k, v in result.versions.items() if v}
            lines.append(line(row, result))
            print(lines[-1], file=sys.stderr, flush=True)
    made = f"Made by `python benchmarks/peer_memory.py {' '.join(chosen)}`; MB per device."
    compilers = "\n".join(f"- {platform}: {found}" for platform, found in versions.items())
    text = f"# mixtral-small beside MaxText\n\n{made}\n\n{HEAD}\n" + "\n".join(lines)
    text += f"\n\n{compilers}\n"
    print(text)
    if {row.platform for row in ROWS} <= set(chosen):
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
