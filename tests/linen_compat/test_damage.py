"""Checkpoints that are damaged or incomplete: what is lost is named, by every command alike."""

import json
import os
import re
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from maxtext_data import DATA, checkpoint, full_state, lists, nested, read, state_in, write

import linen_compat
from linen_compat.formats._orbax.inspect import inspect
from linen_compat.formats._streams import Mismatch
from linen_compat.maxtext.config import config_from_yaml
from nnx_pipeline import InputError

CONFIG = str(DATA / "unscanned" / "config.yml")
LEAF = r"(params|opt_state)/\S+/(kernel|scale|embedding|wi_0|wi_1|wo)"


@pytest.fixture
def step(tmp_path):
    """A step of a run, to be damaged."""
    shutil.copytree(checkpoint("unscanned") / "2", tmp_path / "run" / "2")
    return tmp_path / "run" / "2"


def cut(path, kept):
    path.write_bytes(path.read_bytes()[:kept])


def test_the_leaf_in_a_cut_file_is_named_by_all_alike(tmp_path, step, bridge):
    data = max((step / "items" / "ocdbt.process_0" / "d").iterdir(), key=_size)
    cut(data, 1000)
    with pytest.raises(Mismatch) as error:
        linen_compat.load(step, config_from_yaml(CONFIG))
    (leaf,) = re.findall(rf"^({LEAF}) in ", str(error.value))
    assert leaf[0].startswith("params/params/")
    for words in (
        ("check", step, "--config", CONFIG, "--read"),
        ("convert", step, tmp_path / "out", "--to", "maxtext:scanned"),
    ):
        ended = bridge(*words)
        assert ended.code == 1
        assert f"{leaf[0]} in " in ended.err
        assert "cannot be read, the checkpoint is damaged" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_a_leaf_is_named_whichever_file_is_cut_or_removed(tmp_path, step, bridge):
    items = step / "items"
    files = [*items.rglob("d/*"), items / "ocdbt.process_0" / "manifest.ocdbt"]
    whole = {path: path.read_bytes() for path in files}
    assert len(whole) > 3
    # On a busy machine a store has several files, and what ends all but the last is read no more.
    written = {path: path.stat().st_mtime_ns for path in files}
    last = {max(folder.iterdir(), key=written.__getitem__) for folder in items.rglob("d")}
    for path, content in whole.items():
        ends = [len(content) - 1] if path in {*last, files[-1]} else []
        for kept in (None, 0, len(content) // 3, *ends):
            path.unlink() if kept is None else cut(path, kept)
            ended = bridge("convert", step, tmp_path / "out", "--to", "maxtext:scanned")
            assert (ended.code, len(re.findall(LEAF, ended.err))) == (1, 1), (path, kept)
            assert "cannot be read" in ended.err or "is missing" in ended.err
            assert [p.name for p in tmp_path.iterdir()] == ["run"]
            path.write_bytes(content)


def _size(path):
    return path.stat().st_size


@pytest.mark.parametrize("kept", [None, 0, 500])
@pytest.mark.parametrize(
    "name", ["manifest.ocdbt", "_sharding", "array_metadatas/process_0", "_METADATA"]
)
def test_small_files_that_are_cut_or_gone_are_named(step, bridge, name, kept):
    file = step / "items" / name
    if kept is None:
        file.unlink()
    else:
        cut(file, min(kept, _size(file) - 10))
    ended = bridge("check", step, "--config", CONFIG)
    if name == "_sharding" and kept is None:  # Orbax does not write one for arrays of numpy
        assert ended.code == 0
        return
    assert ended.code == 1
    named = LEAF if name == "manifest.ocdbt" and kept is not None else re.escape(str(file))
    assert re.search(named, ended.err)
    assert "NoneType" not in ended.err


@pytest.mark.parametrize("place", ["run", "step", "items"])
def test_without_metadata_it_is_the_checkpoint_that_does_not_fit(step, bridge, place):
    (step / "items" / "_METADATA").unlink()
    folder = {"run": step.parent, "step": step, "items": step / "items"}[place]
    for words in (("inspect", folder), ("check", folder, "--config", CONFIG)):
        ended = bridge(*words)
        assert ended.code == 1
        assert "_METADATA" in ended.err


LATEST = {
    "not written to its end": (
        lambda p: (p / "items").mkdir(parents=True),
        "has no _METADATA in it or in a folder in it",
    ),
    "a link to nothing": (lambda p: p.symlink_to(p.parent / "gone"), "is a broken symlink"),
    "a link to itself": (lambda p: p.symlink_to(p), "is a broken symlink"),
    "a file": (lambda p: p.write_text(""), "is not a folder"),
    "an empty folder": (lambda p: p.mkdir(), "has no _METADATA in it or in a folder in it"),
    "a link to itself inside": (
        lambda p: (p.mkdir(), (p / "items").symlink_to(p / "items")),
        "cannot be read, the checkpoint is damaged: Too many levels of symbolic links",
    ),
    "metadata that link to themselves": (
        lambda p: (
            (p / "items").mkdir(parents=True),
            (p / "items/_METADATA").symlink_to("_METADATA"),
        ),
        "cannot be read, the checkpoint is damaged: Too many levels of symbolic links",
    ),
    "a folder of files": (
        lambda p: shutil.copytree(p.parent / "2" / "items" / "d", p),
        "has no _M",
    ),
}


@pytest.mark.parametrize("kind", LATEST)
def test_the_latest_step_is_named_and_no_other_is_taken(tmp_path, step, bridge, kind):
    make, message = LATEST[kind]
    make(step.parent / "13")
    (step.parent / "notes").mkdir()
    for words in (
        ("inspect", step.parent),
        ("check", step.parent, "--config", CONFIG),
        ("convert", step.parent, tmp_path / "out", "--to", "nnx"),
    ):
        ended = bridge(*words)
        assert ended.code == 1
        assert f"{step.parent / '13'}, the latest step, {message}" in ended.err
        assert f"give another step by its name, such as {step}" in ended.err
    for load in (linen_compat.load, linen_compat.load_train_state):
        with pytest.raises(Mismatch, match=f"13, the latest step, {message}"):
            load(step.parent, config_from_yaml(CONFIG))
    assert bridge("check", step, "--config", CONFIG).code == 0


def test_two_folders_of_one_step_are_not_chosen_from(step, bridge):
    shutil.copytree(step, step.parent / "002")
    ended = bridge("inspect", step.parent)
    assert (ended.code, "are both step 2, the latest" in ended.err) == (1, True)
    (step.parent / "3").symlink_to(step)
    assert bridge("inspect", step.parent).code == 0


def test_digits_of_other_scripts_are_no_steps(step):
    (step.parent / "٣").mkdir()
    assert inspect(step.parent).items == step / "items"


@pytest.mark.parametrize("what", ["13", "13/items", "13/items/_METADATA", "13/items/d", ".", "all"])
def test_what_may_not_be_read_is_no_damage(step, bridge, request, what):
    shutil.copytree(step, step.parent / "13")
    run = step.parent
    bridge("check", run, "--config", CONFIG, "--read")  # everything is imported
    places = run.rglob("*") if what == "all" else [run / what]
    for place in sorted(places, reverse=True):
        place.chmod(0)
    for parent in run.parents:
        if parent.name.startswith("pytest-") and os.access(parent, os.W_OK):
            parent.chmod(0o755)
    run.parent.chmod(0o755)
    request.getfixturevalue("as_nobody")
    ended = bridge("check", run, "--config", CONFIG, "--read")
    assert ended.code == 1
    assert re.search("may not be read by this user|Permission denied", ended.err), ended.err
    assert "damaged" not in ended.err
    assert "is missing" not in ended.err


@pytest.mark.parametrize("place", ["run", "step", "items"])
def test_a_stray_config_json_does_not_make_it_hugging_face(step, place):
    folder = {"run": step.parent, "step": step, "items": step / "items"}[place]
    (folder / "config.json").write_text("{}")
    model = linen_compat.load(folder, config_from_yaml(CONFIG))
    assert model.config.model.num_layers == 4


@pytest.mark.parametrize("layout", ["pipelined", "unscanned"])
def test_without_a_router_it_is_the_router_that_is_missing(tmp_path, bridge, layout):
    leaves = state_in(layout, 2, 2) if layout == "pipelined" else full_state()
    write(tmp_path / "items", {k: v for k, v in leaves.items() if "/gate/" not in k})
    ended = bridge("convert", tmp_path, tmp_path / "out", "--to", "maxtext:scanned")
    assert ended.code == 1
    assert "MoeBlock_0/gate/kernel is missing" in ended.err
    assert "mlp/" not in ended.err


def test_without_a_router_in_the_own_format_too(tmp_path, bridge):
    bridge("convert", checkpoint("unscanned"), tmp_path / "nnx", "--to", "nnx")
    leaves = {k: v for k, v in read(tmp_path / "nnx").items() if not k.endswith("router")}
    write(tmp_path / "items", leaves)
    file = tmp_path / "items" / "_METADATA"
    assert bridge("inspect", tmp_path / "items").err.count("does not say the attention_scale") == 1
    own = {**json.loads(file.read_text()), "custom_metadata": {"attention_scale": 1.0}}
    file.write_text(json.dumps(own))
    ended = bridge("convert", tmp_path / "items", tmp_path / "out", "--to", "maxtext:scanned")
    assert ended.code == 1
    assert "pipeline/layers/feed_forward/router is missing" in ended.err


@pytest.mark.parametrize("kind", ["another model", "damaged index"])
def test_json_is_written_whatever_is_wrong(tmp_path, step, bridge, kind):
    if kind == "another model":
        folder = write(tmp_path / "other", {"params/blocks/kernel": np.zeros((3, 4))})
        message = "checkpoint of another model"
    else:
        folder, message = step, "cannot be read"
        cut(next((step / "items" / "d").iterdir()), 100)
    ended = bridge("check", folder, "--config", CONFIG, "--read", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    whole = bridge("check", checkpoint("unscanned"), "--config", CONFIG, "--json", "-").json
    assert ended.code == 1
    assert (found["fits"], found["layout"], found["read_bytes"]) == (False, None, None)
    assert sorted(found) == sorted(whole)
    (problem,) = found["problems"]
    assert message in problem
    assert message in ended.err


def test_an_empty_folder_is_an_argument_that_cannot_be_used(tmp_path):
    with pytest.raises(InputError, match="holds no Orbax checkpoint") as error:
        inspect(tmp_path)
    assert not isinstance(error.value, Mismatch)


def without_promise(items):
    """Says of a checkpoint what older ones say: chunks of zeros may have been left out."""
    file = items / "_METADATA"
    values = json.loads(file.read_text())
    values.pop("store_array_data_equal_to_fill_value")
    file.write_text(json.dumps(values))


def in_files(folder, leaves):
    """Writes leaves by Orbax as it did long ago: each chunk is a file, and zeros are left out."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, lists(nested(leaves)))
    without_promise(folder)


def promise_zeros(items):
    """Says of a checkpoint that it has its chunks of zeros, as those of a present Orbax."""
    metadata = json.loads((items / "_METADATA").read_text())
    metadata["store_array_data_equal_to_fill_value"] = True
    (items / "_METADATA").write_text(json.dumps(metadata))


@pytest.mark.slow
@pytest.mark.parametrize("promised", [True, False])
def test_a_chunk_that_is_gone_is_named_and_never_read_as_zeros(tmp_path, bridge, promised):
    items, leaf = tmp_path / "items", "params/params/decoder/layers_1/self_attention/out/kernel"
    in_files(items, full_state())
    if promised:
        promise_zeros(items)
    (items / leaf.replace("/", ".") / "0.0.0").unlink()
    for words in (
        ("check", items, "--config", CONFIG, "--read"),
        ("convert", items, tmp_path / "out", "--to", "maxtext:scanned"),
    ):
        ended = bridge(*words)
        assert ended.code == 1
        assert f"{leaf} in {items}" in ended.err
        assert ("lacks a chunk" in ended.err) == (not promised)
    with pytest.raises(Mismatch, match=f"{leaf} in "):
        linen_compat.load(items, config_from_yaml(CONFIG))


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["step", "the step and the counts", "all but the parameters"])
def test_a_step_whose_chunk_is_gone_is_not_0(tmp_path, bridge, lost):
    """Older checkpoints leave zeros out, so that step 0 and a lost file look the same."""
    in_files(tmp_path / "items", full_state())
    scalars = ("step", "opt_state/0/count", "opt_state/2/count")
    for name in full_state():
        if not name.startswith("params/") and (lost.startswith("all") or name in scalars):
            if lost == "step" and name != "step":
                continue
            for chunk in (tmp_path / "items" / name.replace("/", ".")).glob("[0-9]*"):
                chunk.unlink()
    message = f"(step|count) in {tmp_path / 'items'} lacks a chunk: either its file is lost, or"
    to_nnx = ("convert", tmp_path, tmp_path / "out", "--to", "nnx")
    for words in (("check", tmp_path, "--config", CONFIG, "--read"), to_nnx):
        ended = bridge(*words)
        assert (ended.code, bool(re.search(message, ended.err))) == (1, True), ended.err
    with pytest.raises(Mismatch, match=message):
        linen_compat.load_train_state(tmp_path, config_from_yaml(CONFIG))
    linen_compat.load(tmp_path, config_from_yaml(CONFIG))  # which takes no step
    ended = bridge(*to_nnx, "--parameters-only")
    said = " ".join(ended.out.split())  # which is wrapped where the terminal ends
    assert (ended.code, "asks; step, whose chunk is missing" in said) == (0, True)
    assert "step" not in read(tmp_path / "out")
    promise_zeros(tmp_path / "items")  # what is missing is lost then, and the same is left behind
    shutil.rmtree(tmp_path / "out")
    assert bridge(*to_nnx).code == 1
    assert bridge(*to_nnx, "--parameters-only").code == 0
    assert "step" not in read(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tree_metadata", None),
        ("tree_metadata", {"params": {}}),
        ("tree_metadata", {"('step',)": 3}),
        ("tree_metadata", {"f(x)": {"value_metadata": {"value_type": "jax.Array"}}}),
        ("custom_metadata", 3),
        ("custom_metadata", {"attention_scale": "wide"}),
        ("custom_metadata", {"attention_scale": -1.0}),
        ("custom_metadata", {"crc32_of_metadata": "00000000"}),
    ],
)
def test_metadata_that_is_json_and_nothing_else(step, bridge, name, content):
    file = step / "items" / "_METADATA"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: content}))
    ended = bridge("inspect", step)
    assert (ended.code, f"{file} cannot be read, the checkpoint is damaged" in ended.err) == (
        1,
        True,
    )
    assert not re.search("NoneType|object|KeyError|attribute '", ended.err)
