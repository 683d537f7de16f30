"""What products in 8 bits cost a layer and a training step, and what they do to a loss.

    python benchmarks/low_precision.py [ROW …]

The rows are `layer PLATFORM`, `step PLATFORM` and `loss`; without arguments all of them. The page
is `benchmarks/results/low_precision.md`, and beside it are the figures as JSON. A row that is not
named keeps its figures. It needs the extra `quantization`.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from nnx_pipeline import Config, MeshConfig, PipelineConfig, lab, make_mesh, preset
from nnx_pipeline.experiments.programs import measure_step
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.modules import DecoderLayer
from nnx_pipeline.train.loop import train

KINDS = (None, "int8", "fp8")
# Of each device, the platform of a layer and that of a training step.
DEVICES = {
    "tpu:v5p": ("tpu:v5p:2x2x1", "tpu:v5p:2x2x2"),
    "cuda:h100": ("cuda:h100:1", "cuda:h100:8"),
}
STEPS, SEEDS = 50, (0, 1, 2)
RESULTS = Path(__file__).parent / "results" / "low_precision.json"
ABOUT = Path(__file__).parent / "results" / "low_precision_tried.md"


def dense(name: str, kind: str | None, **changes: Any) -> Config:
    """A preset with a dense MLP, and its products in the given precision."""
    config = preset(name)
    one = {"num_experts": 1, "num_experts_per_token": 1, "quantization": kind, **changes}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **one))


def figures(found: Any) -> dict[str, Any]:
    """What is kept of a measurement."""
    return {
        "temp": found.memory.temp_bytes,
        "heap": found.memory.heap_bytes,
        "flops": found.flops,
        "compute_seconds": found.time.compute_seconds if found.time else None,
        "versions": {name: text for name, text in found.versions.items() if text},
    }


def layer(kind: str | None, device: str) -> dict[str, Any]:
    """One layer of Llama 3.1 8B with 8,192 tokens on one device, forward and backward."""
    model = dense("llama3.1-8b", kind).model
    module = nnx.eval_shape(lambda: DecoderLayer(model, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((4, 2048, model.embed_dim), "bfloat16")

    def gradients(module: DecoderLayer, x: jax.Array, cotangent: jax.Array) -> Any:
        return jax.vjp(lambda module, x: module(x)[0], module, x)[1](cotangent)

    return figures(lab.measure(gradients, module, x, x, platform=DEVICES[device][0]))


def step(kind: str | None, device: str) -> dict[str, Any]:
    """A training step in a pipeline of four stages on eight devices."""
    config = dense("mixtral-small", kind, mlp_dim=4096)
    config = dataclasses.replace(config, pipeline=PipelineConfig(num_microbatches=8))
    mesh, platform = MeshConfig.parse("stage=4,fsdp=2"), Platform.parse(DEVICES[device][1])
    return figures(measure_step(config, mesh, platform))


def losses(kind: str | None, seed: int) -> list[float]:
    """The cross-entropy of every step of a small model that learns a rule, on the CPU."""
    config, mesh = dense("tiny", kind), make_mesh(MeshConfig(), jax.devices("cpu"))
    return [float(metrics.loss) for metrics in train(config, mesh, steps=STEPS, seed=seed)]


def main() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = [f"{what} {device}" for what in ("layer", "step") for device in DEVICES]
    for row in sys.argv[1:] or [*rows, "loss"]:
        for kind in KINDS:
            what, *device = row.split()
            if what == "loss":
                found: Any = [losses(kind, seed) for seed in SEEDS]
            else:
                found = {"layer": layer, "step": step}[what](kind, device[0])
            results[f"{row} {kind}"] = found
            print(row, kind, found, file=sys.stderr, flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
