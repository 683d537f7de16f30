"""Training states: training goes on where MaxText stopped."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from helpers import assert_same_placement, mesh_of, optax_promotion, replace
from maxtext_data import DATA, assert_same_leaves, checkpoint, config_of, full_state, read, write

import linen_compat
from linen_compat.formats._streams import Mismatch
from nnx_pipeline import InputError, Mixtral, preset
from nnx_pipeline.train import Batch, abstract_state, jit_train_step, make_state

TOLERANCE = 2e-5
KEPT = dict(np.load(DATA / "unscanned" / "train_batch.npz"))


def batch():
    return Batch(
        tokens=KEPT["inputs"],
        targets=KEPT["targets"],
        weights=(KEPT["targets_segmentation"] != 0).astype(np.float32),
        positions=KEPT["inputs_position"],
        segment_ids=KEPT["inputs_segmentation"],
    )


def with_learning_rate(state, rate):
    """MaxText's comes from a schedule; here it is a number of the config."""

    def one(model):
        if not isinstance(model, Mixtral):
            return model
        train = dataclasses.replace(model.config.train, learning_rate=rate)
        model.config = dataclasses.replace(model.config, train=train)
        return model

    return jax.tree.map(one, state, is_leaf=lambda leaf: isinstance(leaf, Mixtral))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "repeats", "steps"), [("", 1, (1, 2)), ("stage=2,fsdp=2", 2, (1,))]
)
def test_training_goes_on_where_maxtext_stopped(tmp_path, axes, repeats, steps):
    config = replace(config_of(), "pipeline", num_repeats=repeats)
    mesh = mesh_of(axes)
    state = linen_compat.load_train_state(checkpoint("unscanned") / "0", config, mesh=mesh)
    for step in steps:
        state = with_learning_rate(state, float(KEPT["learning_rate"][int(state.step)]))
        with jax.set_mesh(mesh), optax_promotion():
            state, _ = jit_train_step(state, mesh)(state, batch())
        linen_compat.save_train_state(state, tmp_path / str(step), "maxtext:unscanned")
        found = read(tmp_path / str(step))
        expected = full_state(step)
        assert sorted(found) == sorted(expected)
        for path, leaf in expected.items():
            difference = np.max(np.abs(found[path].astype(np.float64) - leaf))
            assert difference <= TOLERANCE, f"{path} after step {step}: {difference}"


@pytest.mark.parametrize("name", ["unscanned", "scanned_nnx"])
def test_every_leaf_comes_back_to_the_bit(tmp_path, name):
    """But for the state of random number generators, which is knowingly ignored."""
    state = linen_compat.load_train_state(checkpoint(name), config_of(name))
    linen_compat.save_train_state(state, tmp_path / "out", f"maxtext:{name.removesuffix('_nnx')}")
    source = read(checkpoint(name) / "2" / "items")
    kept = {path: leaf for path, leaf in source.items() if not path.startswith("nnx_aux/")}
    assert (len(kept) < len(source)) == (name == "scanned_nnx")
    assert_same_leaves(read(tmp_path / "out"), kept)


@pytest.mark.parametrize("owners", [False, True])
def test_on_a_mesh_every_array_is_where_training_puts_it(owners):
    config = replace(config_of(), "train", shard_optimizer_over_data=owners)
    mesh = mesh_of("data=2,fsdp=2")
    state = linen_compat.load_train_state(checkpoint("scanned_nnx"), config, mesh=mesh)
    with jax.set_mesh(mesh):
        assert_same_placement(state, abstract_state(config, mesh))
    moments = optax.tree.get(state.optimizer, "mu")
    spec = moments.pipeline.layers.attention.query[...].sharding.spec
    assert ("data" in str(spec)) == owners


def test_moments_of_bfloat16_parameters_are_bfloat16():
    config = replace(config_of(), "model", param_dtype="bfloat16")
    state = linen_compat.load_train_state(checkpoint("unscanned"), config)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"bfloat16", "int32"}


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ("opt_state/", "not a complete training state: it lacks mu, nu, count; load"),
        (
            "opt_state/0/nu",
            "the optimizer's state is opt_state/0/mu, opt_state/0/count, opt_state/2/count, and",
        ),
        ("step", "not a complete training state: it lacks step; load"),
        (
            "opt_state/0/mu/params/decoder/logits_dense/kernel",
            "mu/.*logits_dense/kernel is missing",
        ),
    ],
)
def test_what_is_no_full_state_is_refused(tmp_path, lacks, message):
    leaves = {k: v for k, v in full_state().items() if not k.startswith(lacks)}
    write(tmp_path / "items", leaves)
    with pytest.raises(Mismatch, match=message):
        linen_compat.load_train_state(tmp_path, config_of())


def test_training_begins_from_parameters_alone():
    """As migration_guide.md does it, with the loss that the loaded model has."""
    config, mesh, source = config_of(), mesh_of("stage=2,fsdp=2"), checkpoint("unscanned") / "1"
    with jax.set_mesh(mesh):
        fresh = dataclasses.replace(make_state(config, mesh), model=None)
        state = dataclasses.replace(fresh, model=linen_compat.load(source, config))
        assert_same_placement(state, abstract_state(config, mesh))
        saved = linen_compat.load_train_state(source, config)
        with optax_promotion():
            losses = [jit_train_step(one, mesh)(one, batch())[1].loss for one in (state, saved)]
    assert losses[0] == losses[1]


def test_hugging_face_has_no_training_state(tmp_path):
    state = abstract_state(preset("tiny"), mesh_of(""))
    with pytest.raises(InputError, match=r"no place for the optimizer's.*give one of: maxtext"):
        linen_compat.save_train_state(state, tmp_path / "out", "huggingface")


def test_counts_that_differ_are_refused(tmp_path):
    leaves = {**full_state(), "opt_state/2/count": np.asarray(9, np.int32)}
    write(tmp_path / "items", leaves)
    with pytest.raises(Mismatch, match="counts 3 steps of Adam and 9 of its learning rate"):
        linen_compat.load_train_state(tmp_path, config_of())
