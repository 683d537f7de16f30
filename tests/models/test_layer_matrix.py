"""Kinds of experts × schedules × gather modes with flash attention: all trace, or say why not."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import mesh_of, packed_batch, small_config

from nnx_pipeline import Mixtral
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.ops._fast_attention import kernels
from nnx_pipeline.train import loss_and_gradients

pytestmark = [pytest.mark.slow, pytest.mark.numbers]

OPTIONS: dict[str, tuple[str, ...]] = {
    "experts": ("dense", "grouped", "capacity"),
    "schedule": ("circular", "1f1b"),
    "fsdp_gather": ("use", "step", "prefetch"),
}
CASES = [dict(zip(OPTIONS, case, strict=True)) for case in itertools.product(*OPTIONS.values())]


def test_every_combination_traces_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """1F1B refuses to prefetch weights of two repeats, by name; all else traces with gradients.

    `flash` is the kind of attention whose kernel has a derivative of its own. Every pair of these
    options, with the values and with the other kinds, is in test_option_pairs.py.
    """
    plain = kernels.KERNELS["flash"]

    def interpreted(*arrays: Any, options: Any, **how: Any) -> Any:
        return plain(*arrays, options=dataclasses.replace(options, interpret=True), **how)

    monkeypatch.setitem(kernels.KERNELS, "flash", interpreted)
    refused = []
    for case in CASES:
        try:
            trace(case)
        except InputError as error:
            refused.append((case, str(error)))
    prefetched = {"schedule": "1f1b", "fsdp_gather": "prefetch"}
    wanted = [case for case in CASES if prefetched.items() <= case.items()]
    assert [case for case, _ in refused] == wanted
    assert all("pipeline.fsdp_gather=prefetch holds" in reason for _, reason in refused)


def trace(case: dict[str, str]) -> None:
    """Traces loss and gradients with two repeats on four devices."""
    pipeline: dict[str, Any] = {name: case[name] for name in ("schedule", "fsdp_gather")}
    config = small_config(
        model={"num_layers": 4, "head_dim": 8, "attention": "flash", "experts": case["experts"]},
        pipeline={"num_repeats": 2, "num_microbatches": 2, **pipeline},
        train={"global_batch": 4, "sequence_length": 128},
    )
    with jax.set_mesh(mesh_of("stage=2,fsdp=2")):
        abstract = jax.eval_shape(functools.partial(_model, config))
        batch = jax.tree.map(jnp.asarray, packed_batch(config))
        jax.jit(loss_and_gradients).trace(abstract, batch)


def _model(config: Any) -> Mixtral:
    return Mixtral(config, rngs=nnx.Rngs(0))
