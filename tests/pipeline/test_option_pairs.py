"""Every option with every other one: loss and gradients are those of one device."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    assert_same_placement,
    fresh_model,
    mesh_of,
    packed_batch,
    small_config,
)

from nnx_pipeline import Config, MeshConfig
from nnx_pipeline.train import loss_and_gradients
from nnx_pipeline.train.step import batch_sharding

pytestmark = [pytest.mark.slow, pytest.mark.numbers]

BATCH = 32
Case = dict[str, Any]
OPTIONS: dict[str, tuple[Any, ...]] = {
    "mesh": (
        "stage=4,fsdp=2",
        "stage=2,fsdp=2,tensor=2",
        "data=2,stage=2,expert=2",
        "data=2,stage=2,fsdp=2",
    ),
    "sharding": ("explicit", "auto"),
    "schedule": ("circular", "1f1b"),
    "num_repeats": (1, 2),
    "num_microbatches": (4, 8),
    "forwarding_delay": (1, 2),
    "shift": ("ppermute", "slice", "pad"),
    "remat": ("full", "qkv_proj_offloaded", "none"),
    "save_decoder_layer_input": (True, False),
    "fsdp_gather": ("use", "step", "prefetch"),
    "backward": (None, "accumulate"),
    "shard_optimizer_over_data": (False, True),
    "dropout_rate": (0.0, 0.3),
    "experts": ("dense", "grouped", "capacity"),
    "attention": ("dot_product", "chunked"),
}
# Few cases that have every pair: a row has the place of the value of each option, in their order.
ROWS = (
    "010110021210001",
    "301000110101110",
    "100011201011020",
    "210101000100121",
    "211000221000011",
    "300111110010001",
    "111110020101100",
    "001000101201120",
    "200111210211111",
    "300001021111020",
    "110101011000111",
    "311000200200100",
    "010011200101111",
    "210111120111100",
    "100000110200121",
    "010000011000120",
)
TABLE: list[Case] = [
    {name: values[int(place)] for (name, values), place in zip(OPTIONS.items(), row, strict=True)}
    for row in ROWS
]
MODEL = ("dropout_rate", "experts", "attention")
TRAIN = ("shard_optimizer_over_data",)


def layers_of(case: Case) -> int:
    """One per visit of a stage, or four, which are two per visit on two stages without repeats.

    Compiling them is what a case takes.
    """
    return max(4, MeshConfig.parse(case["mesh"]).stage * case["num_repeats"])


def config_of(case: Case, layers: int | None = None) -> Config:
    """The config of a case; an InputError where its options do not go together."""
    pipeline = {k: v for k, v in case.items() if k not in (*MODEL, *TRAIN, "mesh")}
    # With this room no choice is dropped.
    room = {"capacity_factor": 2.0} if case["experts"] == "capacity" else {}
    config = small_config(
        model={
            "num_layers": layers or layers_of(case),
            **{name: case[name] for name in MODEL},
            **room,
        },
        pipeline=pipeline,
        train={
            "global_batch": BATCH,
            "load_balance_weight": 0.1,
            "router_z_loss_weight": 0.01,
            **{name: case[name] for name in TRAIN},
        },
    )
    config.check_mesh(MeshConfig.parse(case["mesh"]))
    return config


def pairs(case: Case) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(case.items(), 2))


@functools.cache
def sequential(dropout_rate: float, microbatches: int, layers: int) -> list[np.ndarray]:
    """Loss and gradients on one device, the layers one after the other."""
    case: Case = {name: values[0] for name, values in OPTIONS.items()}
    case |= {"mesh": "", "dropout_rate": dropout_rate, "num_microbatches": microbatches}
    return values_of(case, layers)


def values_of(case: Case, layers: int | None = None) -> list[np.ndarray]:
    """The loss, then every gradient with its layers in order."""
    config = config_of(case, layers)
    mesh = mesh_of(case["mesh"], case["sharding"])
    model = fresh_model(config, mesh)
    with jax.set_mesh(mesh):
        batch = jax.tree.map(
            lambda x: jax.device_put(jnp.asarray(x), batch_sharding(mesh, model.layout)),
            packed_batch(config),
        )
        key = jax.random.key(7)
        (loss, _), gradients = jax.jit(loss_and_gradients)(model, batch, key)
        if not case["shard_optimizer_over_data"]:
            assert_same_placement(gradients, model)
    weights = jax.tree.leaves(gradients.pipeline.layers)
    stacked = [np.asarray(leaf).reshape(-1, *leaf.shape[3:]) for leaf in weights]
    ends = [gradients.embedding, gradients.norm, gradients.head]
    return [np.asarray(loss), *stacked, *map(np.asarray, jax.tree.leaves(ends))]


def check(case: Case) -> None:
    config = config_of(case)
    found = values_of(case)
    layers, microbatches = config.model.num_layers, config.pipeline.num_microbatches
    expected = sequential(case["dropout_rate"], microbatches, layers)
    assert_close(found[0], expected[0], 1e-5)
    assert_close(found[1:], expected[1:], 1e-4)


@pytest.mark.parametrize("case", TABLE, ids=ROWS)
def test_every_pair(case: Case) -> None:
    check(case)


def test_every_pair_is_in_the_table() -> None:
    """But for those that contradict each other, which the config says."""
    every = {
        pair
        for (a, first), (b, second) in itertools.combinations(OPTIONS.items(), 2)
        for pair in itertools.product([(a, v) for v in first], [(b, v) for v in second])
    }
    one_f_one_b = ("schedule", "1f1b")
    assert every - set().union(*map(pairs, TABLE)) == {
        (one_f_one_b, ("forwarding_delay", 2)),
        (one_f_one_b, ("backward", "accumulate")),
    }


@pytest.mark.parametrize(("schedule", "sharding"), [("circular", "explicit"), ("1f1b", "auto")])
def test_four_repeats(schedule: str, sharding: str) -> None:
    """The prefetch window moves on more than once, and 1F1B has the same stage in any repeat."""
    case: Case = {name: values[0] for name, values in OPTIONS.items()}
    gather = "prefetch" if schedule == "circular" else "step"
    case |= {"schedule": schedule, "sharding": sharding, "fsdp_gather": gather}
    check({**case, "mesh": "stage=2,fsdp=2,tensor=2", "num_repeats": 4, "dropout_rate": 0.3})
