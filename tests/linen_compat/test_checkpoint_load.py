"""Checkpoints of MaxText in every layout: the logits that MaxText computes, in their places."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from helpers import arrays_by_path, assert_same_placement, mesh_of, replace
from maxtext_data import (
    DATA,
    KEPT,
    PIPELINES,
    checkpoint,
    config_of,
    full_state,
    laid_out,
    nested,
    parameters,
    reference,
    write,
)

import linen_compat
from linen_compat.formats._in_memory import parameter_paths
from linen_compat.formats._orbax.stream import OrbaxSource
from linen_compat.formats._streams import Mismatch
from nnx_pipeline import InputError
from nnx_pipeline.train import abstract_batch, abstract_state, jit_train_step

TOLERANCE = 1e-5


def logits_error(model, name="unscanned", mesh=None):
    """The largest difference to the logits that MaxText computed."""
    kept = reference(name)

    def apply(model, tokens, positions, segments):
        return model(tokens, positions=positions, segment_ids=segments)

    inputs = (kept["inputs"], kept["inputs_position"], kept["inputs_segmentation"])
    if mesh is None:
        logits = jax.jit(apply)(model, *inputs)
    else:
        with jax.set_mesh(mesh):
            logits = jax.jit(apply)(model, *inputs)
    return np.max(np.abs(np.asarray(logits) - kept["logits_dense"]))


@pytest.mark.parametrize("name", KEPT)
def test_logits_are_those_of_maxtext(name):
    model = linen_compat.load(checkpoint(name), config_of(name))
    assert logits_error(model, name) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "repeats", "sharding"),
    [("stage=2,fsdp=2", 2, "explicit"), ("stage=4,tensor=2", 1, "auto"), ("expert=2", 1, "auto")],
)
def test_on_a_mesh_every_array_is_where_training_puts_it(axes, repeats, sharding):
    config = replace(config_of(), "pipeline", num_repeats=repeats, sharding=sharding)
    mesh = mesh_of(axes, sharding=sharding)
    model = linen_compat.load(checkpoint("scanned_nnx"), config, mesh=mesh)
    with jax.set_mesh(mesh):
        expected = abstract_state(config, mesh).model
        with_ambient_mesh = linen_compat.load(checkpoint("scanned_nnx"), config)
    assert_same_placement(model, expected)
    assert_same_placement(with_ambient_mesh, expected)
    assert logits_error(model, "scanned_nnx", mesh) <= TOLERANCE


@pytest.mark.parametrize(("stages", "repeats"), PIPELINES)
def test_pipelined_layouts(tmp_path, stages, repeats):
    """Written by Orbax, laid out by counting; loaded for a pipeline of other numbers."""
    leaves = laid_out(parameters(), "pipelined", stages, repeats)
    write(tmp_path / "2" / "items", {f"params/params/{k}": v for k, v in leaves.items()})
    model = linen_compat.load(tmp_path, config_of())
    expected = linen_compat.load(checkpoint("unscanned"), config_of())
    for path, array in arrays_by_path(expected).items():
        np.testing.assert_array_equal(arrays_by_path(model)[path], array, err_msg=path)


def test_without_stages_a_pipeline_of_one_stage_is_loaded():
    config = replace(config_of(), "pipeline", num_repeats=2, num_microbatches=2)
    model = linen_compat.load(checkpoint("unscanned"), config)
    assert model.config.pipeline == config.pipeline
    assert model.pipeline.layers.attention.query.shape == (2, 1, 2, 32, 4, 8)
    assert logits_error(model) <= TOLERANCE


FORMS = {
    "one wrapper": ("params/", ""),
    "none, and value": ("", "/value"),
    "two, and value": ("params/params/", "/value"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["7/items", "items", "."])
def test_forms_of_parameters_alone(tmp_path, form, where):
    before, after = FORMS[form]
    leaves = laid_out(parameters(), "scanned")
    write(tmp_path / "run" / where, {before + k + after: v for k, v in leaves.items()})
    model = linen_compat.load(tmp_path / "run", config_of())
    assert logits_error(model) <= TOLERANCE


def test_a_step_that_orbax_has_not_finished_is_passed_over(tmp_path):
    """It has another name, unlike a step with a number, which is the latest whatever it holds."""
    scanned = {f"params/{k}": v for k, v in laid_out(parameters(), "scanned").items()}
    write(tmp_path / "3" / "items", scanned)
    (tmp_path / "7.orbax-checkpoint-tmp-123" / "items").mkdir(parents=True)
    assert logits_error(linen_compat.load(tmp_path, config_of())) <= TOLERANCE
    (tmp_path / "7" / "items").mkdir(parents=True)
    with pytest.raises(Mismatch, match=r"7, the latest step, .* was not finished"):
        linen_compat.load(tmp_path, config_of())


def test_generators_beside_parameters_are_ignored(tmp_path):
    leaves = {f"{k}/value": v for k, v in laid_out(parameters(), "scanned").items()}
    leaves["decoder/dropout/rngs/params/key/value"] = np.zeros(4, np.uint32)
    leaves["decoder/layers/dropout/rngs/params/count/value"] = np.zeros(4, np.uint32)
    write(tmp_path / "items", leaves)
    assert logits_error(linen_compat.load(tmp_path, config_of())) <= TOLERANCE


@pytest.mark.parametrize("ocdbt", [False, True])
@pytest.mark.parametrize("zarr3", [False, True])
def test_every_way_in_which_orbax_stores_arrays(tmp_path, ocdbt, zarr3):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    leaves = {f"params/params/{k}": v for k, v in laid_out(parameters(), "scanned").items()}
    scale = "params/params/decoder/decoder_norm/scale"
    leaves[scale] = np.zeros_like(leaves[scale])  # what older checkpoints leave out
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "items", nested(leaves))
    model = linen_compat.load(tmp_path, config_of())
    assert not np.any(model.norm.scale[...])
    expected = linen_compat.load(checkpoint("unscanned"), config_of())
    np.testing.assert_array_equal(model.head[...], expected.head[...])
    query = model.pipeline.layers.attention.query[...]
    np.testing.assert_array_equal(query, expected.pipeline.layers.attention.query[...])


def test_only_the_dtype_of_the_config_changes_values():
    bfloat = replace(config_of(), "model", param_dtype="bfloat16")
    wide = linen_compat.load(checkpoint("scanned_params_only_bf16"), config_of())
    narrow = linen_compat.load(checkpoint("scanned_params_only_bf16"), bfloat)
    for path, array in parameter_paths(narrow).items():
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array.astype(jnp.float32), parameter_paths(wide)[path])


def test_nothing_larger_than_a_shard_is_read(monkeypatch):
    read = OrbaxSource.read
    sizes = []

    def spy(self, path, *arguments, **options):
        array = read(self, path, *arguments, **options)
        sizes.append((path, array.size))
        return array

    monkeypatch.setattr(OrbaxSource, "read", spy)
    mesh = mesh_of("fsdp=2,tensor=2")
    model = linen_compat.load(checkpoint("scanned_nnx"), config_of(), mesh=mesh)
    layers = config_of().model.num_layers
    for path, array in parameter_paths(model).items():
        inner = path.removeprefix("pipeline.layers.")
        shard = array.addressable_shards[0].data.size // (layers if inner != path else 1)
        found = [size for name, size in sizes if name == inner]
        assert max(found) == shard, path
        # Each shard once, however many devices hold it.
        assert sum(found) == array.size, path


def without(leaf):
    def change(leaves):
        return {k: v for k, v in leaves.items() if k != leaf}

    return change


def renamed(leaf, name):
    return lambda leaves: {name if k == leaf else k: v for k, v in leaves.items()}


def reshaped(leaf, shape):
    return lambda leaves: {
        k: np.zeros(shape, v.dtype) if k == leaf else v for k, v in leaves.items()
    }


GATE = "params/params/decoder/layers_2/MoeBlock_0/gate/kernel"
TABLE = "params/params/token_embedder/embedding"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(GATE), f"{GATE} is missing"),
        (without(TABLE), f"{TABLE} is missing"),
        (renamed(GATE, f"{GATE}s"), rf"{GATE} is missing \(the checkpoint has '{GATE}s'\)"),
        (renamed("step", "steps"), "steps has no place in the model"),
        (reshaped(GATE, (32, 8)), rf"{GATE} is \[32, 8\] instead of \[32, 4\]"),
        (reshaped(TABLE, (256, 32)), rf"{TABLE} is \[256, 32\] instead of \[128, 32\]"),
        (
            lambda leaves: {**leaves, "params/params/extra": np.zeros(3)},
            "params/extra has no place",
        ),
    ],
)
def test_leaves_that_do_not_fit_are_refused_by_name(tmp_path, change, message):
    write(tmp_path / "items", change(full_state()))
    with pytest.raises(Mismatch, match=message):
        linen_compat.load(tmp_path, config_of())


@pytest.mark.parametrize(
    ("layout", "stages", "message"),
    [
        ("unscanned", 1, r"decoder/layers_4/.* is missing"),
        ("scanned", 1, r"decoder/layers/.* is \[32, 4\] instead of \[32, 6\]"),
        ("pipelined", 2, r"pipeline_module.*: the checkpoint holds 4 layers .* the model has 6"),
    ],
)
def test_another_number_of_layers(tmp_path, layout, stages, message):
    leaves = laid_out(parameters(), layout, stages)
    write(tmp_path / "items", {f"params/params/{k}": v for k, v in leaves.items()})
    config = replace(config_of(), "model", num_layers=6)
    with pytest.raises(Mismatch, match=message):
        linen_compat.load(tmp_path, config)


def test_a_dense_model_is_not_a_routed_one():
    config = replace(config_of(), "model", num_experts=1, num_experts_per_token=1)
    with pytest.raises(Mismatch, match="mlp/wi_0/kernel is missing"):
        linen_compat.load(checkpoint("scanned_nnx"), config)


def test_another_attention_scale_is_refused():
    config = replace(config_of(), "model", attention_scale=0.5)
    with pytest.raises(InputError, match=r"the query kernels of .* are for 1.0; set it to 1.0"):
        linen_compat.load(checkpoint("scanned_nnx"), config)


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(InputError, match="holds no Orbax checkpoint"):
        linen_compat.load(tmp_path, config_of())


def test_truncated_files_are_refused(tmp_path):
    # Parameters alone: which file of a full state holds the moments, not read here, is chance.
    write(tmp_path / "items", {f"params/params/{k}": v for k, v in parameters().items()})
    largest = max((f for f in (tmp_path / "items").rglob("*") if f.is_file()), key=_size)
    largest.write_bytes(largest.read_bytes()[: _size(largest) // 2])
    with pytest.raises(Mismatch, match=r"(params/params|cannot be read)"):
        linen_compat.load(tmp_path, config_of())


def _size(path):
    return path.stat().st_size


def yaml_of_a_pipeline():
    """MaxText's own YAML of a run with two stages, two repeats and a microbatch per sequence."""
    return linen_compat.config_from_maxtext(
        {
            **yaml.safe_load((DATA / "unscanned" / "config.yml").read_text()),
            "ici_pipeline_parallelism": 2,
            "num_pipeline_microbatches": 4,
            "per_device_batch_size": 2,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "stack"),
    [
        ("stage=2,fsdp=2", (2, 2, 1)),  # a microbatch of one sequence does not split
        ("stage=4", (1, 4, 1)),  # four layers are no four stages of two repeats
        ("stage=2,fsdp=4", (2, 2, 1)),
        ("fsdp=8", (2, 1, 2)),  # nor do four sequences split over eight devices
        ("context=2", (2, 1, 2)),
    ],
)
def test_weights_load_where_a_batch_of_training_would_not_split(axes, stack):
    config, mesh = yaml_of_a_pipeline(), mesh_of(axes)
    assert (config.pipeline.num_repeats, config.train.global_batch) == (2, 4)
    model = linen_compat.load(checkpoint("unscanned"), config, mesh=mesh)
    expected = arrays_by_path(linen_compat.load(checkpoint("unscanned"), config_of()))
    for path, array in arrays_by_path(model).items():
        if path.startswith("pipeline"):
            assert array.shape[:3] == stack
        flat = np.asarray(array).reshape(expected[path].shape)
        np.testing.assert_array_equal(flat, expected[path], err_msg=path)
    state = linen_compat.load_train_state(checkpoint("unscanned"), config, mesh=mesh)
    assert state.model.pipeline.layers.attention.query.shape[:3] == stack


@pytest.mark.parametrize(
    ("axes", "pipeline", "message"),
    [
        ("stage=4", {"num_microbatches": 2}, "num_microbatches=2 does not split over stage=4"),
        ("stage=2", {"num_microbatches": 1}, "num_microbatches=1 does not split over stage=2"),
        (
            "stage=4",
            {"num_microbatches": 4, "forwarding_delay": 2},
            "num_microbatches=4 is too few for stage=4 with pipeline.forwarding_delay=2",
        ),
        (
            "stage=4",
            {"num_microbatches": 2, "schedule": "1f1b"},
            "num_microbatches=2 does not split over stage=4",
        ),
    ],
)
def test_weights_load_where_microbatches_do_not_fit_the_stages(axes, pipeline, message):
    """The rule is said by the step of training, and by the model when it is called."""
    config, mesh = replace(config_of().for_batch(8), "pipeline", **pipeline), mesh_of(axes)
    model = linen_compat.load(checkpoint("unscanned"), config, mesh=mesh)
    assert model.config.pipeline.num_microbatches == pipeline["num_microbatches"]
    state = linen_compat.load_train_state(checkpoint("unscanned"), config, mesh=mesh)
    with jax.set_mesh(mesh):
        for call in (
            lambda: model(jnp.zeros((8, 16), jnp.int32)),
            lambda: jit_train_step(state, mesh).lower(state, abstract_batch(config, mesh)),
        ):
            with pytest.raises(InputError, match=message):
                call()


def test_the_batch_is_checked_when_it_is_given():
    mesh = mesh_of("stage=2,fsdp=2")
    model = linen_compat.load(checkpoint("unscanned"), yaml_of_a_pipeline(), mesh=mesh)
    tokens = reference("unscanned")["inputs"]
    apply = jax.jit(lambda model, tokens: model(tokens))
    with jax.set_mesh(mesh):
        with pytest.raises(InputError, match="a microbatch of 1 sequence does not split"):
            apply(model, tokens[:4])
        logits = np.asarray(apply(model, np.concatenate([tokens[:4], tokens[:4]])))
    np.testing.assert_array_equal(logits[:4], logits[4:])


@pytest.mark.parametrize(
    ("stages", "repeats", "axes", "asked", "stack"),
    [
        (4, 1, "stage=2", 2, (2, 2, 1)),
        (2, 2, "stage=4", 3, (1, 4, 1)),
        (1, 4, "stage=2", 1, (1, 2, 2)),
    ],
)
def test_more_or_fewer_stages_and_repeats_than_stored(
    tmp_path, stages, repeats, axes, asked, stack
):
    leaves = laid_out(parameters(), "pipelined", stages, repeats)
    write(tmp_path / "items", {f"params/params/{k}": v for k, v in leaves.items()})
    config = replace(config_of(), "pipeline", num_repeats=asked)
    model = linen_compat.load(tmp_path, config, mesh=mesh_of(axes))
    query = model.pipeline.layers.attention.query[...]
    assert query.shape[:3] == stack
    for layer, own in enumerate(np.asarray(query).reshape(4, *query.shape[3:])):
        stored = parameters()[f"decoder/layers_{layer}/self_attention/query/kernel"]
        np.testing.assert_array_equal(own, stored)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("tensor=8", r"num_heads=4 does not split over tensor=8 .*; choose another mesh"),
        ("stage=8", r"num_layers=4 does not split into 8 stages .*; choose another mesh"),
    ],
)
def test_a_mesh_that_cannot_hold_the_weights(axes, message):
    """The sizes of a checkpoint are what they are: the cure is never to change them."""
    with pytest.raises(InputError, match=message) as error:
        linen_compat.load(checkpoint("unscanned"), config_of(), mesh=mesh_of(axes))
    assert "multiple" not in str(error.value)
