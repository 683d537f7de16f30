"""What the tests of several kinds of experts share: kernels, tokens, and a plain sum."""

from typing import Any

import jax
import jax.numpy as jnp
from helpers import float_rows
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline import Layout
from nnx_pipeline.ops._experts import ExpertKernels

EXPERTS, EMBED, MLP = 4, 8, 16


def put(x: Any, spec: P) -> Any:
    """An array on the ambient mesh."""
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), spec))


def kernels_of(*leading: int) -> ExpertKernels:
    into, out = (*leading, EXPERTS, EMBED, MLP), (*leading, EXPERTS, MLP, EMBED)
    return ExpertKernels(*(float_rows(*one, seed=i) / 4 for i, one in enumerate((into, into, out))))


def summed(x: Any, weights: Any, kernels: ExpertKernels, chosen: Any) -> Any:
    """A plain sum over experts, whose derivative is JAX's."""
    total = jnp.zeros_like(x)
    for expert, (gate, up, down) in enumerate(zip(*kernels, strict=True)):
        share = jnp.where(chosen == expert, weights, 0).sum(-1, keepdims=True)
        total += share * ((jax.nn.silu(x @ gate) * (x @ up)) @ down)
    return total


def with_gradients(mix: Any, *args: Any) -> Any:
    result, pull_back = jax.vjp(mix, *args)
    return result, pull_back(jnp.cos(result))


def kernels_on_mesh(*stage: str) -> ExpertKernels:
    """`kernels_of` as a layer stores them, or two stages of them where `stage` is named."""
    into = Layout().spec(*stage, "expert", "embed_of_expert", "mlp")
    out = Layout().spec(*stage, "expert", "mlp", "embed_of_expert")
    return ExpertKernels(*map(put, kernels_of(*[2] * len(stage)), (into, into, out)))
