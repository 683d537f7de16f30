"""Runs one layer of Mixtral 8x7B on an NVIDIA GPU, by kind of experts and of attention.

    python benchmarks/gpu_layer.py
    python benchmarks/gpu_layer.py --smoke

The layer has router, experts, attention and both norms. It runs forward and backward, with
gradients of the weights and of the tokens, on 8,192 tokens in bfloat16; a time is the median of
20 steps after 3 that are not counted. Writes `benchmarks/results/gpu_layer.md`, and beside it the
figures as JSON. Where Hugging Face's `transformers` with torch, or MaxText, is installed, their
layers of the same sizes run too. `--smoke` runs tiny sizes on the CPU and writes nothing.

`lent_gpu.py` times one of these layers beside its estimate. `flash` needs the extra `cudnn`. What a
kind does not support is a row that says why. Nobody has run the layers of `transformers` and
MaxText in this script yet; one that fails is a row that says how.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from kept_rows import write_rows

from nnx_pipeline import DecoderLayer, InputError, ModelConfig, preset
from nnx_pipeline.lab._timing.devices import device_of
from nnx_pipeline.train._useful import PASSES, flops_per_token

EXPERTS, ATTENTION = ("dense", "grouped", "capacity"), ("dot_product", "chunked", "flash")
RESULTS = Path(__file__).parent / "results" / "gpu_layer.json"
ABOUT = """# One layer of Mixtral 8x7B on a GPU

Attention, router, experts and norms, forward and backward, {tokens:,} tokens in {dtype} on one
{device}. The share of the peak counts what the model needs: three times the forward products of
the experts that were chosen, the projections and the causal half of attention, nothing twice. Made
by `python benchmarks/gpu_layer.py`.
"""
HEAD = "| layer of | experts | attention | ms | tokens/s | of the peak |\n|---|---|---|--:|--:|--:|"


class Sizes(NamedTuple):
    """How much is computed: the layer, the tokens, and how many steps are timed."""

    model: ModelConfig
    batch: int
    length: int
    warm: int
    steps: int


FULL = Sizes(preset("mixtral-8x7b").model, batch=2, length=4096, warm=3, steps=20)
SMOKE = Sizes(
    dataclasses.replace(
        FULL.model, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=4
    ),
    *(2, 64, 1, 2),
)


def step(layer: DecoderLayer, x: jax.Array, cotangent: jax.Array) -> Any:
    """The gradients of the weights and of the tokens."""
    return jax.vjp(lambda layer, x: layer(x)[0], layer, x)[1](cotangent)


def ours(sizes: Sizes, experts: str, attention: str) -> Callable[[], Any]:
    """One step of this project's layer, compiled; the call waits for its result."""
    config = dataclasses.replace(sizes.model, experts=experts, attention=attention)
    layer = jax.jit(lambda: DecoderLayer(config, rngs=nnx.Rngs(0)))()
    x, cotangent = tokens_of(sizes)
    compiled = jax.jit(step).lower(layer, x, cotangent).compile()
    return lambda: jax.block_until_ready(compiled(layer, x, cotangent))


def tokens_of(sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Random tokens and cotangents, `[batch, length, embed]`."""
    shape = (sizes.batch, sizes.length, sizes.model.embed_dim)
    keys = jax.random.split(jax.random.key(0))
    x, cotangent = (jax.random.normal(key, shape, sizes.model.dtype) for key in keys)
    return x, cotangent


def huggingface(sizes: Sizes) -> Callable[[], Any]:
    """One step of the layer of `transformers`, with torch's scaled-dot-product attention."""
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral import modeling_mixtral as theirs

    model = sizes.model
    config = MixtralConfig(
        hidden_size=model.embed_dim,
        intermediate_size=model.mlp_dim,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_local_experts=model.num_experts,
        num_experts_per_tok=model.num_experts_per_token,
        attn_implementation="sdpa",
    )
    device, dtype = jax.default_backend().replace("gpu", "cuda"), getattr(torch, model.dtype)
    layer = theirs.MixtralDecoderLayer(config, layer_idx=0).to(device, dtype)
    rotary = theirs.MixtralRotaryEmbedding(config).to(device)
    shape = (sizes.batch, sizes.length, model.embed_dim)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    cotangent = torch.randn(shape, device=device, dtype=dtype)
    positions = torch.arange(sizes.length, device=device)[None]

    def run() -> None:
        layer.zero_grad()
        found = layer(x, position_embeddings=rotary(x, positions))
        (found[0] if isinstance(found, tuple) else found).backward(cotangent)
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def maxtext(sizes: Sizes) -> Callable[[], Any]:
    """One step of MaxText's layer, with its grouped experts and cuDNN's attention."""
    import maxtext as package
    from maxtext.configs import pyconfig
    from maxtext.models.mixtral import MixtralDecoderLayer
    from maxtext.utils import maxtext_utils

    model = sizes.model
    base = Path(package.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(
        [
            *("", str(base), "run_name=layer", "hardware=gpu", "decoder_block=mixtral"),
            *("attention=cudnn_flash_te", "megablox=false", "sparse_matmul=true"),
            *("scan_layers=false", f"dtype={model.dtype}", f"base_emb_dim={model.embed_dim}"),
            *(f"base_mlp_dim={model.mlp_dim}", f"head_dim={model.head_dim}"),
            f"base_num_query_heads={model.num_heads}",
            f"base_num_kv_heads={model.num_kv_heads}",
            f"num_experts={model.num_experts}",
            f"num_experts_per_tok={model.num_experts_per_token}",
            *(f"per_device_batch_size={sizes.batch}", f"max_target_length={sizes.length}"),
        ]
    )
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    x, cotangent = tokens_of(sizes)
    positions = jnp.broadcast_to(jnp.arange(sizes.length), x.shape[:2])
    with mesh:
        layer = MixtralDecoderLayer(config, mesh, "train", rngs=nnx.Rngs(0))
    graph, weights = nnx.split(layer)

    def their_step(weights: Any, x: jax.Array, cotangent: jax.Array) -> Any:
        def forward(weights: Any, x: jax.Array) -> jax.Array:
            layer = nnx.merge(graph, weights)
            found = layer(x, jnp.ones_like(positions), positions, True, "train")
            return found[0] if isinstance(found, tuple) else found

        return jax.vjp(forward, weights, x)[1](cotangent)

    with mesh:
        compiled = jax.jit(their_step).lower(weights, x, cotangent).compile()
    return lambda: jax.block_until_ready(compiled(weights, x, cotangent))


# Name: the package that has to be there, and what makes a step.
PEERS: dict[str, tuple[str, Callable[[Sizes], Callable[[], Any]]]] = {
    "transformers": ("transformers", huggingface),
    "MaxText": ("maxtext", maxtext),
}


def median_seconds(run: Callable[[], Any], sizes: Sizes) -> float:
    """How long a step takes: the median of some, after others that are not counted."""
    for _ in range(sizes.warm):
        run()
    found = []
    for _ in range(sizes.steps):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def needed_flops(sizes: Sizes) -> float:
    """Operations of a step that the layer needs: those of a second layer in a model of two."""
    one, two = (
        flops_per_token(dataclasses.replace(sizes.model, num_layers=layers), sizes.length)
        for layers in (1, 2)
    )
    return PASSES * sizes.batch * sizes.length * (two - one)


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """What was found of each kind: `seconds`, or `reason`, why there are none."""
    for experts, attention in itertools.product(EXPERTS, ATTENTION):
        row: dict[str, Any] = {"layer": "ours", "experts": experts, "attention": attention}
        try:
            yield {**row, "seconds": median_seconds(ours(sizes, experts, attention), sizes)}
        except InputError as refusal:
            yield {**row, "reason": str(refusal)}
        except jax.errors.JaxRuntimeError as failure:  # such as too little memory
            yield {**row, "reason": str(failure).splitlines()[0]}
    for name, (package, make) in PEERS.items():
        row = {"layer": name, "experts": "", "attention": ""}
        if importlib.util.find_spec(package) is None:
            yield {**row, "reason": "not installed"}
            continue
        try:
            yield {**row, "seconds": median_seconds(make(sizes), sizes)}
        except Exception as failure:  # of others' code, of any version
            lines = str(failure).splitlines() or [""]
            yield {**row, "reason": f"{type(failure).__name__}: {lines[0]}"}


def line(row: dict[str, Any], sizes: Sizes, peak: float | None) -> str:
    """A row of the table."""
    cells = [row["layer"], row["experts"], row["attention"]]
    if "reason" in row:
        return "| " + " | ".join([*cells, row["reason"], "–", "–"]) + " |"
    seconds = row["seconds"]
    share = "–" if peak is None else f"{needed_flops(sizes) / seconds / peak:.1%}"
    cells += [f"{1e3 * seconds:.2f}", f"{sizes.batch * sizes.length / seconds:,.0f}", share]
    return "| " + " | ".join(cells) + " |"


def peak_of(device: Any) -> float | None:
    """Operations per second of a device in bfloat16; None if not known."""
    kind = device.device_kind.lower()
    known = (device_of("cuda", name) for name in ("h100", "h200") if name in kind)
    return next((one.flops["bf16"] for one in known if one), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    smoke = parser.parse_args().smoke
    if smoke:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        sys.exit(refusal("gpu_layer", "an NVIDIA GPU", "--smoke"))
    sizes, device = SMOKE if smoke else FULL, jax.devices()[0]
    peak = peak_of(device)
    text = ABOUT.format(
        tokens=sizes.batch * sizes.length, dtype=sizes.model.dtype, device=device.device_kind
    )
    print(f"{text}\n{HEAD}", flush=True)
    found, lines = [], []
    for row in rows(sizes):
        found.append(row)
        lines.append(line(row, sizes, peak))
        print(lines[-1], flush=True)
    if not smoke:
        write_rows(RESULTS, {"device": device.device_kind, "rows": found})
        RESULTS.with_suffix(".md").write_text("\n".join([text, HEAD, *lines, ""]))


def refusal(script: str, needed: str, instead: str) -> int:
    """Says that a script needs a device, or an option in its place; returns the exit code."""
    print(
        f"{script}: needs {needed}, and JAX finds {jax.devices()[0].device_kind}; run it where "
        f"there is one, or with {instead}",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    main()
