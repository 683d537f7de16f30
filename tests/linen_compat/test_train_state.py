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
from nnx_pipeline import InputError, preset
from nnx_pipeline.train import Batch, abstract_state, jit_train_step, make_state

TOLERANCE = 2e-5
CONFIG = DATA / "unscanned" / "config.yml"
KEPT = dict(np.load(DATA / "unscanned" / "train_batch.npz"))


def batch():
    return Batch(
        tokens=KEPT["inputs"],
        targets=KEPT["targets"],
        weights=(KEPT["targets_segmentation"] != 0).astype(np.float32),
        positions=KEPT["inputs_position"],
        segment_ids=KEPT["inputs_segmentation"],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "pipeline", "steps"),
    [
        ("", {}, (1, 2)),
        ("stage=2,fsdp=2", {"num_repeats": 2}, (1,)),
        ("stage=2,fsdp=2", {"num_repeats": 2, "stage_layers": "2,1,0,1"}, (1,)),
        ("stage=2,fsdp=2", {"schedule": "1f1b", "stage_layers": "1,3"}, (1,)),
    ],
)
def test_training_goes_on_where_maxtext_stopped(tmp_path, axes, pipeline, steps):
    config = replace(config_of(), "pipeline", **pipeline)
    mesh = mesh_of(axes)
    state = linen_compat.load_train_state(checkpoint("unscanned") / "0", config, mesh=mesh)
    for step in steps:
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


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("format", ["nnx", "maxtext:pipelined", "maxtext:unscanned"])
def test_which_stage_has_how_many_layers_is_stored_nowhere(tmp_path, format):
    """Saved from one distribution of the layers, and loaded for others, on other meshes."""
    source, mesh = checkpoint("unscanned"), mesh_of("stage=2,fsdp=2")
    config = replace(config_of(), "pipeline", num_repeats=2, stage_layers="1,2,0,1")
    state = linen_compat.load_train_state(source, config, mesh=mesh)
    linen_compat.save_train_state(state, tmp_path / "out", format)
    if format == "maxtext:unscanned":
        assert_same_leaves(read(tmp_path / "out"), read(source / "2" / "items"))
    other = replace(config_of(), "pipeline", stage_layers="0,3,1")
    for loaded, wanted in (
        ((config_of(), None), (config_of(), None)),
        ((config, mesh), (config, mesh)),
        ((other, mesh_of("stage=3")), (other, mesh_of("stage=3"))),
        ((other, mesh), (replace(config_of(), "pipeline", stage_layers="2,2"), mesh)),
    ):
        found = linen_compat.load_train_state(tmp_path / "out", loaded[0], mesh=loaded[1])
        first = linen_compat.load_train_state(source, wanted[0], mesh=wanted[1])
        for got, want in zip(*map(jax.tree.leaves, (found, first)), strict=True):
            np.testing.assert_array_equal(got, want)


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


def of_float32_in_bfloat16():
    known = config_of()
    model = dataclasses.replace(known.model, param_dtype="bfloat16")
    train = dataclasses.replace(known.train, master_dtype="float32")
    return dataclasses.replace(known, model=model, train=train)


def test_a_master_copy_begins_as_the_stored_parameters(tmp_path):
    """In float32, of which the parameters are the rounding; MaxText has no place for both."""
    state = linen_compat.load_train_state(checkpoint("unscanned"), of_float32_in_bfloat16())
    stored = linen_compat.load(checkpoint("unscanned"), config_of())
    master = optax.tree.get(state.optimizer, "master")
    for kept, want, rounded in zip(
        *map(jax.tree.leaves, (master, stored, state.model)), strict=True
    ):
        np.testing.assert_array_equal(kept, want)
        np.testing.assert_array_equal(rounded, np.asarray(want).astype(rounded.dtype))
    with pytest.raises(InputError, match=r"no place for the master copy .*save the state as 'nnx'"):
        linen_compat.save_train_state(state, tmp_path / "out", "maxtext:scanned")
    linen_compat.save_train_state(state, tmp_path / "out", "nnx")
    again = linen_compat.load_train_state(tmp_path / "out", of_float32_in_bfloat16())
    for got, want in zip(*map(jax.tree.leaves, (again, state)), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(Mismatch, match=r"no place; set train.master_dtype as in its training"):
        linen_compat.load_train_state(tmp_path / "out", config_of())
    linen_compat.load(tmp_path / "out", config_of())


def test_a_conversion_leaves_no_copy_behind(tmp_path, bridge):
    state = linen_compat.load_train_state(checkpoint("unscanned"), of_float32_in_bfloat16())
    linen_compat.save_train_state(state, tmp_path / "out", "nnx")
    words = ("convert", tmp_path / "out", tmp_path / "to", "--to")
    ended = bridge(*words, "maxtext:scanned")
    assert (ended.code, ended.err.count("\n")) == (1, 1), ended.err
    assert "has the master copy of the parameters (train.master_dtype), for which" in ended.err
    assert bridge(*words, "maxtext:scanned", "--parameters-only").code == 0
    ended = bridge("convert", tmp_path / "out", tmp_path / "same", "--to", "nnx")
    assert ended.code == 0, ended.err
    assert_same_leaves(read(tmp_path / "same"), read(tmp_path / "out"))
    assert bridge("check", tmp_path / "same", "--config", CONFIG, "--read").code == 0
