"""What one attention layer of Mixtral 8x7B holds as the sequence grows, by kind of attention.

    python benchmarks/attention_memory.py [PLATFORM …] [--missing]

The layer is compiled alone for one device, forward and backward, for one sequence in bfloat16. The
page is `benchmarks/results/attention_memory.md`, and beside it are the figures as JSON. A platform
that is not named keeps its rows, and with `--missing` so does every row that has figures.
`flash` for an H100 needs the extra `cudnn`.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from kept_rows import write_rows

from nnx_pipeline import lab, preset
from nnx_pipeline.modules.attention import Attention

PLATFORMS = ("cpu", "tpu:v5p:2x2x1", "cuda:h100:1")
SEQUENCES = (4096, 8192, 16384, 32768)
LONGEST_UNROLLED = 8192  # the program of `dot_product` grows with the sequence: see the page
WINDOW = 4096
# The name of a row: kind of attention, and its window.
KINDS: dict[str, tuple[str, int | None]] = {
    "dot_product": ("dot_product", None),
    "chunked": ("chunked", None),
    "flash": ("flash", None),
    f"chunked, window {WINDOW}": ("chunked", WINDOW),
    f"flash, window {WINDOW}": ("flash", WINDOW),
}
RESULTS = Path(__file__).parent / "results" / "attention_memory.json"

ABOUT = """# One attention layer as the sequence grows

Projections, rotary embedding and attention of one layer of Mixtral 8x7B (32 query and 8 key-value
heads of 128), forward and backward, one sequence in bfloat16 on one device: temp in MB (10⁶ bytes),
matrix products in TFLOP, and milliseconds of compute. Operations of a kernel are those that it
states: tiles that the mask leaves out do not count, and the others in full. `flash` on a TPU is
JAX's splash attention; on H100 it is cuDNN, of which every pair of a query and a key that it may
read counts, because the library says nothing of its tiles. With a window only sequences are shown
that are longer. `dot_product` writes its blocks of 512 queries out one by one, and was not compiled
for more than 8,192 tokens: for 16,384 it had taken the TPU compiler more than six minutes on a busy
machine.

Compute on a TPU is the sum of the compiler's cycles, with kernels at 65 % of the peak. On H100 it
is a roofline, which counts some arrays of the whole sequence, of which `chunked` writes one block
at a time and in place, as written whole at every tile: its figures for `chunked` there are too
long, the more so the longer the sequence. A CPU has no estimate. Nothing here ran on a device. Made
by `python benchmarks/attention_memory.py`.
"""


def step(layer: Attention, x: jax.Array, cotangent: jax.Array) -> Any:
    """The gradients of the weights and of the tokens."""
    return jax.vjp(lambda layer, x: layer(x), layer, x)[1](cotangent)


def measured(kind: str, window: int | None, length: int, platform: str) -> dict[str, Any]:
    """The figures of one program."""
    model = preset("mixtral-8x7b").model
    config = dataclasses.replace(model, attention=kind, sliding_window=window)
    layer = nnx.eval_shape(lambda: Attention(config, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((1, length, config.embed_dim), "bfloat16")
    found = lab.measure(step, layer, x, x, platform=platform)
    return {
        "temp": found.memory.temp_bytes,
        "heap": found.memory.heap_bytes,
        "flops": found.flops,
        "compute_seconds": found.time.compute_seconds if found.time else None,
        "versions": {name: text for name, text in found.versions.items() if text},
    }


def names(platform: str) -> list[tuple[str, int]]:
    """The rows of a platform, kind and length of the sequence, with the slowest to compile last."""
    rows = [
        (kind, length)
        for kind, (attention, window) in KINDS.items()
        for length in SEQUENCES
        if (window is None or length > window)
        and (attention != "flash" or platform != "cpu")
        and (attention != "dot_product" or length <= LONGEST_UNROLLED)
    ]
    return sorted(rows, key=lambda row: row[0] == "dot_product")


def table(results: dict[str, dict[str, Any]]) -> str:
    """The page."""
    lines = [ABOUT]
    for platform in PLATFORMS:
        head = " | ".join(f"{length:,}" for length in SEQUENCES)
        for figure, digits, scale in (
            ("temp", 1, 1e-6),
            ("flops", 2, 1e-12),
            ("compute_seconds", 2, 1e3),
        ):
            if figure == "compute_seconds" and platform == "cpu":
                continue
            lines += [f"## {platform}: {figure.split('_')[0]}", ""]
            lines += [f"| attention | {head} |", "|---" + "|--:" * len(SEQUENCES) + "|"]
            for kind in KINDS:
                cells = []
                for length in SEQUENCES:
                    one = results.get(f"{platform} {kind} {length}", {}).get(figure)
                    cells.append("–" if one is None else f"{one * scale:,.{digits}f}")
                if {*cells} != {"–"}:
                    lines.append(f"| {kind} | {' | '.join(cells)} |")
            lines.append("")
    versions = {name.split()[0]: one["versions"] for name, one in results.items()}
    return "\n".join([*lines, *(f"- {name}: {text}" for name, text in versions.items()), ""])


def readme(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The cells of the table in docs/model.md: kind, compiler, and temp at each sequence in MB."""
    rows = []
    for kind, (_, window) in KINDS.items():
        for platform, compiler in zip(PLATFORMS, ("CPU", "TPU v5p", "H100"), strict=True):
            found = [results.get(f"{platform} {kind} {length}") for length in SEQUENCES]
            cells = ["–" if one is None else f"{one['temp'] / 1e6:,.1f}" for one in found]
            if window is None and any(found):
                rows.append([f"`{kind}`", compiler, *cells])
    return rows


def main() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    named = [word for word in sys.argv[1:] if word != "--missing"]
    for platform in named or PLATFORMS:
        for kind, length in names(platform):
            name = f"{platform} {kind} {length}"
            if "--missing" in sys.argv and name in results:
                continue
            results[name] = measured(*KINDS[kind], length, platform)
            print(name, results[name], file=sys.stderr, flush=True)
            write_rows(RESULTS, results)
    RESULTS.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
