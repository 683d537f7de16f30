"""Tracing and lowering of a training step with a pipeline, against the same layers scanned.

    python benchmarks/trace_time.py

Prints CPU seconds, the least of several runs in one process, and their ratio.
"""

import dataclasses
import time

import jax

from nnx_pipeline import Config, MeshConfig, make_mesh, preset
from nnx_pipeline.train import abstract_batch, abstract_state, jit_train_step

RUNS = 5


def seconds(config: Config, mesh_text: str) -> float:
    """Tracing and lowering together, on virtual CPU devices."""
    mesh = make_mesh(MeshConfig.parse(mesh_text), jax.devices("cpu"))
    least = float("inf")
    with jax.set_mesh(mesh):
        for _ in range(RUNS):
            jax.clear_caches()
            state, batch = abstract_state(config, mesh), abstract_batch(config, mesh)
            started = time.process_time()
            jit_train_step(state, mesh).trace(state, batch).lower()
            least = min(least, time.process_time() - started)
    return least


def main() -> None:
    small = preset("mixtral-small")

    def pipelined(**changes: object) -> Config:
        pipeline = dataclasses.replace(small.pipeline, num_microbatches=8, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(small, pipeline=pipeline)

    plain = seconds(small, "fsdp=8")
    print(f"no pipeline, layers scanned   {plain:.3f} s")
    cases = {
        "1 repeat": {},
        "2 repeats": {"num_repeats": 2},
        "2 repeats, accumulate": {"num_repeats": 2, "backward": "accumulate"},
        "2 repeats, gathered per step": {"num_repeats": 2, "fsdp_gather": "step"},
        "2 repeats, prefetched": {"num_repeats": 2, "fsdp_gather": "prefetch"},
        "1F1B": {"schedule": "1f1b"},
    }
    for name, changes in cases.items():
        took = seconds(pipelined(**changes), "stage=4,fsdp=2")
        print(f"{name:29s} {took:.3f} s  {took / plain:.2f} times")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
