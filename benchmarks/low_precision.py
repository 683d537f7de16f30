"""What products in 8 bits cost a layer and a training step, and what they do to a loss.

    python benchmarks/low_precision.py [ROW …]

The rows are `layer PLATFORM`, `step PLATFORM`, `small PLATFORM` and `loss`; without arguments all
of them. The page is `benchmarks/results/low_precision.md`, and beside it are the figures as JSON. A
row that is not named keeps its figures. It needs the extra `quantization`.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from kept_rows import write_rows

from nnx_pipeline import Config, MeshConfig, PipelineConfig, lab, make_mesh, preset
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.modules import DecoderLayer
from nnx_pipeline.train.loop import train

KINDS = (None, "int8", "fp8")
# Of each device, the platform of a layer and that of a training step.
DEVICES = {
    "tpu:v5p": ("tpu:v5p:2x2x1", "tpu:v5p:2x2x2"),
    "cuda:h100": ("cuda:h100:1", "cuda:h100:8"),
}
STEPS, SEED = 50, 0
RESULTS = Path(__file__).parent / "results" / "low_precision.json"

ABOUT = """# Products in 8 bits

`model.quantization=int8` and `fp8` round activations and kernels to 8 bits by Qwix, for the seven
products of a dense layer, forward and for the gradients of activations. Gradients of kernels,
attention itself, embedding and head stay in the dtype of the model. Made by
`python benchmarks/low_precision.py`; nothing here ran on a TPU or GPU.
"""
LAYER = """## One layer of Llama 3.1 8B

8,192 tokens on one device, forward and backward, in bfloat16: MB (10⁶ bytes) of temp and heap,
matrix products in TFLOP, and milliseconds of compute: on a TPU the sum of the compiler's cycles, on
H100 by XLA's own model.
"""
READ = """Why fp8, for which a TPU v5p has no units, takes fewer cycles there than bfloat16, and
which arrays the H100 program holds in addition, was not looked into. No kernel was timed.
"""
STEP = """## A training step

Eight layers of Llama 3.1 8B in four stages × fsdp 2, 8 microbatches of two sequences of 2,048
tokens; figures of one device, as above. A device has 2,048 tokens of a microbatch, a quarter of
those of the layer above, and 8 bits take longer than bfloat16.
"""
SMALL = """## A training step of a small model

`mixtral-small` with a dense MLP of 4,096 hidden units in the place of its experts, in the same
stages with 8 microbatches of two sequences of 1,024 tokens. To find the scale of each row and
column takes a pass over the operand, which small products do not win back.
"""
TRIED = """## What was tried and refused

Qwix 0.1.8 quantizes a training through `QtProvider`, which replaces functions of JAX
(`jnp.einsum`, `jax.lax.dot_general`, `ragged_dot`) while a method of the model runs. With this
project's model (JAX 0.10.2, Flax 0.12.8, int8 for weights, activations and gradients; tiny
models, traced on the CPU):

- In explicit mode it fails wherever a sum runs over a sharded axis ("Contracting dimensions are
  sharded and it is ambiguous how the output should be sharded"), because it drops the argument
  `out_sharding`: with fsdp=2 and with tensor=2. In auto mode with fsdp=2, in both modes with
  stage=2, and without a mesh it runs.
- It also replaces both products of attention itself, which no rule tells from the projections:
  rules choose by module and by the name of the function. The derivative of attention is called
  after the method has returned, and is not replaced: it computes the scores again in full
  precision, and divides by a sum that the forward pass took from rounded scores. That is the
  gradient of neither precision, and nothing says so.
- With `experts=capacity` it stops: "Multiple candidate params found". It was not tried with 1F1B,
  nor with the kernels of `grouped` experts on a TPU or GPU, nor on JAX 0.12.

So it is not used. Qwix's functions on arrays (`quantize`, `dot_general`) pass `out_sharding` on,
and `ops.low_precision` calls them with a derivative of its own. `qwix.einsum` is not among them:
it may exchange its operands, and then gives `out_sharding` to a product with other axes.

Refused by name:

- experts: their products are inside derivatives of their own (`dense`, `capacity`) or kernels for
  one dtype (`grouped`: megablox and the Triton kernel),
- float16, whose small scales are rounded to 0,
- a model for which Qwix is not installed.

Every device rounds the kernels that it has gathered, at every visit; gathering rounded kernels
would move half the bytes, and is not done.
"""
LOSS = """## What it does to a loss

The cross-entropy of `tiny` with a dense MLP, in float32 on a CPU, which learns sequences of which
nine tokens in ten follow a rule; from the same initial values, with the same batches.
"""


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
    """A training step of some layers of Llama 3.1 8B."""
    config = dense("llama3.1-8b", kind, num_layers=8, attention="flash")
    train = dataclasses.replace(config.train, global_batch=16, sequence_length=2048)
    return pipelined(dataclasses.replace(config, train=train), device)


def small(kind: str | None, device: str) -> dict[str, Any]:
    """A training step of a small model."""
    return pipelined(dense("mixtral-small", kind, mlp_dim=4096), device)


def pipelined(config: Config, device: str) -> dict[str, Any]:
    """A training step in a pipeline of four stages on eight devices."""
    config = dataclasses.replace(config, pipeline=PipelineConfig(num_microbatches=8))
    mesh, platform = MeshConfig.parse("stage=4,fsdp=2"), Platform.parse(DEVICES[device][1])
    return figures(measure_step(config, mesh, platform))


def losses(kind: str | None) -> list[float]:
    """The cross-entropy of every step of a small model that learns a rule, on the CPU."""
    config, mesh = dense("tiny", kind), make_mesh(MeshConfig(), jax.devices("cpu"))
    return [float(step.metrics.loss) for step in train(config, mesh, steps=STEPS, seed=SEED)]


def table(results: dict[str, Any], what: str) -> list[str]:
    """The rows of a layer or of a step on each device."""
    lines = [
        "| device | products | temp | heap | TFLOP | compute, ms |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for device in DEVICES:
        for kind in KINDS:
            one = results.get(f"{what} {device} {kind}")
            if one is None:
                continue
            time = one["compute_seconds"]
            cells = [f"{one[name] / 1e6:,.1f}" for name in ("temp", "heap")]
            cells += [f"{one['flops'] / 1e12:.3f}", "–" if time is None else f"{time * 1e3:.2f}"]
            lines.append(f"| {device} | {kind or 'bfloat16'} | {' | '.join(cells)} |")
    return lines


def loss_table(results: dict[str, Any]) -> list[str]:
    """The loss at some steps."""
    steps = (1, 10, 20, 30, 40, STEPS)
    lines = [f"| products | {' | '.join(f'step {step}' for step in steps)} | mean of the last 10 |"]
    lines.append("|---" + "|--:" * (len(steps) + 1) + "|")
    for kind in KINDS:
        run = results.get(f"loss {kind}")
        if run:
            values = [*(run[step - 1] for step in steps), sum(run[-10:]) / 10]
            cells = " | ".join(f"{value:.4f}" for value in values)
            lines.append(f"| {kind or 'float32'} | {cells} |")
    return lines


def page(results: dict[str, Any]) -> str:
    """All tables."""
    lines = [ABOUT, LAYER, *table(results, "layer"), "", READ]
    for about, what in ((STEP, "step"), (SMALL, "small")):
        if any(name.startswith(what) for name in results):
            lines += [about, *table(results, what), ""]
    lines += [LOSS, *loss_table(results), "", TRIED]
    versions = {
        name.rsplit(" ", 1)[0]: one["versions"]
        for name, one in results.items()
        if "versions" in one
    }
    return "\n".join([*lines, *(f"- {name}: {text}" for name, text in versions.items()), ""])


CASES = {"layer": layer, "step": step, "small": small}


def main() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = [f"{what} {device}" for what in CASES for device in DEVICES]
    for row in sys.argv[1:] or [*rows, "loss"]:
        for kind in KINDS:
            what, *device = row.split()
            if what == "loss":
                found: Any = losses(kind)
            else:
                found = CASES[what](kind, device[0])
            results[f"{row} {kind}"] = found
            print(row, kind, found, file=sys.stderr, flush=True)
            write_rows(RESULTS, results)
    RESULTS.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
