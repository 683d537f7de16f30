"""Tracing and lowering of a training step with a pipeline, against the same layers scanned.

    python benchmarks/trace_time.py

writes benchmarks/results/trace_time.md: CPU seconds, the least of several rounds in one process, in
which every case has its turn, and their ratio.
"""

import dataclasses
import sys
import time
from importlib.metadata import version
from pathlib import Path

import jax

from nnx_pipeline import Config, MeshConfig, make_mesh, preset
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.train import abstract_batch, abstract_state, jit_train_step

ROUNDS = 5
RESULTS = Path(__file__).parent / "results" / "trace_time.md"
PIPELINED = "stage=4,fsdp=2"
STAGES = 32
PLAIN = "none, layers scanned"


def seconds(config: Config, mesh_text: str) -> float:
    """Tracing and lowering together, on virtual CPU devices."""
    mesh = make_mesh(MeshConfig.parse(mesh_text), jax.devices("cpu"))
    with jax.set_mesh(mesh):
        jax.clear_caches()
        state, batch = abstract_state(config, mesh), abstract_batch(config, mesh)
        started = time.process_time()
        jit_train_step(state, mesh).trace(state, batch).lower()
        return time.process_time() - started


def cases() -> dict[str, tuple[Config, str]]:
    """Name, config and mesh."""
    small = preset("mixtral-small")
    changes: dict[str, dict[str, object]] = {
        "1 repeat": {},
        "2 repeats": {"num_repeats": 2},
        "2 repeats, accumulate": {"num_repeats": 2, "backward": "accumulate"},
        "2 repeats, gathered per step": {"num_repeats": 2, "fsdp_gather": "step"},
        "2 repeats, prefetched": {"num_repeats": 2, "fsdp_gather": "prefetch"},
        "1F1B": {"schedule": "1f1b"},
    }
    made = {PLAIN: (small, "fsdp=8")}
    for name, change in changes.items():
        pipeline = dataclasses.replace(small.pipeline, num_microbatches=8, **change)  # type: ignore[arg-type]
        made[name] = (dataclasses.replace(small, pipeline=pipeline), PIPELINED)
    for count in (STAGES, 512):
        for schedule in ("circular", "1f1b"):
            made[f"{STAGES} stages, {count} microbatches, 2 repeats, {schedule}"] = (
                many_stages(small, count, schedule),
                f"stage={STAGES}",
            )
    return made


def many_stages(small: Config, count: int, schedule: str) -> Config:
    """The config with two layers per stage and with many microbatches."""
    return dataclasses.replace(
        small,
        model=dataclasses.replace(small.model, num_layers=2 * STAGES),
        pipeline=dataclasses.replace(
            small.pipeline, num_microbatches=count, num_repeats=2, schedule=schedule
        ),
        train=dataclasses.replace(small.train, global_batch=count),
    )


def main() -> None:
    least = dict.fromkeys(cases(), float("inf"))
    for turn in range(ROUNDS):
        for name, case in cases().items():
            least[name] = min(least[name], seconds(*case))
        print(f"round {turn + 1} of {ROUNDS}", file=sys.stderr, flush=True)
    text = f"""# Tracing and lowering a training step

`mixtral-small`, 8 microbatches on `{PIPELINED}` if a row says nothing else, against the same model
on `fsdp=8`. CPU seconds, the least of {ROUNDS} rounds. Made by `python benchmarks/trace_time.py`,
JAX {version("jax")}, Flax {version("flax")}.

| pipeline | seconds | ratio |
|---|--:|--:|
"""
    for name, took in least.items():
        text += f"| {name} | {took:.3f} | {took / least[PLAIN]:.2f} |\n"
    write_text(str(RESULTS), text)
    print(text)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", STAGES)
    main()
