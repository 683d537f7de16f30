"""Models back out: what Orbax reads from them is what came in, to the bit."""

import itertools

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import (
    arrays_by_path,
    mesh_of,
    model_on_mesh,
    new_model,
    replace,
    small_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from maxtext_data import (
    assert_same_leaves,
    checkpoint,
    config_of,
    flat,
    laid_out,
    nested,
    parameters,
    read,
    state_in,
    write,
)

import linen_compat
from linen_compat.checkpoints._convert import From, To, plan
from linen_compat.formats._orbax import new_arrays as stored
from linen_compat.formats._orbax.inspect import inspect
from linen_compat.formats._orbax.layouts import NNX, PIPELINED, SCANNED, UNSCANNED
from nnx_pipeline import InputError, Mixtral

LAYOUTS = {
    "unscanned": (UNSCANNED, 1, 1),
    "scanned": (SCANNED, 1, 1),
    "two stages of two": (PIPELINED, 2, 1),
    "circular": (PIPELINED, 2, 2),
    "circular, several layers per stage": (PIPELINED, 1, 2),
}


def leaves_in(name, make=laid_out, first=None):
    """Kept leaves in one of these layouts, by counting."""
    format, stages, repeats = LAYOUTS[name]
    arguments = (format.removeprefix("maxtext:"), stages, repeats)
    return make(first, *arguments) if first is not None else make(*arguments)


def options(name):
    format, stages, repeats = LAYOUTS[name]
    return {"format": format, "stages": stages, "repeats": repeats}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_orbax_reads_is_what_came_in(tmp_path, name):
    model = linen_compat.load(checkpoint("unscanned"), config_of())
    linen_compat.save(model, tmp_path / "out", step=3, **options(name))
    expected = {f"params/params/{k}": v for k, v in leaves_in(name, first=parameters()).items()}
    assert_same_leaves(read(tmp_path / "out"), {**expected, "step": np.asarray(3, np.int32)})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@settings(max_examples=8)
@given(first=st.sampled_from(list(LAYOUTS)), second=st.sampled_from(list(LAYOUTS)))
def test_from_any_layout_through_nnx_into_any(tmp_path_factory, first, second):
    """The whole training state: parameters, moments, counts, step."""
    folder = tmp_path_factory.mktemp("state")
    write(folder / "first", leaves_in(first, make=state_in))
    state = linen_compat.load_train_state(folder / "first", config_of())
    linen_compat.save_train_state(state, folder / "nnx", "nnx")
    again = linen_compat.load_train_state(folder / "nnx", config_of())
    linen_compat.save_train_state(again, folder / "second", **options(second))
    assert_same_leaves(read(folder / "second"), leaves_in(second, make=state_in))


def test_standard_readers_of_orbax(tmp_path):
    """The folder itself, and in MaxText's arrangement its manager of steps."""
    model = linen_compat.load(checkpoint("unscanned"), config_of())
    linen_compat.save(model, tmp_path / "run" / "3" / "items", step=3)
    by_standard = ocp.StandardCheckpointer().restore(tmp_path / "run" / "3" / "items")
    assert by_standard["step"] == 3
    handlers = {"items": ocp.PyTreeCheckpointHandler()}
    manager = ocp.CheckpointManager(tmp_path / "run", item_handlers=handlers)
    with manager:
        assert manager.latest_step() == 3
        tree = manager.restore(3, args=ocp.args.Composite(items=ocp.args.PyTreeRestore()))
    assert_same_leaves(flat(tree["items"]["params"]["params"]), laid_out(parameters(), "scanned"))


def test_orbax_restores_onto_a_mesh(tmp_path):
    model = linen_compat.load(checkpoint("unscanned"), config_of())
    linen_compat.save(model, tmp_path / "out")
    sharding = jax.sharding.NamedSharding(mesh_of("fsdp=2"), jax.sharding.PartitionSpec("fsdp"))
    found = inspect(tmp_path / "out")
    name = "token_embedder/embedding"
    leaf = found.parameters[name]
    target = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    item = nested({f"params/params/{name}": target})
    args = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
    )
    tree = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(tmp_path / "out", args=args)
    array = tree["params"]["params"]["token_embedder"]["embedding"]
    assert array.sharding == sharding
    np.testing.assert_array_equal(array, parameters()[name])


def test_a_model_on_a_mesh_in_its_own_stages_and_repeats(tmp_path):
    mesh = mesh_of("stage=2,fsdp=2")
    config = replace(config_of(), "pipeline", num_repeats=2)
    model = linen_compat.load(checkpoint("unscanned"), config, mesh=mesh)
    linen_compat.save(model, tmp_path / "out", PIPELINED)
    expected = laid_out(parameters(), "pipelined", 2, 2)
    found = read(tmp_path / "out")
    assert_same_leaves(found, {f"params/params/{k}": v for k, v in expected.items()})


def test_large_arrays_are_written_in_blocks(tmp_path, monkeypatch):
    """Blocks of 5000 bytes cut arrays within a layer too, at places that do not divide it."""
    monkeypatch.setattr(stored, "_BLOCK_BYTES", 5000)
    model = linen_compat.load(checkpoint("unscanned"), config_of())
    linen_compat.save(model, tmp_path / "out", PIPELINED, stages=2, repeats=2)
    expected = laid_out(parameters(), "pipelined", 2, 2)
    found = read(tmp_path / "out")
    assert_same_leaves(found, {f"params/params/{k}": v for k, v in expected.items()})


def dense(**model):
    return small_config(model={"num_experts": 1, "num_experts_per_token": 1, **model})


def test_a_dense_model_under_the_names_of_llama(tmp_path):
    config = dense()
    model = Mixtral(config, rngs=nnx.Rngs(0))
    linen_compat.save(model, tmp_path / "out", UNSCANNED)
    assert "params/params/decoder/layers_0/mlp/wi_0/kernel" in read(tmp_path / "out")
    back = linen_compat.load(tmp_path / "out", config)
    for path, array in arrays_by_path(model).items():
        np.testing.assert_array_equal(arrays_by_path(back)[path], array)


@pytest.mark.parametrize("sharding", ["explicit", "auto"])
def test_a_vocabulary_that_no_mesh_divides(tmp_path, sharding):
    """In every format it has its true size, whatever the mesh, and comes back to the bit."""
    config = dense(vocab_size=65)
    source = new_model(config)
    mesh = mesh_of("stage=2,tensor=2", sharding)
    linen_compat.save(model_on_mesh(source, config, mesh), tmp_path / "0", "huggingface")
    walk = itertools.pairwise(["huggingface", PIPELINED, "nnx", "huggingface"])
    for number, (before, after) in enumerate(walk):
        stack = {} if after == "huggingface" else {"stages": 2, "repeats": 1}
        one, other = tmp_path / str(number), tmp_path / str(number + 1)
        plan(From(one, before, config=config), To(other, after, **stack)).run()
    for folder, form in (("0", "huggingface"), ("1", PIPELINED), ("3", "huggingface")):
        back = linen_compat.load(tmp_path / folder, config, mesh=mesh_of("tensor=2,fsdp=2"))
        for path, array in arrays_by_path(source).items():
            found = arrays_by_path(back)[path]
            assert found.size == array.size
            np.testing.assert_array_equal(np.asarray(found).ravel(), np.ravel(array), form)


def test_another_attention_scale_goes_into_the_query_kernels_of_maxtext_alone(tmp_path):
    config = dense(attention_scale=0.5)
    model = Mixtral(config, rngs=nnx.Rngs(0))
    linen_compat.save(model, tmp_path / "maxtext")
    linen_compat.save(model, tmp_path / "nnx", NNX)
    same = linen_compat.load(tmp_path / "nnx", config)
    folded = linen_compat.load(tmp_path / "maxtext", dense())
    own, kept, scaled = (m.pipeline.layers.attention for m in (model, same, folded))
    np.testing.assert_array_equal(kept.query[...], own.query[...])
    np.testing.assert_array_equal(scaled.query[...], own.query[...] * 0.5)
    np.testing.assert_array_equal(scaled.key[...], own.key[...])
    with pytest.raises(InputError, match=r"are for 0.5; set it to 0.5"):
        linen_compat.load(tmp_path / "nnx", dense())


def test_what_is_there_is_not_overwritten(tmp_path):
    model = Mixtral(dense(), rngs=nnx.Rngs(0))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="full exists already; choose a new folder"):
        linen_compat.save(model, tmp_path / "full")
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.txt"]
    (tmp_path / "empty").mkdir()
    linen_compat.save(model, tmp_path / "empty")
    assert linen_compat.load(tmp_path / "empty", dense())


def test_nothing_is_left_of_a_save_that_fails(tmp_path, monkeypatch):
    model = Mixtral(dense(), rngs=nnx.Rngs(0))
    write_array, calls = stored.NewArrays.write, []

    def fail_later(self, *arguments):
        calls.append(arguments)
        if len(calls) > 9:
            raise KeyboardInterrupt
        write_array(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(stored.NewArrays, "write", fail_later)
        with pytest.raises(KeyboardInterrupt):
            linen_compat.save(model, tmp_path / "run" / "0" / "items")
    assert not list(tmp_path.iterdir())
    linen_compat.save(model, tmp_path / "run" / "0" / "items")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "maxtext"}, "format='maxtext' is not known"),
        ({"format": PIPELINED, "stages": 3}, "do not split into 3 stages"),
        ({"format": SCANNED, "stages": 2}, "leave them out"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path, arguments, message):
    model = Mixtral(dense(), rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match=message):
        linen_compat.save(model, tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_parameters_without_a_name_are_refused(tmp_path):
    model = new_model(small_config(model={"num_layers": 1, "num_shared_experts": 1}))
    with pytest.raises(
        InputError, match=r"num_shared_experts=1 without kv_lora_rank does not exist"
    ):
        linen_compat.save(model, tmp_path / "new")
    turns = new_model(small_config(model={"sliding_window": 2, "full_attention_every": 2}))
    with pytest.raises(InputError, match=r"full_attention_every=2 makes layers of several kinds"):
        linen_compat.save(turns, tmp_path / "new")
    assert not (tmp_path / "new").exists()
