"""What one block of Mixtral's experts costs: all on all tokens, grouped, and of limited capacity.

    python benchmarks/moe_block.py [PLATFORM …]

The block is compiled alone for one device: router and experts, forward and backward, for 8,192
tokens in bfloat16. Writes `benchmarks/results/moe_block.md`, and beside it the figures as JSON. A
platform that is not named keeps its rows.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from kept_rows import write_rows

from nnx_pipeline import RoutedMoE, lab, preset

PLATFORMS = ("tpu:v5p:2x2x1", "cuda:h100:1")
MODELS = ("mixtral-8x7b", "mixtral-small")
KINDS = ("dense", "grouped", "capacity")
BATCH, SEQUENCE = 2, 4096
RESULTS = Path(__file__).parent / "results" / "moe_block.json"


ABOUT = """# A block of experts: dense, grouped, and of limited capacity

Router and experts alone, forward and backward, 8,192 tokens in bfloat16 on one device. `dense` runs
every expert on every token, `grouped` each on those that are sent to it, and `capacity` each on as
many as 1.25 times an even share, with empty slots computed. All keep their hidden units for the
backward pass. MB are 10⁶ bytes. Operations are those of matrix products, with what
kernels state of themselves; `active` is what the chosen experts need: two products forward (no
gradient needs the down projection) and six backward. Compute is the sum of the TPU compiler's
cycles, with kernels at 65 % of the peak; on H100 kernels count in the same way, and all else by
XLA's own model. Nothing here ran on a device. Made by `python benchmarks/moe_block.py`.
"""
HEAD = (
    "| platform | block of | experts | temp, MB | of dense | TFLOP | of active | compute, ms "
    "| of dense | launches |\n" + "|---" * 3 + "|--:" * 7 + "|"
)


def step(block: RoutedMoE, x: jax.Array, cotangent: jax.Array) -> Any:
    """The gradients of the weights and of the tokens."""
    return jax.vjp(lambda block, x: block(x)[0], block, x)[1](cotangent)


def measured(model: str, kind: str, platform: str) -> dict[str, Any]:
    """The figures of one program."""
    config = dataclasses.replace(preset(model).model, experts=kind)
    block = nnx.eval_shape(lambda: RoutedMoE(config, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((BATCH, SEQUENCE, config.embed_dim), "bfloat16")
    found = lab.measure(step, block, x, x, platform=platform)
    assert found.time is not None
    chosen = 2 * BATCH * SEQUENCE * config.num_experts_per_token * config.embed_dim * config.mlp_dim
    return {
        "temp": found.memory.temp_bytes,
        "heap": found.memory.heap_bytes,
        "flops": found.flops,
        # Two products forward, whose down projection no gradient needs, and six backward.
        "flops_of_active": 8 * chosen,
        "compute_seconds": found.time.compute_seconds,
        "launches": found.time.launches,
        "versions": {name: text for name, text in found.versions.items() if text},
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The page."""
    lines = [ABOUT, HEAD]
    for platform in PLATFORMS:
        for model in MODELS:
            dense = results[f"{platform} {model} dense"]
            for kind in KINDS:
                one = results[f"{platform} {model} {kind}"]
                lines.append(
                    f"| {platform} | {model} | {kind} | {one['temp'] / 1e6:,.1f} "
                    f"| {one['temp'] / dense['temp']:.2f} | {one['flops'] / 1e12:.3f} "
                    f"| {one['flops'] / one['flops_of_active']:.2f} "
                    f"| {1e3 * one['compute_seconds']:.2f} "
                    f"| {one['compute_seconds'] / dense['compute_seconds']:.2f} "
                    f"| {one['launches']} |"
                )
    versions = {name.split()[0]: one["versions"] for name, one in results.items()}
    return "\n".join([*lines, "", *(f"- {name}: {text}" for name, text in versions.items()), ""])


def main() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for platform in sys.argv[1:] or PLATFORMS:
        for model in MODELS:
            for kind in KINDS:
                name = f"{platform} {model} {kind}"
                results[name] = measured(model, kind, platform)
                print(name, results[name], file=sys.stderr, flush=True)
                write_rows(RESULTS, results)
    RESULTS.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
