"""Checkpoints that are damaged or incomplete: what is lost is named, by every command alike."""

import json
import re
import shutil

import numpy as np
import pytest
from maxtext_data import DATA, checkpoint, full_state, read, state_in, write

import linen_compat
from linen_compat.checkpoint import inspect
from linen_compat.maxtext_config import read_config
from linen_compat.streams import Mismatch
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
        linen_compat.load(step, read_config(CONFIG))
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


def test_a_leaf_is_named_whichever_file_is_cut_or_removed(tmp_path, step, bridge):
    items = step / "items"
    files = [*items.rglob("d/*"), items / "ocdbt.process_0" / "manifest.ocdbt"]
    whole = {path: path.read_bytes() for path in files}
    assert len(whole) > 3
    for path, content in whole.items():
        for kept in (None, 0, len(content) // 3, len(content) - 1):
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


def test_the_latest_step_is_named_when_it_is_incomplete_and_no_other_is_taken(step, bridge):
    (step.parent / "13" / "items").mkdir(parents=True)
    ended = bridge("check", step.parent, "--config", CONFIG)
    assert ended.code == 1
    assert f"{step.parent / '13'}, the latest step, has no _METADATA" in ended.err
    assert f"give another step, such as {step}" in ended.err
    assert bridge("check", step, "--config", CONFIG).code == 0


@pytest.mark.parametrize("place", ["run", "step", "items"])
def test_a_stray_config_json_does_not_make_it_hugging_face(step, place):
    folder = {"run": step.parent, "step": step, "items": step / "items"}[place]
    (folder / "config.json").write_text("{}")
    model = linen_compat.load(folder, read_config(CONFIG))
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
