"""Every name that a file system allows, of sources and destinations alike."""

import os
import random
import shutil

import numpy as np
import pytest
from maxtext_data import DATA, assert_same_leaves, checkpoint, config_of, full_state, read, write

import linen_compat
from linen_compat.formats._new_folder import new_folder
from linen_compat.formats._orbax.arrays import StoredArrays, array_specs
from linen_compat.formats._orbax.new_arrays import NewArrays
from linen_compat.formats._paths import in_folder
from nnx_pipeline import InputError

CONFIG = str(DATA / "unscanned" / "config.yml")
LLAMA = DATA.parent / "huggingface" / "llama"
HARD = [
    *("x%31", "a?b=c", "a#b", "100%", "%", "%2F", "file:", "c:d@e", "&amp;", "a+b"),
    *(" ", " a", "a ", "a b", "new\nline", "tab\t", "\x01\x7f", "\\", "a\\b", "back\\"),
    *("'q'", '"q"', "$HOME", "~", "*", "[a]", "[red]", "{x}", "(1)", "a|b;c<d>", "-lead", "--to"),
    *("...", "..a", "x.__lock", "é", "e\u0301", "中文", "😀", os.fsdecode(b"\xff\xfe"), "n" * 255),
]
# One of each kind of difficulty, for what takes longer.
FEW = [
    "x%31",
    "a?b#c",
    "new\nline",
    "a\\b",
    "[red]",
    "-x.__lock",
    "中 \"'😀",
    os.fsdecode(b"\xff"),
]


def random_names(count):
    """Names of characters that mean something somewhere, no two alike."""
    draw = random.Random(0)
    letters = "%?#\\:@&=+*[]{}()<>|;!$'\"`~^ \n\t\r.-_01aA2fFé中😀\udcff"
    names = dict.fromkeys(HARD)
    while len(names) < count:
        name = "".join(draw.choices(letters, k=draw.randint(1, 40)))
        if name not in (".", "..") and len(os.fsencode(name)) <= 255:
            names[name] = None
    return list(names)


def test_200_names_hold_what_was_written_there_and_nothing_elsewhere(tmp_path):
    """All of them beside each other, so that a name that is read as another one shows."""
    names = random_names(200)
    for number, name in enumerate(names):
        with new_folder(tmp_path / name) as folder:
            arrays = NewArrays(folder)
            arrays.create("params/x", (3,), np.dtype(np.int32))
            arrays.write("params/x", (), np.full(3, number, np.int32))
            arrays.finish()
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    for number, name in enumerate(names):
        assert sorted(os.listdir(tmp_path / name)) == ["_METADATA", "d", "manifest.ocdbt"], name
        assert array_specs(tmp_path / name)["params/x"].shape == (3,)
        assert StoredArrays(tmp_path / name).read("params/x").tolist() == [number] * 3, name


def decoy(path):
    """Another checkpoint under each name that a URL would make of this one."""
    for other in (path.name.replace("%31", "1"), path.name.partition("?")[0].partition("#")[0]):
        if other not in ("", path.name):
            shutil.copytree(checkpoint("unscanned") / "0", path.with_name(other))


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", FEW)
def test_commands_read_and_write_what_is_named(tmp_path, bridge, name):
    for folder in ("in", "out"):
        (tmp_path / folder).mkdir()
    source, out = tmp_path / "in" / name, tmp_path / "out" / name
    shutil.copytree(checkpoint("unscanned") / "2", source)
    decoy(source)
    assert bridge("inspect", source).code == 0
    ended = bridge("check", source, "--config", CONFIG, "--read", "--json", "-")
    assert (ended.code, ended.json["fits"]) == (0, True)
    ended = bridge("convert", source, out, "--to", "maxtext:unscanned")
    assert ended.code == 0, ended.err
    assert os.listdir(tmp_path / "out") == [name]
    out.rename(tmp_path / "plain")
    assert_same_leaves(read(tmp_path / "plain"), full_state())


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW[::2])
def test_functions_read_and_write_what_is_named(tmp_path, name):
    state = linen_compat.load_train_state(checkpoint("unscanned"), config_of())
    linen_compat.save_train_state(state, tmp_path / name, "maxtext:unscanned")
    again = linen_compat.load_train_state(tmp_path / name, config_of())
    (tmp_path / "models").mkdir()
    linen_compat.save(again.model, tmp_path / "models" / name, step=7)
    model = linen_compat.load(tmp_path / "models" / name, config_of())
    np.testing.assert_array_equal(model.head[...], state.model.head[...])
    assert sorted(os.listdir(tmp_path)) == sorted([name, "models"])
    (tmp_path / name).rename(tmp_path / "plain")
    assert_same_leaves(read(tmp_path / "plain"), full_state())


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW[1::2])
def test_hugging_face_folders(tmp_path, bridge, name):
    shutil.copytree(LLAMA, tmp_path / name)
    model = linen_compat.load(tmp_path / name)
    (tmp_path / "out").mkdir()
    linen_compat.save(model, tmp_path / "out" / name, "huggingface")
    again = linen_compat.load(tmp_path / "out" / name)
    np.testing.assert_array_equal(again.head[...], model.head[...])
    ended = bridge("convert", tmp_path / "out" / name, tmp_path / "nnx" / name, "--to", "nnx")
    assert ended.code == 0, ended.err
    assert os.listdir(tmp_path / "nnx") == [name]


@pytest.mark.parametrize("name", ["a\\b", "x%31"])
def test_arrays_in_files_of_their_own(tmp_path, name):
    """Orbax without a database: one folder for each array."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "plain", {"params": {"x": np.arange(3)}})
    (tmp_path / "plain").rename(tmp_path / name)
    assert StoredArrays(tmp_path / name).read("params/x").tolist() == [0, 1, 2]


def test_a_way_through_links_and_parents_is_the_systems(tmp_path, bridge, monkeypatch):
    """`link/..` is beside what the link leads to, and not beside the link."""
    (tmp_path / "far" / "inner").mkdir(parents=True)
    write(tmp_path / "far" / "state", full_state())
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    monkeypatch.chdir(tmp_path)
    assert bridge("inspect", "link/../state").code == 0
    assert bridge("convert", "./far//state", "link/../out", "--to", "nnx").code == 0
    assert (tmp_path / "far" / "out" / "_METADATA").is_file()


def test_links_of_this_process_have_plain_names(tmp_path, monkeypatch):
    """Where the folder for temporary files has a hard name itself, another one is taken."""
    from linen_compat.formats import _paths as folders

    hard = tmp_path / "a\\b"
    hard.mkdir()
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(hard))
    folders.temporary_folder.cache_clear()
    try:
        path = in_folder(hard)["path"]
        assert "\\" not in path
        assert os.path.realpath(path) == str(hard)
        monkeypatch.setattr(folders.os, "access", lambda *arguments: False)
        folders.temporary_folder.cache_clear()
        with pytest.raises(InputError, match="set TMPDIR to another one"):
            in_folder(hard / "other")
    finally:
        folders.temporary_folder.cache_clear()


@pytest.mark.parametrize("kind", ["too long", "a circle"])
def test_names_that_the_system_does_not_take_are_one_line(tmp_path, bridge, kind):
    name, message = tmp_path / ("x" * 300), "x is a longer name than the file system allows; give"
    if kind == "a circle":
        name, message = tmp_path / "to", f"{tmp_path / 'to'} is a link that leads back to itself"
        name.symlink_to(tmp_path / "fro")
        (tmp_path / "fro").symlink_to(name)
    source = checkpoint("unscanned")
    commands = [("inspect", source, "--json", name)]
    if kind == "too long":  # what is read from a link says that nothing is there
        commands += [("inspect", name), ("convert", source, name, "--to", "nnx")]
        commands += [("check", source, "--config", name)]
    for words in commands:
        ended = bridge(*words)
        assert (ended.code, message in ended.err) == (2, True), (words, ended.err)
        assert len(ended.err.splitlines()) == 1
